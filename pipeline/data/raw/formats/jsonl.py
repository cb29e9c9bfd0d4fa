"""`jsonl`: one JSON object per line.

An absent or null key is a missing value; a list is a multi-hot value.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline.config.registry import register
from pipeline.data.raw.layout import Format, Layout

if TYPE_CHECKING:
    from pipeline.data.raw.blocks import Block, ParsedRows, Source
    from pipeline.data.raw.source import TextReader

LOOKED_AT_BYTES = 1 << 20  # bytes of a file that are searched for keys


@register("format", "jsonl")
class JsonLines(Format):
    suffixes = ("jsonl", "ndjson")
    header_lines = 0

    def open(self, source: Source, layout: Layout, block_bytes: int) -> tuple[TextReader, tuple[str, ...]]:
        from pipeline.data.raw.source import TextReader

        names: dict[str, None] = {}
        with TextReader(source, LOOKED_AT_BYTES, layout.encoding) as first:
            block = next(first.blocks(), None)
        for line in (block.text if block else b"").split(b"\n"):
            try:
                names |= dict.fromkeys(_object(line))
            except ValueError:
                continue  # the quarantine reports it
        return TextReader(source, block_bytes, layout.encoding), tuple(names if block else layout.needed)

    def parse(self, layout: Layout, names: tuple[str, ...], block: Block) -> ParsedRows:
        from pipeline.data.raw.rows import parse_objects

        return parse_objects(layout, block, _object)


def _object(line: bytes) -> dict[str, Any]:
    """Return the object in a line. Raises ValueError if the line is not a JSON object."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.colno}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value
