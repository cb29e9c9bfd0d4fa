"""Write staged rows, with the ids of their codes, as Parquet shards.

Columns: labels and weight with the types of Features.label_types, dense features float32, one-hot
and bucketed features int32, multi-hot features list<int32>, their weights list<float32>, and the
group int64 if there is one. No value is null.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config.data import SPLITS
from pipeline.config.registry import from_extra
from pipeline.data.dataset import GROUP_COLUMN, ShardFile, SparseFeature, weights_column
from pipeline.data.prepare.buckets import BucketIds
from pipeline.data.prepare.divide import DividedFile, load_blocks
from pipeline.data.prepare.encode import TRUTH_COLUMN
from pipeline.data.prepare.parallel import map_ordered
from pipeline.data.prepare.recipe import Recipe, scratch_folder
from pipeline.data.prepare.row_groups import in_row_groups
from pipeline.data.prepare.splits import BlockRows, Boundaries, read_block, split_of_block
from pipeline.data.raw.dense_transforms import Transform, bucket_numbers
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.arrow_files import read_numbers

# Ids are small numbers: LZ4 compresses their zero bytes, and a dictionary would cost the reader
# time. Readers verify page checksums, so a flipped bit on a disk is an error and not another id.
PARQUET_OPTIONS: dict[str, Any] = {
    "compression": "lz4",
    "use_dictionary": False,
    "write_statistics": False,
    "write_page_checksum": True,
}
OBJECTS_AT_ONCE = 16


@dataclass
class WrittenShard:
    """A written shard.

    For generated data, `truth` maps a label to the teacher's probabilities, and `labels` holds the
    sampled labels and the weight column.
    """

    split: int
    file: ShardFile
    num_positives: int
    # sum of the weights of the main label's rows, and of its positives
    weight: float
    positive_weight: float
    labels: dict[str, np.ndarray] = field(repr=False)
    truth: dict[str, np.ndarray] = field(repr=False)
    # for each key of Features.stored_once, what write_side_tables reads
    joined: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Span:
    """A span of `num_rows` rows over parts `first` to `last` - 1, which begins after the first `skip` rows."""

    first: int
    last: int
    skip: int
    num_rows: int


def spans_of(counts: Sequence[int], size: int, begin: int = 0) -> Iterator[Span]:
    """Yield spans of `size` rows from row `begin` on. `counts` are the rows of each part. The last
    span may be smaller.
    """
    ends = np.cumsum([0, *counts])
    for start in range(begin, int(ends[-1]), size):
        end = min(start + size, int(ends[-1]))
        first = int(np.searchsorted(ends, start, side="right")) - 1
        yield Span(first, int(np.searchsorted(ends, end, side="left")), start - int(ends[first]), end - start)


@dataclass(frozen=True)
class FileOfShard:
    """A file whose rows go to a shard. `folder`, `path`: the outputs of staging and dividing it.
    `first_values` [num_features]: the number of its first value among the values of all files.
    """

    folder: str
    path: str
    first_values: list[int]


@dataclass(frozen=True)
class SharedByShards:
    """Input that all shards have in common.

    `ids_paths`: for each feature a file of ids (int32). `transforms`: transforms of columns that
    were staged as read.
    """

    boundaries: Boundaries
    ids_paths: list[str]
    in_buckets: list[tuple[SparseFeature, BucketIds]] = field(default_factory=list)
    transforms: dict[str, Transform] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardToWrite:
    """A shard to write: rows of `split` from row number `first_row` on, which come from `files`."""

    split: int
    number: int
    files: list[FileOfShard]
    first_row: int
    num_rows: int
    shared: SharedByShards

    @property
    def path(self) -> str:
        return f"{SPLITS[self.split]}/{self.number:05d}.parquet"


def plan_shards(files: Sequence[DividedFile], rows_per_shard: int, shared: SharedByShards) -> list[ShardToWrite]:
    """Plan the shards of one split after another, with rows in source order. Only a split's last shard is smaller."""
    num_values = np.array([file.num_values for file in files], np.int64)
    firsts = (np.cumsum(num_values, axis=0) - num_values).tolist()
    found = []
    for split in range(len(SPLITS)):
        held = [(file, first) for file, first in zip(files, firsts, strict=True) if file.per_split[split]]
        named = [FileOfShard(file.folder, file.path, first) for file, first in held]
        spans = spans_of([file.per_split[split] for file, _ in held], rows_per_shard)
        for number, span in enumerate(spans):
            of_shard = named[span.first : span.last]
            found.append(ShardToWrite(split, number, of_shard, span.skip, span.num_rows, shared))
    return found


