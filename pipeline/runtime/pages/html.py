"""Render pages from Jinja2 templates, and parts of pages. A page loads no external resources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@cache
def _environment() -> Environment:
    """Return the environment. A template's name is its path below the package."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).parents[2]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, title: str, **values: Any) -> str:
    """Return the page; values are escaped unless the template marks them safe."""
    return _environment().get_template(template).render(**{"title": title, "css": "", "body": "", **values})


def document(title: str, body: Iterable[str], css: str = "") -> str:
    """Return a page from parts that are HTML already. `css` is added to the CSS that all pages share."""
    return render("runtime/pages/base.html", title, body="\n".join(body), css=css)


def _part(name: str, *values: Any) -> str:
    macros: Any = _environment().get_template("runtime/pages/parts.html").module
    return str(getattr(macros, name)(*values))


def cards(entries: Iterable[tuple[str, str]]) -> str:
    return _part("cards", list(entries))


def figure(caption: str, content: str) -> str:
    return _part("figure", caption, content)


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Render a legend from pairs of CSS colour and text."""
    return _part("legend", list(entries))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = (), label: str = "") -> str:
    """Render a table. numbers: the columns to align to the right."""
    return _part("table", headings, rows, list(numbers), label)


def folded(summary: str, content: str) -> str:
    """Render content that is hidden until the reader clicks on the summary."""
    return _part("folded", summary, content)


def scrolled(text: str, label: str) -> str:
    """Render preformatted text, which scrolls if it is wider than the screen."""
    return _part("scrolled", text, label)


def fixed(value: float | None, form: str = ".4f") -> str:
    """Format a number; a dash if there is none."""
    return "-" if value is None else format(value, form)
