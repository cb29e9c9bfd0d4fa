"""Write the prepared columns of data.joins once for each version that rows use.

A task that writes a shard notes the prepared values of each version, and how often rows see it.
Rows of a version have equal values, so the side table has the bits of a table joined beforehand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.data import SPLITS
from pipeline.data.dataset import SideTable
from pipeline.data.prepare.recipe import Recipe, scratch_folder
from pipeline.data.prepare.row_groups import in_row_groups
from pipeline.data.prepare.write_dataset import move_out
from pipeline.data.prepare.write_shards import PARQUET_OPTIONS, WrittenShard
from pipeline.extras.joins.report import Counts, measure
from pipeline.extras.joins.rows import JoinedTables, at_once_column, describe_files, index_column, latest_column
from pipeline.runtime.storage import storage

VERSION = "version"  # of a row of a side table; shards have it in index_column
ROWS_AT_ONCE = 65_536


class Recorder:
    """Notes the versions in the rows of one shard."""

    def __init__(self, recipe: Recipe, shard: str, schema: pa.Schema) -> None:
        """schema: of shards with all columns."""
        assert isinstance(recipe.joins, JoinedTables)
        self._recipe, self._shard, stored = recipe, shard, recipe.features.stored_once
        self._schemas = [pa.schema([schema.field(name) for name in names]) for names in stored.values()]
        self._parts: list[list[pa.Table]] = [[] for _ in stored]
        self._seen = [np.zeros(len(each.keys) + 1, np.bool_) for each in recipe.joins.versions]
        self._counts = [Counts() for _ in stored]

    def add(self, rows: pa.Table) -> None:
        """Note the prepared rows of a row group."""
        features = self._recipe.features
        labels = rows[features.label].to_numpy() != 0
        mask = features.labels[features.label].mask
        counted = np.ones(len(rows), np.bool_) if mask is None else rows[mask].to_numpy() == 1
        for number, schema in enumerate(self._schemas):
            visible = rows[index_column(number)].to_numpy()
            versions, first = np.unique(visible, return_index=True)
            new = ~self._seen[number][versions]
            self._seen[number][versions] = True
            part = rows.select(schema.names).take(pa.array(first[new])).cast(schema)
            self._parts[number].append(part.add_column(0, VERSION, pa.array(versions[new])))
            if self._shard.startswith(f"{SPLITS[0]}/"):
                latest, at_once = (rows[name(number)].to_numpy() for name in (latest_column, at_once_column))
                self._counts[number].add(visible, latest, labels, counted, at_once)

    def write(self, folder: str) -> list[dict[str, str]]:
        """Write what was noted to the staging folder, by files in `folder`. Return the paths for each table."""
        written = []
        for number, parts in enumerate(self._parts):
            name = f"joined-{self._recipe.key}-{self._shard.replace('/', '-')}-{number}"
            paths = {}
            for kind, table in (("rows", pa.concat_tables(parts)), ("counts", self._counts[number].finish())):
                local, paths[kind] = os.path.join(folder, kind), self._recipe.path(f"{name}-{kind}.parquet")
                pq.write_table(table, local, compression="lz4")
                storage.move_file(local, paths[kind])
            written.append(paths)
        return written


def write_side_tables(recipe: Recipe, shards: Sequence[WrittenShard]) -> list[SideTable]:
    """Write the side tables of a data set, and describe them with what the report prints."""
    tables: list[SideTable] = []
    assert isinstance(recipe.joins, JoinedTables)
    with scratch_folder(recipe) as scratch:
        for number, (index, names) in enumerate(recipe.features.stored_once.items()):
            found = pa.concat_tables(_read(shard.joined[number]["rows"] for shard in shards))
            versions, first = np.unique(found[VERSION].to_numpy(), return_index=True)
            path = f"joins/{number}.parquet"
            local = os.path.join(scratch, path)
            os.makedirs(os.path.dirname(local), exist_ok=True)
            with pq.ParquetWriter(local, found.schema, **PARQUET_OPTIONS) as out:
                for table in in_row_groups([found.take(pa.array(first))], ROWS_AT_ONCE):
                    out.write_table(table)
            size, digest = os.path.getsize(local), storage.sha256_of(local)
            move_out(scratch, recipe.config.path, path)
            counts = pa.concat_tables(_read(shard.joined[number]["counts"] for shard in shards))
            join = recipe.joins.joins[number]
            about: dict[str, Any] = {
                "table": os.path.basename(join.table.rstrip("/")),
                "on": join.on,
                "files": describe_files(recipe.joins.files[number]),
                **measure(counts, recipe.joins.versions[number], recipe.features, recipe.joins.columns[number]),
            }
            tables.append(SideTable(index, names, path, len(first), int(versions.max()) + 1, size, digest, about))
    return tables


def _read(paths: Iterator[str]) -> Iterator[pa.Table]:
    for path in paths:
        with storage.open_file(path, "rb") as file:
            yield pq.read_table(file)
