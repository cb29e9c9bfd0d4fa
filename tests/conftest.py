"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
