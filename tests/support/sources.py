"""The syntax trees of the package's files, parsed once for all tests that read them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    """All nodes of a file, the module first."""
    return list(ast.walk(ast.parse(file.read_text())))
