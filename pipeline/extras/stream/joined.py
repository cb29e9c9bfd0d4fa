"""Join the tables of data.joins to rows of a stream (stream.join).

The files of the tables are looked up after the rows of a batch were read. So a row sees each version
that was in the table before the row was in the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from pipeline.config.data import DataConfig
from pipeline.config.retraining import StreamConfig
from pipeline.data.raw.layout import Layout, layout_of, with_group

if TYPE_CHECKING:
    from pipeline.extras.joins.rows import JoinedTables


def rows_of(data: DataConfig, stream: StreamConfig) -> Layout:
    """Return the layout of the stream's rows. With stream.join they lack the columns of data.joins."""
    tables = _tables_of(data, stream)
    return _all_columns(data, stream) if tables is None else tables.layout


class StreamJoins:
    """Adds the columns of data.joins to the rows of a batch if stream.join says so."""

    def __init__(self, data: DataConfig, stream: StreamConfig) -> None:
        self._tables = _tables_of(data, stream)
        self.layout = rows_of(data, stream)

    def check(self, names: Sequence[str], schema: pa.Schema | None) -> None:
        """Raise DataError if the columns of rows do not fit the tables. schema: None for lines of text."""
        if self._tables is not None:
            self._tables.check(names, schema, "the stream")

    def __call__(self, rows: pa.Table) -> pa.Table:
        if self._tables is None:
            return rows
        self._tables = self._tables.renewed()
        return self._tables(rows)


def _tables_of(data: DataConfig, stream: StreamConfig) -> JoinedTables | None:
    if not stream.join:
        return None
    from pipeline.extras.joins.rows import JoinedTables

    return JoinedTables(data, _all_columns(data, stream))


def _all_columns(data: DataConfig, stream: StreamConfig) -> Layout:
    return with_group(layout_of(data), stream.event_time_column)
