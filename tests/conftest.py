"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config import GenerateJob, PrepareJob, load_config
from pipeline.generate import generate
from pipeline.prepare import prepare
from tests.ranks import RankPool

SAMPLES = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def samples() -> Path:
    """The folder of real samples; tests that need it skip where it is absent."""
    if not SAMPLES.is_dir():
        pytest.skip(f"the real samples are not at {SAMPLES}")
    return SAMPLES


@pytest.fixture(scope="session")
def prepared_clicks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small generated data set: 24,000 training rows, 3,000 in each other split, prepared as real ones."""
    folder = tmp_path_factory.mktemp("clicks")
    source = str(folder / "clicks.tsv")
    generate(load_config(GenerateJob, ["data=quickstart", f"output={source}", "data.synthetic.num_rows=30000"]))
    options = ["data=quickstart", f"source={source}", f"data.path={folder / 'prepared'}", "data.rows_per_row_group=512"]
    return prepare(load_config(PrepareJob, options)).path
