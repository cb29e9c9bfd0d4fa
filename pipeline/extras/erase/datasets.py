"""Erase a value from a prepared data set: a tombstone takes its place in the vocabulary, and its ids become 0.

No other id changes. Rows stay where they are, so a training that resumes reads the same batches, in which the erased
value is unknown. If it is a key of data.joins, its rows leave the side table, and see missing values.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.data.dataset import (
    FILE_NAME,
    GROUP_COLUMN,
    Dataset,
    ShardFile,
    SideTable,
    SparseFeature,
    load_dataset,
    vocabulary_of,
)
from pipeline.data.raw.dense_transforms import transform_of
from pipeline.data.raw.hashing import hash_text
from pipeline.data.vocabulary_files import find_vocabulary
from pipeline.extras.erase.folders import EraseError, Rewritten
from pipeline.extras.erase.target import Target
from pipeline.extras.joins.store import ROWS_AT_ONCE, VERSION
from pipeline.runtime.storage import atomic, storage

Versions = dict[
    str, tuple[str, set[int]]
]  # index of a side table -> its key, and the versions that rows of the value saw


def features_of(dataset: Dataset, name: str) -> list[SparseFeature]:
    """Return the features whose ids are from the vocabulary of feature `name`; [] if the data set lacks it.

    Raises EraseError if the feature uses the ids of another feature.
    """
    known = {feature.name: feature for feature in dataset.sparse_features}
    if name not in known:
        return []
    if (owner := vocabulary_of(known[name])) != name:
        raise EraseError(f"the ids of {name!r} are those of {owner!r}: erase the value of feature={owner}")
    return [feature for feature in dataset.sparse_features if vocabulary_of(feature) == name]


def refuse_hashed(feature: SparseFeature, value: str) -> None:
    """Raise EraseError if the feature's ids are hashes, and say how many values share the row."""
    if feature.hash_size is None:
        return
    row = int(hash_text(pa.array([value]), feature.hash_seed)[0])
    shared = feature.num_distinct / feature.hash_size
    raise EraseError(
        f"the ids of {feature.name!r} are hashes to {feature.hash_size:,} rows, so the value shares its row with every "
        f"value of the same hash ({feature.num_distinct:,} values were seen, {shared:,.1f} a row; hash {row:016x}): "
        "resetting the row would change the scores of other values. Remove the value from the raw rows "
        "(folders=[<raw rows>] without this data set and its models), prepare and train again"
    )


def id_of(folder: str, feature: SparseFeature, value: str) -> int | None:
    """Return the id of a value in the vocabulary of a data set."""
    if feature.vocabulary is None or not storage.is_file(storage.join(folder, feature.vocabulary)):
        return None
    with pq.ParquetFile(find_vocabulary(folder, feature)) as file:
        for batch in file.iter_batches(columns=["value", "id"]):
            at = pc.index(batch["value"], value).as_py()
            if at >= 0:
                return int(batch["id"][at].as_py())
    return None


def erase_from_dataset(target: Target, folder: Rewritten, known: dict[str, Dataset], below: str = "") -> int | None:
    """Erase the value from the data set in the folder `below`. Return its id, or None if it has none.

    `known`: fingerprint before -> the data set after; it gets one more entry.
    """
    path, staged = os.path.join(folder.path, below), os.path.join(folder.staged, below)
    dataset = load_dataset(path)
    features = features_of(dataset, target.feature)
    for feature in features:
        refuse_hashed(feature, target.value)
    row_id = (
        id_of(path, next(each for each in features if each.name == target.feature), target.value) if features else None
    )
    of_group = dataset.group_column == target.feature
    if row_id is None and not of_group:
        return None
    written: dict[str, tuple[int, str]] = {}
    for name in sorted({each.vocabulary for each in features if each.vocabulary and row_id is not None}):
        _write_vocabulary(target, os.path.join(path, name), folder.new(os.path.join(below, name)), row_id or 0)
        written[name] = _size_and_digest(os.path.join(staged, name))
    names = [] if row_id is None else [feature.name for feature in features]
    seen: Versions = {
        side.index: (side.about["on"], set()) for side in dataset.side_tables if side.about["on"] in names
    }
    splits = {
        split: replace(
            each,
            files=[
                _rewrite_shard(target, folder, below, file, names, row_id or 0, dataset, seen) for file in each.files
            ],
        )
        for split, each in dataset.splits.items()
    }
    sides = [
        _rewrite_side_table(folder, below, side, names, row_id or 0, seen.get(side.index, ("", set()))[1], dataset)
        for side in dataset.side_tables
    ]
    sparse = [
        replace(each, vocabulary_bytes=written[each.vocabulary][0], vocabulary_sha256=written[each.vocabulary][1])
        if each.vocabulary in written and each.vocabulary_sha256 is not None else each
        for each in dataset.sparse_features
    ]  # fmt: skip
    after = replace(dataset, splits=splits, sparse_features=sparse, side_tables=sides)
    if after == dataset:  # no row is of the group, and no feature has the value
        return None
    after = known.setdefault(dataset.fingerprint(), after)
    storage.publish_text(os.path.join(staged, FILE_NAME), after.to_json())
    return row_id


