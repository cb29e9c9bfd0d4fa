"""Fixtures of several end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.data.prepare.run import prepare
from pipeline.training.summary import TrainSummary
from tests.end_to_end.user_items import job_words, train_on_rank
from tests.support.made_once import made_once
from tests.support.ranks import RankPool


@pytest.fixture(scope="session")
def user_item_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Clicks of 100 users on 60 items; the raw rows lie beside it, in rows.tsv."""

    def make(folder: Path) -> str:
        sizes = ["data.generator.num_rows=20000", "data.generator.num_users=100", "data.generator.num_items=60"]
        generate(load_config(GenerateJob, ["data=user_item", f"output={folder}/rows.tsv", *sizes]))
        options = [f"source={folder}/rows.tsv", f"data.path={folder}/prepared", "data.rows_per_row_group=512"]
        return prepare(load_config(PrepareJob, ["data=user_item", *options])).path

    return made_once(tmp_path_factory, "user_item", make)


@pytest.fixture(scope="session")
def user_item_run(ranks: RankPool, user_item_data: str, tmp_path_factory: pytest.TempPathFactory) -> TrainSummary:
    """A two-tower trained on two ranks. Copy its folder before changing it."""

    def make(folder: Path) -> TrainSummary:
        return ranks.run(2, train_on_rank, job_words(user_item_data, folder / "run"))[0]

    return made_once(tmp_path_factory, "user_item_run", make)
