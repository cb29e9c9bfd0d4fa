"""Turn a row group of a Parquet shard into a Block of checked, shuffled columns.

What would train wrong without an error is refused here: ids outside the table, labels other than 0 and 1,
values that are missing or not finite, files that are not the ones dataset.json names.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline import storage
from pipeline.data.dataset import FILE_NAME, Dataset, ShardFile, SparseFeature, Split
from pipeline.data.streams import Segment, row_permutation

MAX_IDLE_FILES = 32
WAY_OUT = f"compare the file's checksum with {FILE_NAME}, copy it again, or remove the folder and run `python -m pipeline.prepare`"


@dataclass(frozen=True)
class Lists:
    """A list-valued feature: row i holds ids[offsets[i]:offsets[i + 1]]."""

    ids: NDArray[np.integer]
    offsets: NDArray[np.int64]

    def take(self, rows: NDArray[np.int64]) -> Lists:
        """The lists of `rows`, one after the other."""
        starts = self.offsets[:-1][rows]
        lengths = self.offsets[1:][rows] - starts
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        # Id k of the result lies at its list's start plus its place in the list.
        return Lists(self.ids[np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)], offsets)


@dataclass(frozen=True)
class Block:
    """Rows in reading order; features keep the data set's order within `one_hot` and `lists`."""

    dense: NDArray[np.float32]  # [rows, num_dense]
    one_hot: NDArray[np.signedinteger]  # [num_one_hot, rows]
    lists: list[Lists]
    labels: NDArray[np.float32]  # [rows]


class Shards:
    """The files of one split. Decoding is safe from several threads: each borrows a file handle of its own."""

    def __init__(self, folder: str, dataset: Dataset, split: Split) -> None:
        self.dataset = dataset
        self.files = split.files
        self.row_group_sizes = [rows for shard in split.files for rows in shard.row_groups]
        self._places = [(i, group) for i, shard in enumerate(split.files) for group in range(len(shard.row_groups))]
        self._folder = folder
        self._columns = [dataset.label, *dataset.dense_features, *dataset.sparse_feature_names]
        self._idle: OrderedDict[int, list[pq.ParquetFile]] = OrderedDict()
        self._lock = threading.Lock()
        check_files(folder, split)

    def decode(self, segment: Segment, seed: int, epoch: int, shuffled: bool) -> Block:
        """Raises ValueError that names file, row group and column for data that must not be trained on."""
        index, row_group = self._places[segment.row_group]
        where = f"{storage.join(self._folder, self.files[index].path)}, row group {row_group}"
        with self._borrow(index) as file:
            try:
                table = file.read_row_group(row_group, columns=self._columns, use_threads=False)
            except (OSError, pa.ArrowException) as error:
                raise ValueError(f"{where} cannot be read ({error}); {WAY_OUT}") from error
        rows = self.row_group_sizes[segment.row_group]
        chosen = row_permutation(seed, epoch, segment.row_group, rows) if shuffled else np.arange(rows)
        return decode_block(table, self.dataset, chosen[segment.start : segment.stop], where)

    @contextmanager
    def _borrow(self, index: int) -> Iterator[pq.ParquetFile]:
        with self._lock:
            handles = self._idle.pop(index, [])
            file = handles.pop() if handles else None
            if handles:
                self._idle[index] = handles
        file = file or self._open(index)
        yield file
        with self._lock:  # not reached after an error: a handle in doubt is dropped
            self._idle.setdefault(index, []).append(file)
            self._idle.move_to_end(index)
            dropped = self._idle.popitem(last=False)[1] if len(self._idle) > MAX_IDLE_FILES else []
        for handle in dropped:
            handle.close()

    def _open(self, index: int) -> pq.ParquetFile:
        shard = self.files[index]
        path = storage.join(self._folder, shard.path)
        # A remote shard is downloaded once, into iopath's cache: its row groups are read in random order,
        # and iopath's own S3 handle fetches the whole object for each of them.
        local = storage.local_path(path)
        check_size(path, shard, os.path.getsize(local))
        try:
            # No memory map: a disk error is then an exception and not SIGBUS, at equal speed. No pre_buffer: its
            # hand-over to pyarrow's IO threads costs a third of the rows/s on one core.
            file = pq.ParquetFile(local, pre_buffer=False, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{path} is not a readable Parquet file ({error}); {WAY_OUT}") from error
        check_layout(path, shard, file, self.dataset)
        return file


def check_files(folder: str, split: Split) -> None:
    """Raise ValueError for shards that are missing or differ in size from dataset.json, and for counts at odds in it.

    Sizes of remote shards are checked when they are opened: asking for them would download them.
    """
    names = {os.path.dirname(shard.path): set[str]() for shard in split.files}
    for parent in names:
        names[parent] = set(storage.list_folder(storage.join(folder, parent)))
    missing = [
        shard.path for shard in split.files if os.path.basename(shard.path) not in names[os.path.dirname(shard.path)]
    ]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(split.files)} shards are missing from {folder}, the first is {missing[0]}; "
            "copy them again, or remove the folder and run `python -m pipeline.prepare`"
        )
    counted = sum(sum(shard.row_groups) for shard in split.files)
    if counted != split.num_rows:
        raise ValueError(f"{FILE_NAME} counts {split.num_rows} rows, but row groups with {counted}; {WAY_OUT}")
    if storage.is_local(folder):
        for shard in split.files:
            path = storage.join(folder, shard.path)
            check_size(path, shard, os.path.getsize(path))


def check_size(path: str, shard: ShardFile, size_bytes: int) -> None:
    if size_bytes != shard.size_bytes:
        raise ValueError(f"{path} has {size_bytes} bytes, {FILE_NAME} says {shard.size_bytes}; {WAY_OUT}")