def _write_vocabulary(target: Target, path: str, output: str, row_id: int) -> None:
    """Write the vocabulary with a tombstone, whose count is 0: an extended vocabulary then drops it."""
    with pq.ParquetFile(path) as file:
        schema, codec = file.schema_arrow, file.metadata.row_group(0).column(0).compression
        with pq.ParquetWriter(output, schema, compression=codec) as writer:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                is_it = pc.equal(table["id"], row_id)
                columns: dict[str, Any] = {"value": target.tombstone(row_id), "count": 0}
                for name, after in columns.items():
                    kind = table.schema.field(name).type
                    column = pc.if_else(is_it, pa.scalar(after, kind), table[name])
                    table = table.set_column(table.column_names.index(name), schema.field(name), column)
                writer.write_table(table)
    atomic.make_durable(output)


def _rewrite_shard(
    target: Target, folder: Rewritten, below: str, shard: ShardFile, names: list[str], row_id: int, dataset: Dataset,
    seen: Versions,
) -> ShardFile:  # fmt: skip
    """Rewrite a shard in which the id occurs. A version of a registry has no shards."""
    name = os.path.join(below, shard.path)
    path = os.path.join(folder.path, name)
    if not os.path.exists(path):
        return shard
    _check_whole(path, shard.sha256)
    group = (
        int(hash_text(pa.array([target.value]), 0).view(np.int64)[0])
        if dataset.group_column == target.feature
        else None
    )
    with pq.ParquetFile(path) as file:
        read = (_without_versions(file.read_row_group(n), row_id, seen) for n in range(file.num_row_groups))
        groups = [_erased(table, names, row_id, group) for table in read]
        if not any(changed for _, changed in groups):
            return shard
        output, codec = folder.new(name), file.metadata.row_group(0).column(0).compression
        with pq.ParquetWriter(output, file.schema_arrow, compression=codec) as writer:
            for table, _ in groups:
                writer.write_table(table, row_group_size=max(1, table.num_rows))
    atomic.make_durable(output)
    size, digest = _size_and_digest(output)
    return replace(shard, size_bytes=size, sha256=digest)


def _without_versions(table: pa.Table, row_id: int, seen: Versions) -> pa.Table:
    """Return the rows of a shard, in which rows of the value see no version. Add the versions that they saw to `seen`."""
    for index, (key, versions) in seen.items():
        is_it = pc.equal(table[key], row_id)
        versions.update(table[index].filter(is_it).to_pylist())
        at = table.column_names.index(index)
        field = table.schema.field(index)
        table = table.set_column(at, field, pc.if_else(is_it, pa.scalar(0, field.type), table[index]))
    return table


def _rewrite_side_table(
    folder: Rewritten, below: str, side: SideTable, names: list[str], row_id: int, versions: set[int], dataset: Dataset
) -> SideTable:
    """Rewrite a side table without `versions`, and without the id in other versions, for example in histories."""
    name = os.path.join(below, side.path)
    path = os.path.join(folder.path, name)
    if not os.path.exists(path):
        return side
    _check_whole(path, side.sha256)
    with pq.ParquetFile(path) as file:
        before, codec = file.read(), file.metadata.row_group(0).column(0).compression
    table, changed = _erased(before, names, row_id, None)
    is_kept = pc.invert(pc.is_in(table[VERSION], pa.array(sorted(versions - {0}), table.schema.field(VERSION).type)))
    table = table.filter(is_kept)
    if not changed and len(table) == len(before):
        return side
    if versions and not pc.any(pc.equal(table[VERSION], 0)).as_py():
        table = pa.concat_tables([_missing_values(table.schema, dataset), table])
    output = folder.new(name)
    with pq.ParquetWriter(output, before.schema, compression=codec) as writer:
        writer.write_table(table, row_group_size=ROWS_AT_ONCE)
    atomic.make_durable(output)
    size, digest = _size_and_digest(output)
    return replace(side, num_rows=len(table), size_bytes=size, sha256=digest)


def _missing_values(schema: pa.Schema, dataset: Dataset) -> pa.Table:
    """Return the row of version 0, whose values are missing, as `prepare` writes it."""
    columns = {}
    for each in schema:
        value: Any = [] if pa.types.is_list(each.type) else 0
        if each.name in dataset.dense_features:
            transform = transform_of(each.name, dataset.dense_transform, dataset.dense_columns)
            value = float(transform(np.array([np.nan]))[0])
        columns[each.name] = pa.array([value], each.type)
    return pa.table(columns, schema=schema)


def _check_whole(path: str, sha256: str) -> None:
    if storage.sha256_of(path) != sha256:
        raise EraseError(f"{path} is damaged: its SHA-256 is not that in {FILE_NAME}; restore it, or prepare again")


def _erased(table: pa.Table, names: list[str], row_id: int, group: int | None) -> tuple[pa.Table, bool]:
    """Return the rows with 0 instead of the id, and whether there was one."""
    changed = False
    columns = [(name, row_id) for name in names] + ([(GROUP_COLUMN, group)] if group is not None else [])
    for name, before in columns:
        if name not in table.column_names:
            continue
        column = table[name].combine_chunks()
        lists = pa.types.is_list(column.type)
        flat = column.flatten() if lists else column
        is_it = pc.equal(flat, pa.scalar(before, flat.type))
        if not pc.any(is_it).as_py():
            continue
        flat = pc.if_else(is_it, pa.scalar(0, flat.type), flat)
        if lists:
            offsets = np.concatenate([[0], np.cumsum(pc.list_value_length(column).fill_null(0).to_numpy())]).astype(
                np.int32
            )
            flat = pa.ListArray.from_arrays(pa.array(offsets), flat, type=column.type)
        table = table.set_column(table.column_names.index(name), table.schema.field(name), flat)
        changed = True
    return table, changed


def _size_and_digest(path: str) -> tuple[int, str]:
    return os.path.getsize(path), storage.sha256_of(path)
