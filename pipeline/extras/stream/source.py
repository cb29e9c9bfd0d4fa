"""What a source of a stream is: partitions of rows in a fixed order, each row behind an offset that stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

Offsets = dict[str, int]  # partition -> behind the last row that was read; one that is missing begins at its first row


class Range(NamedTuple):
    """Rows of a partition: from offset `begin` to the one behind the last."""

    partition: str
    begin: int
    end: int


@dataclass(frozen=True)
class Lines:
    """Of one partition, in their order. `ends[i]` is the offset behind lines[i]; names: their columns, where a header says them."""

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
        """The first `count` lines, and the others."""
        middle = self.ends[count - 1] if count else self.begin
        return (
            Lines(self.partition, self.begin, self.lines[:count], self.ends[:count], self.names),
            Lines(self.partition, middle, self.lines[count:], self.ends[count:], self.names),
        )


WHOLE = 1 << 40  # added to the number of rows: the offset behind the last row of a table's file


@dataclass(frozen=True)
class TableRows:
    """Of one partition whose rows have types: an offset is a row's number. is_last: nothing follows them in the partition."""

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
        """The first `count` rows, and the others."""
        first = TableRows(
            self.partition, self.begin, self.table.slice(0, count), self.is_last and count >= self.num_rows
        )
        return first, TableRows(self.partition, self.begin + count, self.table.slice(count), self.is_last)


Rows = Lines | TableRows


class StreamSource(Protocol):
    """Local to one process. A source keeps no place of its own: the offsets that it is given say where it goes on."""

    def read(self, offsets: Offsets, most_lines: int) -> Rows | None:
        """Rows that come next in a partition, one at least; None: there are none yet. Waits stream.poll_s at most."""

    def reread(self, wanted: Range) -> Rows:
        """Just these rows, read once more. Raises DataError where they are gone."""

    def behind(self, offsets: Offsets) -> int:
        """What is there and was not read, in `unit`."""

    def newest(self) -> Offsets:
        """Behind all that is there now."""

    @property
    def unit(self) -> str:
        """Of behind(): bytes or rows."""

    def close(self) -> None: ...
