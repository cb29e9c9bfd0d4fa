"""Write staged rows, with the ids of their codes, as Parquet shards.

Columns: labels and weight as Features.label_types says, dense features float32, one-hot features and those in buckets int32, multi-hot features
list<int32>, of weighted ones list<float32> beside, and the group int64 where there is one; none is null.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config.splits import SPLITS
from pipeline.data.dataset import GROUP_COLUMN, ShardFile, SparseFeature, weights_column
from pipeline.data.prepare.buckets import BucketIds
from pipeline.data.prepare.encode import TRUTH_COLUMN, Features
from pipeline.data.prepare.parallel import map_ordered
from pipeline.data.prepare.row_groups import in_row_groups
from pipeline.data.prepare.splits import BlockRows, Boundaries, read_block, split_of_block
from pipeline.data.raw.buckets import bucket_numbers
from pipeline.data.raw.transforms import Transform
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.arrow_files import read_numbers

# Ids are small numbers: LZ4 finds their zero bytes, a dictionary only costs the reader time. Readers verify the page
# checksums, so that a flipped bit on a disk is an error and not another id.
PARQUET_OPTIONS: dict[str, Any] = {
    "compression": "lz4",
    "use_dictionary": False,
    "write_statistics": False,
    "write_page_checksum": True,
}


@dataclass(frozen=True)
class ShardPlan:
    """The rows of one shard: those of `split` in `blocks`, from number `first_row` among them on."""

    split: int
    number: int
    blocks: list[BlockRows]
    first_row: int
    num_rows: int

    @property
    def path(self) -> str:
        return f"{SPLITS[self.split]}/{self.number:05d}.parquet"


@dataclass
class WrittenShard:
    """`truth`: label -> the teacher's probabilities, and `labels` what was sampled from them; empty where nothing was generated."""

    split: int
    file: ShardFile
    num_positives: int
    labels: dict[str, np.ndarray] = field(repr=False)
    truth: dict[str, np.ndarray] = field(repr=False)


def plan_shards(blocks: list[BlockRows], rows_per_shard: int) -> list[ShardPlan]:
    """Shards of each split in turn, rows in source order; only the last of a split is smaller."""
    plans = []
    for split in range(len(SPLITS)):
        held = [block for block in blocks if block.per_split[split]]
        for number, span in enumerate(spans_of([block.per_split[split] for block in held], rows_per_shard)):
            plans.append(ShardPlan(split, number, held[span.first : span.last], span.skip, span.num_rows))
    return plans


@dataclass(frozen=True)
class Span:
    """Rows of the parts `first` to `last` - 1: `num_rows`, after the first `skip`."""

    first: int
    last: int
    skip: int
    num_rows: int


def spans_of(counts: Sequence[int], size: int, begin: int = 0) -> Iterator[Span]:
    """Spans of `size` rows over parts that have `counts` of them, from row `begin` on; the last is smaller."""
    ends = np.cumsum([0, *counts])
    for start in range(begin, int(ends[-1]), size):
        end = min(start + size, int(ends[-1]))
        first = int(np.searchsorted(ends, start, side="right")) - 1
        yield Span(first, int(np.searchsorted(ends, end, side="left")), start - int(ends[first]), end - start)


class ShardWriter:
    """Writes shards in `staging` and moves them to `folder`; several threads may share it."""

    def __init__(
        self,
        features: Features,
        boundaries: Boundaries,
        staging: str,
        folder: str,
        row_group_rows: int,
        in_buckets: Sequence[tuple[SparseFeature, BucketIds]] = (),
        transforms: Mapping[str, Transform] | None = None,
    ) -> None:
        self._transforms = transforms or {}  # of columns that were staged as they were read
        self._in_buckets = in_buckets
        self._features, self._boundaries = features, boundaries
        self._staging, self._folder, self._row_group_rows = staging, folder, row_group_rows
        kinds = [*features.label_types.items(), *((name, pa.float32()) for name in features.dense)]
        kinds += [(name, pa.int32()) for name in (*features.one_hot, *features.buckets)]
        kinds += [(name, _lists_of(pa.int32())) for name in features.multi_hot]
        kinds += [(weights_column(name), _lists_of(pa.float32())) for name in features.weighted]
        kinds += [(GROUP_COLUMN, pa.int64())] if features.group else []
        self._schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds])

    def write(self, plan: ShardPlan) -> WrittenShard:
        """Write one shard into staging, then move it into the data set: a file that is there is whole. Called from several threads."""
        staged = os.path.join(self._staging, plan.path.replace("/", "-"))
        row_groups, num_positives = [], 0
        truth: dict[str, list[np.ndarray]] = defaultdict(list)
        labels: dict[str, list[np.ndarray]] = defaultdict(list)
        with pq.ParquetWriter(staged, self._schema, **PARQUET_OPTIONS) as out:
            for table in in_row_groups(self._read(plan), self._row_group_rows):
                out.write_table(table.select(self._schema.names).cast(self._schema))
                row_groups.append(table.num_rows)
                num_positives += int(np.count_nonzero(table[self._features.label].to_numpy()))
                generated = [name for name in self._features.labels if TRUTH_COLUMN + name in table.schema.names]
                for name in generated:
                    truth[name].append(table[TRUTH_COLUMN + name].to_numpy())
                for name in self._features.labels if generated else ():
                    labels[name].append(table[name].to_numpy())
        assert sum(row_groups) == plan.num_rows
        size, digest = os.path.getsize(staged), storage.sha256_of(staged)
        storage.move_file(staged, storage.join(self._folder, plan.path))
        return WrittenShard(
            split=plan.split,
            file=ShardFile(plan.path, plan.num_rows, size, digest, row_groups),
            num_positives=num_positives,
            labels={name: np.concatenate(parts) for name, parts in labels.items()},
            truth={name: np.concatenate(parts) for name, parts in truth.items()},
        )

    def _read(self, plan: ShardPlan) -> Iterator[pa.Table]:
        skip, remaining = plan.first_row, plan.num_rows
        # One thread reads ahead while the caller's compresses and writes.
        for table in map_ordered(lambda block: self._rows_of(block, plan.split), plan.blocks, threads=1):
            yield table.slice(skip, remaining)
            skip, remaining = 0, remaining - min(remaining, len(table) - skip)

    def _rows_of(self, block: BlockRows, split: int) -> pa.Table:
        batch = read_block(block.file, block.index)
        rows = np.flatnonzero(split_of_block(block, self._boundaries, batch) == split)
        contiguous = rows[-1] - rows[0] + 1 == len(rows)
        return self._with_ids(block, batch.slice(rows[0], len(rows)) if contiguous else batch.take(pa.array(rows)))

    def _with_ids(self, block: BlockRows, batch: pa.RecordBatch) -> pa.Table:
        """Codes replaced by ids: code 0, the missing value, is id 0."""
        num_values = block.file.num_values[block.index]
        ids = read_numbers(block.file.ids_path, block.first_entry, sum(num_values))
        ends = np.cumsum(num_values)
        columns = {name: batch[name] for name in batch.schema.names}
        for name, begin, end in zip(self._features.sparse, ends - num_values, ends, strict=True):
            id_of_code = np.concatenate([[0], ids[begin:end]]).astype(np.int32)
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
        for feature, id_of_bucket in self._in_buckets:
            numbers = bucket_numbers(columns[feature.name].to_numpy(), feature.boundaries or [])
            columns[feature.name] = pa.array(id_of_bucket[numbers])
        for name, transform in self._transforms.items():
            columns[name] = pa.array(transform(columns[name].to_numpy()))
        return pa.table(columns)


def _lists_of(element: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", element, nullable=False))
