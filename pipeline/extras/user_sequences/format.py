"""`user_sequences`: a line is a user and the user's items in the order of time, `17 204 99 31`.

A line becomes three rows of a data set: user_id, item_id, history (the items before it), label (1)
and held_out. The test row (held_out 2) has the last item, the validation row (1) the item before it,
and the training row (0) the third last item. A user with one or two items
has only a training row with the last item. data.split.kind=date divides the rows by held_out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config.registry import register
from pipeline.data.raw.layout import Format, Layout
from pipeline.runtime.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.data.raw.blocks import Block, Source

COLUMNS = ("user_id", "item_id", "history", "label", "held_out")
NUM_HELD_OUT = 2
# For `inspect`: a file is proposed as user_sequences if its first lines are ids separated by blanks
# or tabs, of different numbers, with each user in one line.
LOOKED_AT_BYTES, MIN_LINES, MAX_LENGTH = 1 << 20, 5, 50
ID = re.compile(r"[\w.:-]*\d[\w.:-]*")  # with a digit, so that prose is not a file of sequences


@register("format", "user_sequences")
class UserSequences(Format):
    is_lines = False

    def open(self, source: Source, layout: Layout, block_bytes: int) -> tuple[SequenceReader, tuple[str, ...]]:
        return SequenceReader(
            source, [name for name in COLUMNS if name in layout.needed], block_bytes, layout.encoding
        ), COLUMNS

    def propose(self, path: str) -> tuple[dict[str, Any], str] | None:
        lines = [line.split() for line in _first_lines(path)]
        users, lengths = {line[0] for line in lines if line}, {len(line) for line in lines}
        if len(lines) < MIN_LINES or len(users) < len(lines) or min(lengths) < 2 or len(lengths) < 3:
            return None
        if any(not ID.fullmatch(cell) for line in lines for cell in line):
            return None
        columns = {"label": "label", "sparse": ["item_id"], "timestamp": "held_out"}
        sequence = {"history": {"max_length": MAX_LENGTH, "shares": "item_id"}}
        split = {"kind": "date", "validation_from": 1, "test_from": NUM_HELD_OUT}
        items = {item for line in lines for item in line[1:]}
        return {"format": "user_sequences", "columns": columns | {"sequence": sequence}, "split": split}, (
            f"{path}: user_sequences, a line is a user and the user's items. The first {len(lines):,} users have "
            f"{min(lengths) - 1} to {max(lengths) - 1} items of {len(items):,}. The last two items of a user become "
            "the validation row and the test row"
        )


class SequenceReader:
    """Reads rows from lines of users. `position` is the number of bytes that were read."""

    def __init__(self, source: Source, columns: list[str], block_bytes: int, encoding: str) -> None:
        from pipeline.data.raw.source import TextReader

        self._lines, self._columns, self._row = TextReader(source, block_bytes, encoding), columns, 0

    @property
    def position(self) -> int:
        return self._lines.position

    def __enter__(self) -> SequenceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.__exit__()

    def schema(self) -> None:
        """Return None, because text has no types."""

    def blocks(self) -> Iterator[Block]:
        from pipeline.data.raw.blocks import MAX_BLOCK_ROWS, Block

        at_once = MAX_BLOCK_ROWS // (1 + NUM_HELD_OUT)
        for block in self._lines.blocks():
            lines = block.text.removesuffix(b"\n").split(b"\n")
            for first in range(0, len(lines), at_once):
                table = _rows_of(lines[first : first + at_once]).select(self._columns)
                yield Block(self._row + 1, self._row, table.num_rows, table=table)
                self._row += table.num_rows


def _first_lines(path: str) -> list[str]:
    """Return the complete lines in the first bytes of a text file; [] if it is not text."""
    from pipeline.data.raw.source import TextReader, find_sources

    (source,) = find_sources(path)
    try:
        with TextReader(source, LOOKED_AT_BYTES) as reader:
            block = next(reader.blocks(), None)
        return block.text.decode().splitlines() if block else []
    except (DataError, UnicodeDecodeError):
        return []


def _rows_of(lines: Sequence[bytes]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    rows: list[tuple[bytes, bytes | None, list[bytes], bytes, int]] = []
    for line in lines:
        user, *items = line.split() or [b""]
        if not items:  # a label that is not a number: the row goes to the quarantine
            rows.append((user, None, [], b"missing, because line %r has no item" % line[:80], 0))
            continue
        num_held_out = NUM_HELD_OUT if len(items) > NUM_HELD_OUT else 0
        for held_out in range(num_held_out + 1):
            at = len(items) - 1 - num_held_out + held_out
            rows.append((user, items[at], items[:at], b"1", held_out))
    users, wanted, histories, labels, held = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    text = pc.CastOptions(target_type=pa.string(), allow_invalid_utf8=True)
    lists = pc.CastOptions(target_type=pa.list_(pa.string()), allow_invalid_utf8=True)
    return pa.table(
        {
            "user_id": pc.cast(pa.array(users, pa.binary()), options=text),
            "item_id": pc.cast(pa.array(wanted, pa.binary()), options=text),
            "history": pc.cast(pa.array(histories, pa.list_(pa.binary())), options=lists),
            "label": pc.cast(pa.array(labels, pa.binary()), options=text),
            "held_out": pa.array(held, pa.int64()),
        }
    )
