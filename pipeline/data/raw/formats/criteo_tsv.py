"""`criteo_tsv`: a label, 13 counts and 26 hashed ids per line, separated by tabs, without header.

Missing values are empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config.columns import ColumnsConfig
from pipeline.config.registry import register
from pipeline.data.raw.formats.delimited import DelimitedText
from pipeline.data.raw.layout import Layout
from pipeline.runtime.errors import DataError

if TYPE_CHECKING:
    from pipeline.data.raw.blocks import Source

NUM_DENSE = 13
NUM_SPARSE = 26


def criteo_columns() -> ColumnsConfig:
    """Return the columns in file order, with TorchRec's names (torchrec.datasets.criteo): label,
    int_0..12, cat_0..25."""
    return ColumnsConfig(
        label="label",
        dense=[f"int_{i}" for i in range(NUM_DENSE)],
        sparse=[f"cat_{i}" for i in range(NUM_SPARSE)],
    )


@register("format", "criteo_tsv")
class CriteoTsv(DelimitedText):
    suffixes = ("tsv",)
    columns = criteo_columns()
    header_lines = 0

    def layout(self, name: str, columns: ColumnsConfig) -> Layout:
        return Layout(columns, name, header=(columns.label, *columns.dense, *columns.sparse))

    def unlabelled_header(self, source: Source, columns: ColumnsConfig) -> tuple[str, ...]:
        """Return the file's columns, with or without the label, as the number of columns in the first line tells."""
        from pipeline.data.raw.source import TextReader

        if not self.fits(columns):
            raise DataError(
                f"format=criteo_tsv, but the artifact's model reads {', '.join([*columns.dense, *columns.sparse][:5])}, "
                "...: name them in a header, and set format=tsv or format=csv"
            )
        features = (*self.columns.dense, *self.columns.sparse)
        with TextReader(source, 1 << 16) as reader:
            block = next(reader.blocks(), None)
        found = block.text.split(b"\n", 1)[0].count(b"\t") + 1 if block else len(features)
        if found not in (len(features), len(features) + 1):
            raise DataError(
                f"{source.path}: line 1 has {found} columns; Criteo's rows have {len(features)}, or {len(features) + 1} "
                "with their label; format=<format> says what it is"
            )
        return features if found == len(features) else (self.columns.label, *features)

    def sql_table(self, paths: str) -> str:
        return ""