def check_layout(path: str, shard: ShardFile, file: pq.ParquetFile, dataset: Dataset) -> None:
    """Raise ValueError unless row groups and column types are what dataset.json promises."""
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    if sizes != shard.row_groups:
        raise ValueError(
            f"{path} has {len(sizes)} row groups with {sum(sizes)} rows, {FILE_NAME} says "
            f"{len(shard.row_groups)} with {shard.num_rows} (or other sizes of single ones); {WAY_OUT}"
        )
    types = {field.name: field.type for field in file.schema_arrow}
    wanted = {dataset.label: "a number", **dict.fromkeys(dataset.dense_features, "a number")}
    wanted |= {f.name: "a list of integers" if f.multi_hot else "an integer" for f in dataset.sparse_features}
    for name, kind in wanted.items():
        if name not in types:
            raise ValueError(f"{path} has no column {name!r}; {WAY_OUT}")
        if not _is_a(kind, types[name]):
            raise ValueError(f"{path}: column {name!r} is {types[name]}, expected {kind}; {WAY_OUT}")


def _is_a(kind: str, type_: pa.DataType) -> bool:
    if kind == "a list of integers":
        is_list = pa.types.is_list(type_) or pa.types.is_large_list(type_)
        return is_list and pa.types.is_integer(type_.value_type)
    return pa.types.is_integer(type_) or (kind == "a number" and pa.types.is_floating(type_))


def decode_block(table: pa.Table, dataset: Dataset, rows: NDArray[np.int64], where: str) -> Block:
    """The chosen rows of a row group, in the order of `rows`; all rows of the row group are checked.

    Few calls on whole matrices: each numpy call lets go of the GIL, and taking it back beside a busy trainer
    costs more than the work on one column.
    """
    labels = _matrix(table, [dataset.label], pa.float32(), where)[0]
    check_labels(labels, dataset.label, where)
    dense = _matrix(table, dataset.dense_features, pa.float32(), where)
    check_finite(dense, dataset.dense_features, where)
    features = [feature for feature in dataset.sparse_features if not feature.multi_hot]
    id_type = pa.int32() if all(feature.cardinality <= 2**31 for feature in features) else pa.int64()
    one_hot = _matrix(table, [feature.name for feature in features], id_type, where)
    check_ids(one_hot, features, where)
    lists = [_lists(table, feature, where).take(rows) for feature in dataset.sparse_features if feature.multi_hot]
    dense_rows = np.take(np.ascontiguousarray(dense.T), rows, axis=0)
    return Block(dense_rows, np.take(one_hot, rows, axis=1), lists, np.take(labels, rows))


def check_labels(labels: NDArray[np.float32], name: str, where: str) -> None:
    """Raise ValueError for labels other than 0 and 1; NaN is one."""
    known = (labels == 0) | (labels == 1)
    if not known.all():
        raise ValueError(
            f"{where}: label column {name!r} holds {labels[~known][0]:g}, only 0 and 1 are labels; {WAY_OUT}"
        )


def check_finite(dense: NDArray[np.float32], names: list[str], where: str) -> None:
    """Raise ValueError for a NaN or an infinity: one makes the whole dense part NaN within a step."""
    if not np.isfinite(dense).all():
        counts = (~np.isfinite(dense)).sum(axis=1)
        worst = int(counts.argmax())
        raise ValueError(
            f"{where}: dense column {names[worst]!r} holds {counts[worst]} NaN or infinite values; {WAY_OUT}"
        )


def check_ids(ids: NDArray[np.signedinteger], features: list[SparseFeature], where: str) -> None:
    """Raise ValueError for ids [features, any] outside their table: TorchRec would train row 0 in their place."""
    if not ids.size:
        return
    limits = [feature.cardinality for feature in features]
    outside = (ids.min(axis=1) < 0) | (ids.max(axis=1) >= np.array(limits))
    if outside.any():
        feature, values = features[int(outside.argmax())], ids[int(outside.argmax())]
        wrong = values[(values < 0) | (values >= feature.cardinality)]
        raise ValueError(
            f"{where}: feature {feature.name!r} holds {len(wrong)} ids outside [0, {feature.cardinality}), "
            f"the first is {wrong[0]}; {WAY_OUT}"
        )


def _matrix(table: pa.Table, names: list[str], type_: pa.DataType, where: str) -> NDArray:
    """[names, rows]; an id too large for `type_` is widened, for check_ids to find."""
    if not names:
        return np.empty((0, table.num_rows), type_.to_pandas_dtype())
    columns = [_array(table.column(name), f"{where}: column {name!r} holds") for name in names]
    if pa.types.is_integer(type_) and any(column.type != type_ for column in columns):
        type_ = pa.int64()
    columns = [column if column.type == type_ else column.cast(type_, safe=False) for column in columns]
    return pa.concat_arrays(columns).to_numpy(zero_copy_only=True).reshape(len(names), -1)


def _lists(table: pa.Table, feature: SparseFeature, where: str) -> Lists:
    array = _array(table.column(feature.name), f"{where}: column {feature.name!r} holds")
    # values: all of them, while offsets may begin behind the first.
    ids = _array(pa.chunked_array([array.values]), f"{where}: lists of {feature.name!r} hold").to_numpy()
    offsets = array.offsets.to_numpy()
    check_ids(ids[None, offsets[0] : offsets[-1]], [feature], where)
    return Lists(ids, offsets.astype(np.int64))


def _array(column: pa.ChunkedArray, where_holds: str) -> pa.Array:
    if column.null_count:
        raise ValueError(f"{where_holds} {column.null_count} nulls; {WAY_OUT}")
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
