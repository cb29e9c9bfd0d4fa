"""What a source of a stream is: partitions of lines in a fixed order, each line behind an offset that stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

Offsets = dict[
    str, int
]  # partition -> behind the last line that was read; one that is missing begins at its first line


class Range(NamedTuple):
    """Lines of a partition: from offset `begin` to the one behind the last."""

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
    def range(self) -> Range:
        return Range(self.partition, self.begin, self.ends[-1] if self.ends else self.begin)

    def split(self, count: int) -> tuple[Lines, Lines]:
        """The first `count` lines, and the others."""
        middle = self.ends[count - 1] if count else self.begin
        return (
            Lines(self.partition, self.begin, self.lines[:count], self.ends[:count], self.names),
            Lines(self.partition, middle, self.lines[count:], self.ends[count:], self.names),
        )


class StreamSource(Protocol):
    """Local to one process. A source keeps no place of its own: the offsets that it is given say where it goes on."""

    def read(self, offsets: Offsets, most_lines: int) -> Lines | None:
        """Lines that come next in a partition, one at least; None: there are none yet. Waits stream.poll_s at most."""

    def reread(self, wanted: Range) -> Lines:
        """Just these lines, read once more. Raises DataError where they are gone."""

    def behind(self, offsets: Offsets) -> int:
        """What is there and was not read, in `unit`."""

    def newest(self) -> Offsets:
        """Behind all that is there now."""

    @property
    def unit(self) -> str:
        """Of behind(): bytes or rows."""

    def close(self) -> None: ...
