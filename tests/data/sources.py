"""Write small sources of a few columns, prepare them, and read the rows back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig, SplitConfig
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.dataset import Dataset
from pipeline.data.prepare.run import PrepareSummary, prepare
from tests.data.criteo_rows import read_split

COLUMNS = {"label": "y", "dense": ["x"], "sparse": ["c"], "multi_hot": ["m"]}
TRAIN_ALONE = SplitConfig(validation_fraction=0.0, test_fraction=0.0)


def prepare_rows(
    tmp_path: Path, source: Path | str, columns: dict[str, Any] | None = None, **settings: Any
) -> PrepareSummary:
    settings = {"format": "csv", "split": TRAIN_ALONE, "max_quarantined_fraction": 0.0, **settings}
    data = DataConfig(
        name="rows", path=str(tmp_path / "data"), columns=ColumnsConfig(**(columns or COLUMNS)), **settings
    )
    return prepare(PrepareJob(data=data, source=str(source)))


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join([*lines, ""]))
    return path


def rows_of(tmp_path: Path, dataset: Dataset, split: str = "train") -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = read_split(tmp_path / "data", dataset, split).to_pydict()
    return found
