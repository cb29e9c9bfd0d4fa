"""Cut a stream of tables into row groups of equal size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa


def in_row_groups(tables: Iterable[pa.Table], size: int) -> Iterator[pa.Table]:
    """Yield the same rows as tables of exactly `size` rows. Only the last table may be smaller."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        while sum(len(part) for part in waiting) >= size:
            joined = pa.concat_tables(waiting)
            yield joined.slice(0, size)
            waiting = [joined.slice(size)]
    if sum(len(part) for part in waiting):
        yield pa.concat_tables(waiting)
