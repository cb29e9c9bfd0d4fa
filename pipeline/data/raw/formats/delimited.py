"""`csv` and `tsv`: one row per line, with a header. csv quotes cells with `"`; tsv has no quotes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.data.raw.layout import Format, Layout

if TYPE_CHECKING:
    from pipeline.data.raw.blocks import Block, ParsedRows, Source
    from pipeline.data.raw.source import TextReader


class DelimitedText(Format):
    """Lines of cells. The first line names the columns if the layout has no header."""

    has_cells = True

    def open(self, source: Source, layout: Layout, block_bytes: int) -> tuple[TextReader, tuple[str, ...]]:
        from pipeline.data.raw.lines import split_cells, with_doubled_quotes
        from pipeline.data.raw.source import TextReader

        reader = TextReader(source, block_bytes, layout.encoding, layout.separator)
        if layout.header is not None:
            return reader, layout.header
        line = reader.header()
        if not line:  # a part without rows, as Spark and Hive write it, has no header
            return reader, tuple(layout.needed)
        return reader, tuple(
            split_cells(layout, with_doubled_quotes(layout, line).decode(errors="replace").rstrip("\r\n"))
        )

    def parse(self, layout: Layout, names: tuple[str, ...], block: Block) -> ParsedRows:
        from pipeline.data.raw.rows import parse_text

        return parse_text(layout, names, block)

    def sql_table(self, paths: str) -> str:
        quoting = "" if self.quoted else ", quote='', escape=''"
        return f"read_csv([{paths}], all_varchar=true, header=true, delim='{self.delimiter}'{quoting})"


@register("format", "csv")
class Csv(DelimitedText):
    suffixes = ("csv",)
    delimiter = ","
    quoted = True
    sql_copy = "FORMAT csv, HEADER, DELIMITER ','"


@register("format", "tsv")
class Tsv(DelimitedText):
    suffixes = ("tsv",)
    sql_copy = "FORMAT csv, HEADER, DELIMITER '\t'"
