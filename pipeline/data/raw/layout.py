"""Turn a data config into how its source's rows are written, and say which columns are missing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.config.data import ColumnsConfig, DataConfig
from pipeline.data.raw.criteo import criteo_columns
from pipeline.runtime.errors import DataError, did_you_mean


@dataclass(frozen=True)
class Layout:
    """How a source's rows are written. `header` is None where the file's first line, or its schema, names the columns.

    columns.label is empty for rows that are to be scored: they have none. Columns that are `carried` are read and left
    as they are (text in text files).
    """

    columns: ColumnsConfig
    delimiter: str = "\t"
    quoted: bool = False
    header: tuple[str, ...] | None = None
    parquet: bool = False
    carried: tuple[str, ...] = ()

    @property
    def numbers(self) -> list[str]:
        return [*([self.columns.label] if self.columns.label else []), *self.columns.dense]

    @property
    def needed(self) -> list[str]:
        columns = self.columns
        times = [columns.timestamp] if columns.timestamp else []
        names = [*self.numbers, *columns.sparse, *columns.multi_hot, *times]
        return [*names, *(name for name in self.carried if name not in names)]


def layout_of(config: DataConfig) -> Layout:
    """Raises DataError where a column has two roles, or none is left to learn from."""
    if config.format == "criteo_tsv":
        columns = criteo_columns()
        return Layout(columns, header=(columns.label, *columns.dense, *columns.sparse))
    timestamp = config.columns.timestamp if config.split.kind == "time" else None
    layout = Layout(
        replace(config.columns, timestamp=timestamp),
        delimiter="," if config.format == "csv" else "\t",
        quoted=config.format == "csv",
        parquet=config.format == "parquet",
    )
    twice = sorted({name for name in layout.needed if layout.needed.count(name) > 1})
    if twice:
        raise DataError(f"data.columns gives {', '.join(map(repr, twice))} two roles: name each column once")
    if not config.columns.sparse and not config.columns.multi_hot:
        raise DataError("data.columns names no categorical column: list some under data.columns.sparse or multi_hot")
    return layout


def check_columns(layout: Layout, names: tuple[str, ...], path: str) -> None:
    """Raises DataError where a needed column is missing, naming the nearest one that is there."""
    missing = [name for name in layout.needed if name not in names]
    if missing:
        listed = ", ".join(f"{name!r}{did_you_mean(name, names)}" for name in missing[:5])
        raise DataError(
            f"{path} lacks {len(missing)} of {len(layout.needed)} columns: {listed}. "
            f"It has {', '.join(names[:60])}; mend data.columns"
        )
    doubled = sorted({name for name in layout.needed if names.count(name) > 1})
    if doubled:
        raise DataError(f"{path} names column {doubled[0]!r} {names.count(doubled[0])} times: rename one")
