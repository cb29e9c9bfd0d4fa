"""Write the parts of a page: its frame, headings, cards, tables, figures and legends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # a browser would refuse to load anything for it


def document(title: str, body: Iterable[str], css: str = "") -> str:
    """A whole page; `css` is added to what all pages share."""
    shared = Path(__file__).with_name("page.css").read_text()
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{escape(title)}</title><style>\n{shared}{css}</style></head><body><main>",
            *body,
            "</main></body></html>\n",
        ]
    )


def cards(entries: Iterable[tuple[str, str]]) -> str:
    """A large figure each, and what it is."""
    items = (f"<li><b>{escape(figure)}</b><span>{escape(text)}</span></li>" for figure, text in entries)
    return f'<ul class="cards">{"".join(items)}</ul>'


def figure(caption: str, content: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{content}</figure>"


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """(CSS colour, text)."""
    marks = (f'<li><i style="background:var(--{colour})"></i>{escape(text)}</li>' for colour, text in entries)
    return f'<ul class="legend">{"".join(marks)}</ul>'


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = (), label: str = "") -> str:
    """`numbers`: columns that are aligned to the right. It scrolls by itself where it is wider than the screen."""
    kinds = dict.fromkeys(set(numbers), ' class="number"')

    def line(tag: str, cells: Iterable[str]) -> str:
        inner = (f"<{tag}{kinds.get(index, '')}>{escape(cell)}</{tag}>" for index, cell in enumerate(cells))
        return f"<tr>{''.join(inner)}</tr>"

    head = line("th", headings).replace("<th", '<th scope="col"') if any(headings) else ""
    body = "".join(line("td", row) for row in rows)
    name = escape(label or next((heading for heading in headings if heading), "values"))
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{name}"><table>'
        f"{f'<thead>{head}</thead>' if head else ''}<tbody>{body}</tbody></table></div>"
    )


def folded(summary: str, content: str) -> str:
    """Closed until it is clicked."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def scrolled(text: str, label: str) -> str:
    """Text as it stands, which scrolls where it is wider than the screen."""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}"><pre>{escape(text)}</pre></div>'
    )