def write_shard(recipe: Recipe, item: ShardToWrite) -> WrittenShard:
    """Task: write one shard into a scratch folder, then move it into the data set, so an
    existing file is complete."""
    with scratch_folder(recipe) as scratch:
        return _ShardWriter(recipe, item).write(os.path.join(scratch, "shard.parquet"))


class _ShardWriter:
    def __init__(self, recipe: Recipe, item: ShardToWrite) -> None:
        features = recipe.features
        self._recipe, self._item, self._features = recipe, item, features
        kinds = [*features.label_types.items(), *((name, pa.float32()) for name in features.dense)]
        kinds += [(name, pa.int32()) for name in (*features.one_hot, *features.buckets)]
        kinds += [(name, _lists_of(pa.int32())) for name in features.multi_hot]
        kinds += [(weights_column(name), _lists_of(pa.float32())) for name in features.weighted]
        kinds += [(GROUP_COLUMN, pa.int64())] if features.group else []
        self._schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds])
        once = {name for names in features.stored_once.values() for name in names}
        kinds = [(name, kind) for name, kind in kinds if name not in once]
        kinds += [(name, pa.int32()) for name in features.stored_once]
        self._written = pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds])

    def write(self, staged: str) -> WrittenShard:
        item = self._item
        row_groups, num_positives, weight, positive_weight = [], 0, 0.0, 0.0
        truth: dict[str, list[np.ndarray]] = defaultdict(list)
        labels: dict[str, list[np.ndarray]] = defaultdict(list)
        recorder = None
        if self._features.stored_once:
            recorder = from_extra("record_joined", "data.joins")(self._recipe, item.path, self._schema)
        # Half of the bytes of a version are 0. If equal bytes are next to each other, LZ4 is twice as fast.
        encodings = dict.fromkeys(self._features.stored_once, "BYTE_STREAM_SPLIT") or None
        with pq.ParquetWriter(staged, self._written, column_encoding=encodings, **PARQUET_OPTIONS) as out:
            for table in in_row_groups(self._read(), self._recipe.config.rows_per_row_group):
                out.write_table(table.select(self._written.names).cast(self._written))
                if recorder is not None:
                    recorder.add(table)
                row_groups.append(table.num_rows)
                positive = table[self._features.label].to_numpy() != 0
                num_positives += int(np.count_nonzero(positive))
                weights = self._weights(table)
                weight, positive_weight = weight + float(weights.sum()), positive_weight + float(weights @ positive)
                generated = [name for name in self._features.labels if TRUTH_COLUMN + name in table.schema.names]
                for name in generated:
                    truth[name].append(table[TRUTH_COLUMN + name].to_numpy())
                for name in (*self._features.labels, *filter(None, [self._features.weight])) if generated else ():
                    labels[name].append(table[name].to_numpy())
        assert sum(row_groups) == item.num_rows
        size, digest = os.path.getsize(staged), storage.sha256_of(staged)
        storage.move_file(staged, storage.join(self._recipe.config.path, item.path))
        return WrittenShard(
            split=item.split,
            file=ShardFile(item.path, item.num_rows, size, digest, row_groups),
            num_positives=num_positives,
            weight=weight,
            positive_weight=positive_weight,
            labels={name: np.concatenate(parts) for name, parts in labels.items()},
            truth={name: np.concatenate(parts) for name, parts in truth.items()},
            joined=[] if recorder is None else recorder.write(os.path.dirname(staged)),
        )

    def _weights(self, table: pa.Table) -> np.ndarray:
        """Return the weights [rows] that an evaluation gives the main label."""
        features, sampling = self._features, self._features.negative_sampling
        weights = np.ones(table.num_rows)
        if features.weight:
            weights *= table[features.weight].to_numpy()
        if mask := features.labels[features.label].mask:
            weights *= table[mask].to_numpy() == 1
        if sampling and SPLITS[self._item.split] == "train":
            weights[table[sampling.label].to_numpy() == 0] /= sampling.keep
        return weights

    def _read(self) -> Iterator[pa.Table]:
        item = self._item
        split = item.split
        held = [(file, block) for file in item.files for block in load_blocks(file.folder, file.path)]
        held = [(file, block) for file, block in held if block.per_split[split]]
        span = next(spans_of([block.per_split[split] for _, block in held], item.num_rows, begin=item.first_row))
        skip, remaining = span.skip, item.num_rows
        # One thread reads ahead while the caller's thread compresses and writes.
        for table in map_ordered(lambda pair: self._rows_of(*pair), held[span.first : span.last], threads=1):
            yield table.slice(skip, remaining)
            skip, remaining = 0, remaining - min(remaining, len(table) - skip)

    def _rows_of(self, file: FileOfShard, block: BlockRows) -> pa.Table:
        batch = read_block(block.file, block.index)
        rows = np.flatnonzero(split_of_block(block, self._item.shared.boundaries, batch) == self._item.split)
        contiguous = rows[-1] - rows[0] + 1 == len(rows)
        batch = batch.slice(rows[0], len(rows)) if contiguous else batch.take(pa.array(rows))
        return self._with_ids(self._ids_of(file, block), batch)

    def _ids_of(self, file: FileOfShard, block: BlockRows) -> Iterator[np.ndarray]:
        """Yield for each feature the array that maps a code to an id."""
        paths = self._item.shared.ids_paths
        firsts = (np.array(file.first_values) + block.file.first_values[block.index]).tolist()
        spans = zip(paths, firsts, block.file.num_values[block.index], strict=True)
        if all(map(storage.is_local, paths)):
            found: Iterable[np.ndarray] = (read_numbers(*span) for span in spans)
        else:  # an object store answers slowly, but many requests in parallel
            found = map_ordered(lambda span: read_numbers(*span), spans, OBJECTS_AT_ONCE)
        for ids in found:
            yield np.concatenate([[0], ids]).astype(np.int32)  # code 0, the missing value, is id 0

    def _with_ids(self, ids: Iterator[np.ndarray], batch: pa.RecordBatch) -> pa.Table:
        """Return the batch with ids instead of codes."""
        columns = {name: batch[name] for name in batch.schema.names}
        for name, id_of_code in zip(self._features.sparse, ids, strict=True):
            column = columns[name]
            if name in self._features.multi_hot:
                lengths = pc.list_value_length(column).to_numpy()
                offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
                flat = pa.array(id_of_code[column.flatten().to_numpy()])
                columns[name] = pa.ListArray.from_arrays(pa.array(offsets), flat, type=self._schema.field(name).type)
            else:
                columns[name] = pa.array(id_of_code[column.to_numpy()])
        for name in map(weights_column, self._features.weighted):
            lengths = pc.list_value_length(columns[name]).to_numpy()
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            kind = self._schema.field(name).type
            columns[name] = pa.ListArray.from_arrays(pa.array(offsets), columns[name].flatten(), type=kind)
        for feature, id_of_bucket in self._item.shared.in_buckets:
            numbers = bucket_numbers(columns[feature.name].to_numpy(), feature.boundaries or [])
            columns[feature.name] = pa.array(id_of_bucket[numbers])
        for name, transform in self._item.shared.transforms.items():
            columns[name] = pa.array(transform(columns[name].to_numpy()))
        return pa.table(columns)


def _lists_of(element: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", element, nullable=False))
