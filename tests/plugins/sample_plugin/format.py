"""A raw format in one file: a JSON object a line."""

from __future__ import annotations

import json

from pipeline.config.registry import register
from pipeline.data.raw.blocks import Block, ParsedRows, Source
from pipeline.data.raw.layout import Format, Layout
from pipeline.data.raw.rows import parse_objects
from pipeline.data.raw.source import TextReader


@register("format", "json_rows")
class JsonRows(Format):
    suffixes = ("jsonrows",)
    header_lines = 0

    def open(self, source: Source, layout: Layout, block_bytes: int) -> tuple[TextReader, tuple[str, ...]]:
        return TextReader(source, block_bytes), tuple(layout.needed)

    def parse(self, layout: Layout, names: tuple[str, ...], block: Block) -> ParsedRows:
        return parse_objects(layout, block, json.loads)
