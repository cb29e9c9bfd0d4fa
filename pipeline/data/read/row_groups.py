"""Read row groups of shards with all columns of the data set, also the columns of side tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.registry import from_extra
from pipeline.data.dataset import Dataset


class ReadRowGroup(Protocol):
    def __call__(
        self, file: pq.ParquetFile, number: int, columns: Sequence[str] | None = None, **options: Any
    ) -> pa.Table:
        """Return the columns of a row group (None: all). `options`: see ParquetFile.read_row_group."""


def row_group_reader(folder: str, dataset: Dataset) -> ReadRowGroup:
    """Return the function that reads row groups of the data set in `folder`. Raises DataError if a
    side table is damaged."""
    if dataset.side_tables:
        found: ReadRowGroup = from_extra("read_joined", f"the data set in {folder}")(folder, dataset)
        return found
    return _read


def _read(file: pq.ParquetFile, number: int, columns: Sequence[str] | None = None, **options: Any) -> pa.Table:
    return file.read_row_group(number, columns=None if columns is None else list(columns), **options)
