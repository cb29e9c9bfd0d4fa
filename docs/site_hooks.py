"""Hooks of mkdocs: pages from outside docs/, the notebook as a page, and links to source files as plain code.

mkdocs.yml names this file. GitHub shows the same pages without it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ADDED = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "CHANGELOG_ARCHIVE.md")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
FOLDERS = ("reference/keys", "reference/verbs", "adr", "measurements")  # in the navigation as a folder


def on_config(config: Any) -> Any:
    config["nav"] = [_expand(entry) for entry in config["nav"]]
    return config


def _expand(entry: Any) -> Any:
    """Replace the name of a folder in the navigation by its pages."""
    if isinstance(entry, dict):
        return {title: _expand(value) for title, value in entry.items()}
    if isinstance(entry, list):
        return [_expand(each) for each in entry]
    if entry not in FOLDERS:
        return entry
    listed = () if entry == "adr" else ("README.md",)
    pages = sorted(path for path in (ROOT / "docs" / entry).glob("*.md") if path.name not in listed)
    pages.sort(key=lambda path: path.name != "README.md")
    return [f"{entry}/{path.name}" for path in pages]


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name in ADDED:
        text = (ROOT / name).read_text()
        text = text.replace("](docs/", "](").replace('src="docs/', 'src="')
        files.append(File.generated(config, name, content=text))
    for notebook in sorted((ROOT / "docs").rglob("*.ipynb")):
        name = notebook.relative_to(ROOT / "docs").with_suffix(".md").as_posix()
        files.append(File.generated(config, name, content=page_of(json.loads(notebook.read_text()))))
    return files


def page_of(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Keep links to pages of the site, and show other links to files of the repository as their text."""
    folder = Path(page.file.src_uri).parent

    def target(match: re.Match[str]) -> str:
        text, file, anchor = match[1], match[2], match[3] or ""
        if "://" in file or not file:
            return match[0]
        path = os.path.normpath((folder / file).as_posix())
        if path.startswith("../"):
            path = path.removeprefix("../")
        path = path.removeprefix("docs/")
        path = path.replace(".ipynb", ".md")
        if path.endswith("/"):
            path += "README.md"
        if files.get_file_from_path(path) is None:
            return text if text.startswith("`") else f"`{text}`" if "/" in text or "." in text else text
        return f"[{text}]({os.path.relpath(path, folder)}{anchor})"

    fenced = re.split(r"(?ms)(^```.*?^```$)", markdown)
    return "".join(part if part.startswith("```") else _lists(LINK.sub(target, part)) for part in fenced)


def _lists(text: str) -> str:
    """Put an empty line between a paragraph and its list. GitHub needs none, Python-Markdown does."""
    return re.sub(r"(?m)^((?!- |\d+\. |  |\||#|\s*$).+)\n(?=(?:- |1\. ))", r"\1\n\n", text)
