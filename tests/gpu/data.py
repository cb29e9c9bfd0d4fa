"""Small data sets for GPU tests: `prepared(factory, name)` makes one once for all tests, and gives its words."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.data.prepare.run import prepare
from tests.support.made_once import made_once

SIZES = {
    "quickstart": ["data.synthetic.num_rows=6000"],
    "user_item": ["data.generator.num_rows=3000", "data.generator.num_users=100", "data.generator.num_items=60"],
    "conversions": ["data.generator.num_rows=3000", "data.generator.num_users=90", "data.generator.num_items=50"],
    "histories": [
        "data.generator.num_rows=3000",
        "data.generator.num_items=60",
        "data.generator.max_length=8",
        "data.generator.num_categories=12",
        "data.columns.sequence.history.max_length=8",
    ],
    "tags": ["data.generator.num_rows=3000", "data.generator.num_items=50", "data.generator.num_tags=40"],
}
HASHED = ["data.ids.kind=hash", "data.ids.hash_size=100000"]  # managed collision takes hashed ids


def prepared(factory: pytest.TempPathFactory, name: str, *more: str) -> list[str]:
    """Words that name the prepared data; `more` are words of its preparation."""

    def make(folder: Path) -> list[str]:
        words = [f"data={name}", *SIZES[name]]
        generate(load_config(GenerateJob, [*words, f"output={folder}/rows.tsv"]))
        rest = [f"source={folder}/rows.tsv", f"data.path={folder}/prepared", "data.rows_per_row_group=64", *more]
        prepare(load_config(PrepareJob, [*words, *rest]))
        return [f"data.path={folder}/prepared"]

    return made_once(factory, f"gpu_{name}_{len(more)}", make)
