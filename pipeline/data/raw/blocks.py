"""Define the records of raw data: a source file, a block of its rows, and the rows that were parsed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # layouts are read where neither is loaded
    import numpy as np
    import pyarrow as pa

MAX_BLOCK_ROWS = 65_535  # codes of a block's values fit 16 bits, 0 being the missing value
Partitions = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Source:
    """One raw file. `digest` covers 64 evenly spaced pieces of 64 KiB: all of a file up to 4 MiB.

    `split` is the split of its rows if the splits of a data set name their files. `partitions` are
    the columns whose values the folders above it give (data/raw/partitions.py).
    """

    path: str
    name: str
    size_bytes: int
    digest: str
    split: str | None = None
    partitions: Partitions = ()


@dataclass(frozen=True)
class Block:
    """Whole rows in source order: `text` of a text file, or `table` of a Parquet file.

    `first_line` counts from 1, a header included; `first_row` from 0, without it.
    """

    first_line: int
    first_row: int
    num_rows: int
    text: bytes = b""
    table: pa.Table | None = None


class RowReader(Protocol):
    """An open source; `position` is how many of its bytes the blocks so far stand for."""

    @property
    def position(self) -> int: ...

    def __enter__(self) -> RowReader: ...

    def __exit__(self, *_: object) -> None: ...

    def blocks(self) -> Iterator[Block]:
        """At most MAX_BLOCK_ROWS rows each, in source order."""

    def schema(self) -> pa.Schema | None:
        """The columns' types; None where a file is text."""


@dataclass(frozen=True)
class QuarantinedRow:
    """A row that was left out: `line` counts from 1, a header included; in Parquet files it is the row."""

    line: int
    reason: str
    text: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class ParsedRows:
    """`table` has the needed columns: numbers as float64, timestamp int64; `kept` are row numbers in the block."""

    table: pa.Table
    kept: np.ndarray
    quarantined: list[QuarantinedRow]
