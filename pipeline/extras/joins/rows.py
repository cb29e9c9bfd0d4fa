"""Add the columns of data.joins to parsed rows, for `prepare`."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.config.columns import vector_features
from pipeline.config.data import DataConfig
from pipeline.data.dataset import Dataset, weights_column
from pipeline.data.prepare.encode import Features
from pipeline.data.prepare.time_units import count_units
from pipeline.data.raw.blocks import Source
from pipeline.data.raw.layout import Layout
from pipeline.data.raw.source import find_sources, stamps_of
from pipeline.data.raw.value_types import TIMES, ZONED, kind_of
from pipeline.extras.joins.config import columns_among, joins_of
from pipeline.extras.joins.versions import Versions, read_versions
from pipeline.runtime.errors import DataError

_loaded: dict[str, list[Versions]] = {}  # of the last job of this process
_lock = threading.Lock()


def index_column(number: int) -> str:
    """Return the column of shards with the version of a row in table `number`; 0: no version."""
    return f"__join_{number}__"


def latest_column(number: int) -> str:
    """Return the staged column with the newest version of the row's key."""
    return f"\0latest {number}"


def at_once_column(number: int) -> str:
    """Return the staged column that is 1 if the version became visible at exactly the row's time."""
    return f"\0at once {number}"


class JoinedTables:
    """Adds columns to rows. See pipeline.data.prepare.recipe.RowJoins. Versions are read once a process."""

    def __init__(self, config: DataConfig, layout: Layout, sources: Sequence[Sequence[Source]] = ()) -> None:
        """layout: of rows with all columns. sources: files of each table; (): they are looked up."""
        self._arguments = config, layout
        self.joins = joins_of(config)
        self.files = sources or [find_sources(join.table) for join in self.joins]
        self.sources: Sequence[Source] = [file for files in self.files for file in files]
        joined = set(config.joined_columns)
        self.columns = [columns_among(layout.columns, join.columns) for join in self.joins]
        rows = columns_among(layout.columns, {*layout.needed} - joined)
        keys = [join.on for join in self.joins]
        carried = [name for name in layout.carried if name not in joined]
        self.layout = replace(
            layout,
            columns=replace(rows, timestamp=config.columns.timestamp),
            carried=tuple(dict.fromkeys([*carried, *keys])),
        )
        self._groups = [[name for name in layout.carried if name in join.columns] for join in self.joins]
        described = [
            asdict(layout),
            *([asdict(join), _digests(files)] for join, files in zip(self.joins, self.files, strict=True)),
        ]
        self.key = hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest()[:16]
        self._kinds: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return JoinedTables, (*self._arguments, self.files)

    @property
    def versions(self) -> list[Versions]:
        with _lock:
            if self.key not in _loaded:
                _loaded.clear()
                _loaded[self.key] = [
                    read_versions(join, files, columns, group)
                    for join, files, columns, group in zip(
                        self.joins, self.files, self.columns, self._groups, strict=True
                    )
                ]
            return _loaded[self.key]

    def renewed(self) -> JoinedTables:
        """Return the tables with their present files: these tables if no file has changed."""
        now = [stamps_of(join.table) for join in self.joins]
        if now == [{file.path: file.stamp for file in files} for files in self.files]:
            return self
        return JoinedTables(*self._arguments)

    def features(self, features: Features) -> Features:
        stored = {}
        for number, (join, columns) in enumerate(zip(self.joins, self.columns, strict=True)):
            names = [name for name in [*features.dense, *features.sparse, *features.buckets] if name in join.columns]
            names += [each for name, width in columns.vectors.items() for each in vector_features(name, width)]
            names += [weights_column(name) for name in columns.weighted]
            stored[index_column(number)] = names
        noted = [name(number) for number in range(len(self.joins)) for name in (latest_column, at_once_column)]
        return replace(features, stored_once=stored, noted=noted)

    def check(self, names: Sequence[str], schema: pa.Schema | None, path: str) -> None:
        for number, join in enumerate(self.joins):
            if twice := [name for name in join.columns if name in names]:
                raise DataError(
                    f"{path} has the column {twice[0]!r}, which data.joins[{number}] adds from {join.table} too: rename one of "
                    f"them, or leave it out of data.joins[{number}].columns"
                )
            has_zone = self.versions[number].has_zone
            kind = "" if schema is None else kind_of(schema.field(str(self.layout.columns.timestamp)).type)
            if has_zone is not None and kind in (TIMES, ZONED) and has_zone != (kind == ZONED):
                lacks, other = (path, join.table) if has_zone else (join.table, path)
                raise DataError(
                    f"the times of {lacks} have no zone, but the times of {other} have one: a row could see values hours too early. "
                    f"Write the times of {lacks} in UTC with their zone"
                )

    def __call__(self, rows: pa.Table) -> pa.Table:
        times = rows[self.layout.time_column].to_numpy().astype(np.int64)
        units = count_units(times)
        for number, (join, versions) in enumerate(zip(self.joins, self.versions, strict=True)):
            if versions.unit and units and versions.unit not in units:
                raise DataError(
                    f"data.joins: data.columns.timestamp={self.layout.columns.timestamp} looks like {next(iter(units))} since 1970, "
                    f"and {', '.join(join.times)} of {join.table} like {versions.unit} (a date counts as microseconds): write "
                    "both in one unit"
                )
            found = versions.find(rows[join.on], times, self.layout.columns.null_values)
            joined = versions.rows(found.visible)
            for name in joined.column_names:
                rows = rows.append_column(name, joined[name])
            names = (index_column, latest_column, at_once_column)
            for name_of, values in zip(names, found, strict=True):
                rows = rows.append_column(name_of(number), pa.array(values.astype(np.int32)))
        return rows


def _digests(files: Sequence[Source]) -> list[list[Any]]:
    return [[file.name, file.size_bytes, file.digest] for file in files]


def describe_files(files: Sequence[Source]) -> list[dict[str, Any]]:
    """Return what dataset.json stores of the files of a table."""
    return [{"path": name, "size_bytes": size, "digest": digest} for name, size, digest in _digests(files)]


def changed_joins(config: DataConfig, dataset: Dataset) -> list[str]:
    """Return the tables whose files differ from the files that the data set was made from."""
    sides = {each.index: each for each in dataset.side_tables}
    return [
        f"data.joins: {join.table} has changed"
        for number, join in enumerate(joins_of(config))
        if (side := sides.get(index_column(number))) is not None
        and side.about["files"] != describe_files(find_sources(join.table))
    ]
