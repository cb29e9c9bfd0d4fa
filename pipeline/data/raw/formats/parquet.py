"""`parquet`: the file has column types.

Lists are multi-hot features; int, float, bool or decimal are numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.data.raw.layout import Format, Layout

if TYPE_CHECKING:
    from pipeline.data.raw.blocks import Source
    from pipeline.data.raw.parquet_rows import ParquetReader


@register("format", "parquet")
class Parquet(Format):
    suffixes = ("parquet", "pq")
    is_lines = False
    sql_copy = "FORMAT parquet"

    def open(self, source: Source, layout: Layout, block_bytes: int) -> tuple[ParquetReader, tuple[str, ...]]:
        from pipeline.data.raw.parquet_rows import ParquetReader

        reader = ParquetReader(source, layout.needed, block_bytes)
        return reader, reader.column_names()

    def sql_table(self, paths: str) -> str:
        return f"read_parquet([{paths}])"

    def sql_lines(self, paths: str) -> str:
        return f"SELECT rows::VARCHAR AS line FROM read_parquet([{paths}]) rows"
