"""Define the interface of a stream's source: partitions of rows in a fixed order, with a stable
offset after each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

# partition -> offset after the last row that was read; a missing partition begins at its first row
Offsets = dict[str, int]


class Range(NamedTuple):
    """Rows of a partition: from offset `begin` to the offset after the last row."""

    partition: str
    begin: int
    end: int


@dataclass(frozen=True)
class Lines:
    """Lines of one partition in their order.

    `ends[i]` is the offset after lines[i]; names: the columns of a header.
    """

    partition: str
    begin: int
    lines: list[bytes]
    ends: list[int]
    names: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.lines)

    @property
    def range(self) -> Range:
        return Range(self.partition, self.begin, self.ends[-1] if self.ends else self.begin)

    def split(self, count: int) -> tuple[Lines, Lines]:
        """Split after `count` lines."""
        middle = self.ends[count - 1] if count else self.begin
        return (
            Lines(self.partition, self.begin, self.lines[:count], self.ends[:count], self.names),
            Lines(self.partition, middle, self.lines[count:], self.ends[count:], self.names),
        )


WHOLE = 1 << 40  # added to the number of rows: the offset after the last row of a table file


@dataclass(frozen=True)
class TableRows:
    """Typed rows of one partition.

    An offset is a row number. is_last: the partition has no more rows.
    """

    partition: str
    begin: int
    table: pa.Table
    is_last: bool = False

    @property
    def num_rows(self) -> int:
        count: int = self.table.num_rows
        return count

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.table.column_names)

    @property
    def range(self) -> Range:
        return Range(self.partition, self.begin, self.begin + self.num_rows + WHOLE * self.is_last)

    def split(self, count: int) -> tuple[TableRows, TableRows]:
        """Split after `count` rows."""
        first = TableRows(
            self.partition, self.begin, self.table.slice(0, count), self.is_last and count >= self.num_rows
        )
        return first, TableRows(self.partition, self.begin + count, self.table.slice(count), self.is_last)


Rows = Lines | TableRows


class StreamSource(Protocol):
    """A source, local to one process.

    It stores no position: the given offsets say where to continue.
    """

    def read(self, offsets: Offsets, most_lines: int) -> Rows | None:
        """Return the next rows of a partition, at least one, or None if there are none yet.

        Waits at most stream.poll_s.
        """

    def reread(self, wanted: Range) -> Rows:
        """Read exactly these rows again. Raises DataError if they no longer exist."""

    def behind(self, offsets: Offsets) -> int:
        """Return the amount of unread data, in `unit`."""

    def newest(self) -> Offsets:
        """Return the offsets after all existing data."""

    @property
    def unit(self) -> str:
        """Return the unit of behind(): bytes or rows."""

    def close(self) -> None: ...
