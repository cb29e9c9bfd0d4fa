"""Print sentences of random pages and docstrings, numbered, for readers who do not know the project:

    python -m tests.docs.sample --seed 7 [--pages 10] [--docstrings 30]

A reader marks the number of each sentence that had to be read twice. At most one in fifty is
the aim. Generated pages (docs/reference/keys and verbs, docs/measurements) and decisions are left out.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator

from tests.docs.pages import PAGES, REPOSITORY, name_of
from tests.docs.plain import sources

GENERATED = ("docs/reference/keys/", "docs/reference/verbs/", "docs/reference/commands.md", "docs/measurements/")


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield (file and name, text) of each docstring of pipeline/ and launch/ with over 60 characters."""
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
                text = ast.get_docstring(node)
                if text and len(text) > 60:
                    yield f"{file.relative_to(REPOSITORY)}: {getattr(node, 'name', 'the module')}", text


def sentences(text: str) -> list[str]:
    """Split a paragraph, a list's item or a table's row at full stops."""
    return [
        part for part in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*])", re.sub(r"\s+", " ", text).strip()) if len(part) > 15
    ]


def blocks(text: str) -> list[str]:
    """Return the paragraphs, items and rows of a page; code blocks and comments are left out."""
    text = re.sub(r"(?ms)^```.*?^```$|<!--.*?-->", "", text)
    return re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.)\s)", text)


def sample(seed: int, num_pages: int, num_docstrings: int) -> Iterator[tuple[str, list[str]]]:
    """Yield (source, sentences) of pages and docstrings that are drawn without replacement."""
    draw = random.Random(seed)
    written = [page for page in PAGES if not name_of(page).startswith(GENERATED)]
    for page in draw.sample(written, num_pages):
        yield name_of(page), [sentence for block in blocks(page.read_text()) for sentence in sentences(block)]
    for source, text in draw.sample(sorted(docstrings()), num_docstrings):
        yield source, [sentence for block in blocks(text) for sentence in sentences(block)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--docstrings", type=int, default=30)
    options = parser.parse_args()
    number = 0
    for source, found in sample(options.seed, options.pages, options.docstrings):
        print(f"\n## {source}")
        for sentence in found:
            number += 1
            print(f"{number}. {sentence}")


if __name__ == "__main__":
    main()
