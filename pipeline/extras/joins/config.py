"""Define the settings of data.joins, and check them against the columns of the job (stdlib only)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig
from pipeline.config.registry import read_settings
from pipeline.config.transforms import make_transforms, raw_inputs
from pipeline.runtime.errors import ConfigError, check_at_least, did_you_mean

KEY = "data.joins"


@dataclass
class JoinConfig:
    """A table that is joined to the rows: a file, a folder or a glob, Parquet or text.

    on: the key, a column of the rows and of the table. columns: the columns that rows get.
    written_at: the time at which a row of the table was written; a row of the source sees it from
    then on. valid_from: the time from which its values count. Without written_at they are taken to
    be written at valid_from. delay: added to these times, in the unit of the column.
    """

    table: str = ""
    on: str = ""
    columns: list[str] = field(default_factory=list)
    valid_from: str | None = None
    written_at: str | None = None
    delay: int = 0

    @property
    def times(self) -> list[str]:
        """Return the columns of times, without duplicates."""
        return list(dict.fromkeys(filter(None, (self.valid_from, self.written_at))))


def joins_of(config: DataConfig) -> list[JoinConfig]:
    for number, values in enumerate(config.joins):
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{KEY}[{number}]={values!r} is not a mapping: write {{table: ..., on: ..., columns: [...]}}"
            )
    return [
        # YAML reads the key `on` without quotes as true.
        read_settings(
            JoinConfig,
            {"on" if name is True else name: value for name, value in values.items()},
            f"{KEY}[{number}]",
            f"an entry of {KEY}",
        )
        for number, values in enumerate(config.joins)
    ]


def check_joins(config: DataConfig) -> list[dict[str, Any]]:
    """Return data.joins with all settings. Raises ConfigError if an entry does not fit data.columns."""
    columns, joins = config.columns, joins_of(config)
    if not columns.timestamp:
        raise ConfigError(
            f"{KEY} needs data.columns.timestamp=<column of the rows>: without the time of a row it is unknown "
            "which values had been written, and a join of the newest ones leaks"
        )
    inputs = raw_inputs(make_transforms(config.transforms))
    known = [*columns.dense, *columns.sparse, *columns.raw_lists, *inputs, *filter(None, [config.group_column])]
    taken: dict[str, int] = {}
    for number, join in enumerate(joins):
        key = f"{KEY}[{number}]"
        _check(key, join)
        for name in join.columns:
            if name in columns.all_labels or name in (columns.timestamp, columns.weight):
                raise ConfigError(
                    f"{key}.columns has {name!r}, a label, weight or time of the rows: it must come from the source"
                )
            if name not in known:
                raise ConfigError(
                    f"{key}.columns has {name!r}, but no feature of data.columns or data.transforms reads it"
                    f"{did_you_mean(name, known)}: name it under data.columns too, or leave it out"
                )
            if name in taken:
                raise ConfigError(f"{KEY}[{taken[name]}] and {key} both give {name!r}: name it in one of them")
            taken[name] = number
    for join in joins:
        if join.on in taken:
            raise ConfigError(
                f"{KEY}: on={join.on!r} is a column of {KEY}[{taken[join.on]}], but a key must be in the rows of the source"
            )
    names = {name for name in known if name not in taken}
    for group in (names, *({*join.columns} for join in joins)):
        columns_among(columns, group)
    return [asdict(join) for join in joins]


def _check(key: str, join: JoinConfig) -> None:
    for name in ("table", "on"):
        if not getattr(join, name):
            raise ConfigError(f"{key}.{name} is empty: name the {'file' if name == 'table' else 'key column'}")
    if not join.columns:
        raise ConfigError(f"{key}.columns is empty: list the columns that rows get from {join.table}")
    if not join.times:
        raise ConfigError(
            f"{key} names neither written_at nor valid_from, so nothing shows which values a row could see: name "
            f"the column of {join.table} with the time at which a row was written. For values that never change, "
            "add one with a time before all rows"
        )
    check_at_least(f"{key}.delay", join.delay, 0)
    if own := [name for name in (join.on, *join.times) if name in join.columns]:
        raise ConfigError(f"{key}.columns has {own[0]!r}, its key or time: leave it out")


def columns_among(columns: ColumnsConfig, names: Iterable[str]) -> ColumnsConfig:
    """Return how the columns called `names` are read. Raises ConfigError if a sequence describes a
    sequence of another table."""
    kept = set(names)
    sequence = {name: replace(each, shares=None) for name, each in columns.sequence.items() if name in kept}
    for name, each in sequence.items():
        if each.beside is not None and each.beside not in kept:
            raise ConfigError(
                f"data.columns.sequence.{name} describes {each.beside!r}, which is not in the same table: take both "
                f"from one table ({KEY})"
            )
    return replace(
        columns,
        dense=[name for name in columns.dense if name in kept],
        sparse=[name for name in columns.sparse if name in kept],
        multi_hot=[name for name in columns.multi_hot if name in kept],
        weighted=[name for name in columns.weighted if name in kept],
        vectors={name: width for name, width in columns.vectors.items() if name in kept},
        sequence=sequence,
    )
