"""Define the records of raw data: a source file, a block of its rows, and the rows that were parsed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from pipeline.runtime.storage.storage import Stamp

if TYPE_CHECKING:  # layouts are read where neither library is loaded
    import numpy as np
    import pyarrow as pa

# indices of a block's values then fit 16 bits, with 0 for the missing value
MAX_BLOCK_ROWS = 65_535
SAMPLE_BYTES = 1 << 16
NUM_SAMPLES = 64
Partitions = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Source:
    """One raw file. `digest` covers 64 evenly spaced pieces of 64 KiB: all of a file up to 4 MiB.

    `split` is the split of its rows if the config names files for each split. `partitions` are the
    columns whose values are in the names of the folders above it (data/raw/partitions.py). `stamp`
    is the state of the file when it was listed.
    """

    path: str
    name: str
    size_bytes: int
    digest: str
    split: str | None = None
    partitions: Partitions = ()
    stamp: Stamp | None = None

    @property
    def is_sampled(self) -> bool:
        """Return whether `digest` leaves bytes out."""
        return self.size_bytes > NUM_SAMPLES * SAMPLE_BYTES


@dataclass(frozen=True)
class Block:
    """Complete rows in source order: `text` of a text file, or `table` of a Parquet file.

    `first_line` counts from 1, including a header; `first_row` counts from 0, without it.
    """

    first_line: int
    first_row: int
    num_rows: int
    text: bytes = b""
    table: pa.Table | None = None


class RowReader(Protocol):
    """An open source. `position` is the number of the file's bytes that have been read into blocks."""

    @property
    def position(self) -> int: ...

    def __enter__(self) -> RowReader: ...

    def __exit__(self, *_: object) -> None: ...

    def blocks(self) -> Iterator[Block]:
        """Yield blocks of at most MAX_BLOCK_ROWS rows, in source order."""

    def schema(self) -> pa.Schema | None:
        """Return the types of the columns, or None if the file is text."""


@dataclass(frozen=True)
class QuarantinedRow:
    """A row that was left out because it is invalid.

    `line` counts from 1, including a header. In Parquet files it is the number of the row.
    """

    line: int
    reason: str
    text: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class ParsedRows:
    """Rows that were parsed. `table` has the needed columns: numbers as float64, timestamp as
    int64.

    `kept` are the numbers of these rows in the block.
    """

    table: pa.Table
    kept: np.ndarray
    quarantined: list[QuarantinedRow]
