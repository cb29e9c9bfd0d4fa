"""The package's files as tests read them: their syntax trees, and which options of conf/ ship."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

from pipeline.cli.compose import config_folders, group_options
from tests.support.own_folder import REPOSITORY


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    """All nodes of a file, the module first."""
    return list(ast.walk(ast.parse(file.read_text())))


@cache
def shipped_options() -> dict[str, list[str]]:
    """The options of conf/'s groups that belong to the repository: people keep options of their own there too."""
    options = group_options(config_folders())
    listed = subprocess.run(
        ["git", "ls-files", "conf", "pipeline/extras"], cwd=REPOSITORY, capture_output=True, text=True
    )
    known = {line.rpartition("conf/")[2] for line in listed.stdout.split()}
    if not known:  # no checkout
        return options
    return {group: [name for name in names if f"{group}/{name}.yaml" in known] for group, names in options.items()}
