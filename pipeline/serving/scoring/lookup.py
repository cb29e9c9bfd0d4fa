"""Look up and pool the rows of an artifact's tables.

A TableLookup takes the ids of a batch, feature by feature, and returns one vector per sample and
feature. RowPooler pools rows in any buffer by FBGEMM's inference lookup.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import fbgemm_gpu  # noqa: F401  # registers torch.ops.fbgemm
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from numpy.typing import NDArray

from pipeline.runtime.errors import ServingError
from pipeline.runtime.storage.checksums import FileEntry, VerifiedFile
from pipeline.serving.artifact.quantize import KeptRows, row_bytes

POOLINGS = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN}
ALIGNMENT = 128  # of each table in a buffer, as FBGEMM lays them out


@dataclass(frozen=True)
class ServedTable:
    """One table's file: `stored_rows` rows of `row_bytes` bytes, in the format of
    quantize.quantize_rows. `rows`: the number of trained rows; ids are in [0, rows). `kept`: the
    stored rows; None: all. `entry`: checksums of the file, None if there are none.
    """

    name: str
    rows: int
    stored_rows: int
    dim: int
    precision: str
    pooling: str
    path: str
    kept: KeptRows | None = None
    entry: FileEntry | None = None

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.dim, self.precision)

    @property
    def size_bytes(self) -> int:
        return self.stored_rows * self.row_bytes


@dataclass(frozen=True)
class ServedFeature:
    """A feature of the batch. `table` is the number of its table."""

    name: str
    table: int


class TableLookup(Protocol):
    """The lookup of one artifact. `features` are in the order of the batch's keys and of the result's columns."""

    tables: list[ServedTable]
    features: list[ServedFeature]

    def patch(self, table: int, ids: torch.Tensor, rows: torch.Tensor) -> Callable[[], None]:
        """Replace rows `ids` [n] of table number `table` by `rows` [n, row_bytes] in memory.

        `ids` ascend. Return a function that restores the earlier rows. Neither function may run
        during pooled().
        """

    def stored(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Return [n, row_bytes]: the current rows `ids` of table number `table`."""

    def pooled(self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return pooled rows [batch, sum of the features' dims] float32. values, offsets, weights:
        as in a KeyedJaggedTensor. A mean is the sum divided by the number of ids, even if ids
        have weights. Raises ServingError for an id outside its table.
        """


def select_features(
    values: torch.Tensor,
    offsets: torch.Tensor,
    num_features: int,
    positions: Sequence[int],
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (values, offsets, weights) of features in the order of `positions`; unchanged if all are."""
    if list(positions) == list(range(num_features)):
        return values, offsets, weights
    batch = (len(offsets) - 1) // num_features
    lengths = offsets.diff().view(num_features, batch)[list(positions)].reshape(-1)
    parts = [slice(int(offsets[i * batch]), int(offsets[(i + 1) * batch])) for i in positions]
    chosen = torch.cat([values[part] for part in parts])
    own = None if weights is None else torch.cat([weights[part] for part in parts])
    return chosen, torch.cat([offsets.new_zeros(1), lengths.cumsum(0)]), own


def with_empty_bags(
    values: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    batch: int,
    own: Sequence[str],
    keys: Sequence[str],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Convert (values, offsets, weights) of `batch` rows from the features `own` to the
    features `keys`. Features that are not in `own` get no ids.
    """
    lengths = offsets.diff().view(len(own), batch)
    ends = offsets[::batch].tolist() if batch else [0] * (len(own) + 1)
    bounds = dict(zip(own, pairwise(ends), strict=True))
    spans = [slice(*bounds[key]) for key in keys if key in bounds]
    nothing = lengths.new_zeros(batch)
    counts = [lengths[own.index(key)] if key in bounds else nothing for key in keys]
    chosen = torch.cat([values[:0], *(values[span] for span in spans)])
    of_chosen = None if weights is None else torch.cat([weights[:0], *(weights[span] for span in spans)])
    return chosen, torch.cat([lengths.new_zeros(1), torch.cat(counts).cumsum(0)]), of_chosen


def stored_rows_of(
    tables: Sequence[ServedTable], features: Sequence[ServedFeature], values: torch.Tensor, offsets: torch.Tensor
) -> NDArray[np.int64]:
    """Return [n]: the row of each id in its table's file. Raises ServingError for ids outside their table."""
    ids = values.long().contiguous().numpy()
    batch = (len(offsets) - 1) // max(1, len(features))
    bounds = offsets.numpy()[::batch] if batch else np.zeros(len(features) + 1, np.int64)
    ends = bounds.tolist()
    rows = np.array([tables[feature.table].rows for feature in features], np.uint64)
    # As unsigned numbers, negative ids are past every table's end.
    is_outside = ids.view(np.uint64) >= np.repeat(rows, bounds[1:] - bounds[:-1])
    if is_outside.any():
        position = int(np.argmax(is_outside))
        feature = features[int(np.searchsorted(ends, position, side="right")) - 1]
        raise ServingError(
            f"feature {feature.name!r} has id {ids[position]}, not one within [0, {tables[feature.table].rows})"
        )
    result = ids
    for feature, begin, end in zip(features, ends, ends[1:], strict=False):
        kept = tables[feature.table].kept
        if kept is not None and begin < end:
            result = ids.copy() if result is ids else result
            result[begin:end] = kept.remap(ids[begin:end])
    return result


class RowPooler:
    """FBGEMM's lookup of `features` over rows in one uint8 buffer. The rows of table t begin at byte begins[t]."""

    def __init__(
        self,
        tables: Sequence[ServedTable],
        features: Sequence[ServedFeature],
        buffer: torch.Tensor,
        begins: Sequence[int],
    ) -> None:
        self._groups = []  # one a kind of pooling, for FBGEMM has one for all its tables
        self._ends = [0, *accumulate(tables[feature.table].dim for feature in features)]
        for pooling in sorted({tables[feature.table].pooling for feature in features}):
            positions = [i for i, feature in enumerate(features) if tables[feature.table].pooling == pooling]
            used = sorted({features[i].table for i in positions})
            specs = [("", 1, tables[t].dim, SparseType(tables[t].precision), EmbeddingLocation.HOST) for t in used]
            tbe = IntNBitTableBatchedEmbeddingBagsCodegen(
                specs,
                feature_table_map=[used.index(features[i].table) for i in positions],
                pooling_mode=POOLINGS[pooling],
                device="cpu",
                bounds_check_mode=BoundsCheckMode.NONE,  # stored_rows_of() has looked at every id
                output_dtype=SparseType.FP32,
            )
            tbe.initialize_weights()
            tbe.weights_host = buffer
            tbe.weights_offsets = torch.tensor([begins[features[i].table] for i in positions], dtype=torch.int64)
            self._groups.append((tbe, positions))

    def pool(self, rows: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the pooled rows. rows [n] int64 in their tables; offsets [num_features * batch + 1]; weights [n]."""
        num_features = len(self._ends) - 1
        if len(self._groups) == 1:
            pooled: torch.Tensor = self._groups[0][0](rows, offsets, weights)
            return pooled
        result = torch.empty((len(offsets) - 1) // num_features, self._ends[-1])
        for tbe, positions in self._groups:
            pooled, begin = tbe(*select_features(rows, offsets, num_features, positions, weights)), 0
            for i in positions:
                width = self._ends[i + 1] - self._ends[i]
                result[:, self._ends[i] : self._ends[i + 1]] = pooled[:, begin : begin + width]
                begin += width
        return result


class BufferLookup:
    """A lookup whose rows stay in one buffer."""

    def __init__(
        self, tables: list[ServedTable], features: list[ServedFeature], buffer: torch.Tensor, begins: list[int]
    ) -> None:
        self.tables, self.features = tables, features
        self._buffer, self._begins = buffer, begins
        self._pooler = RowPooler(tables, features, buffer, begins)
        self._rows = [
            buffer[begin : begin + table.size_bytes].view(table.stored_rows, table.row_bytes)
            for table, begin in zip(tables, begins, strict=True)
        ]

    def part(self, names: Sequence[str]) -> BufferLookup:
        """Return the lookup of some features, in this order, in the same rows."""
        part, features = copy.copy(self), {feature.name: feature for feature in self.features}
        part.features = [features[name] for name in names]
        part._pooler = RowPooler(self.tables, part.features, self._buffer, self._begins)
        return part

    def patch(self, table: int, ids: torch.Tensor, rows: torch.Tensor) -> Callable[[], None]:
        return replace_rows(self._rows[table], ids, rows)

    def stored(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        return self._rows[table][ids]

    def pooled(self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        rows = torch.from_numpy(stored_rows_of(self.tables, self.features, values, offsets))
        return self._pooler.pool(rows, offsets, weights)


class RamLookup(BufferLookup):
    """Reads every table into memory, and verifies it if there are checksums. Raises DamagedError."""

    def __init__(self, tables: list[ServedTable], features: list[ServedFeature]) -> None:
        begins, size = [], 0
        for table in tables:
            begins.append(size)
            size += -(-table.size_bytes // ALIGNMENT) * ALIGNMENT
        buffer = torch.empty(max(size, 1), dtype=torch.uint8)
        for table, begin in zip(tables, begins, strict=True):
            read_rows(table, memoryview(buffer.numpy())[begin : begin + table.size_bytes])  # type: ignore[arg-type]
        super().__init__(tables, features, buffer, begins)


def replace_rows(of: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> Callable[[], None]:
    """Overwrite rows `ids` of a table with `rows` [n, row_bytes]. Return a function that restores the earlier rows."""
    before = of[ids]
    of[ids] = rows
    return lambda: of.__setitem__(ids, before)


def read_rows(table: ServedTable, into: memoryview) -> None:
    """Fill `into` with a table's file. Raises DamagedError if the file differs from its checksums, or is too short."""
    with VerifiedFile(table.path, table.entry) if table.entry else open(table.path, "rb") as file:
        filled = 0
        while filled < len(into):
            count = file.readinto(into[filled:])
            if not count:
                raise ServingError(f"{table.path} ends {len(into) - filled} bytes too soon")
            filled += count


class MappedLookup:
    """Reads every table from its memory-mapped file, which is not verified here."""

    def __init__(self, tables: list[ServedTable], features: list[ServedFeature]) -> None:
        self.tables, self.features = tables, features
        self._files = [
            torch.from_file(table.path, shared=False, size=table.size_bytes, dtype=torch.uint8) for table in tables
        ]
        self._poolers = [
            RowPooler([tables[feature.table]], [ServedFeature(feature.name, 0)], self._files[feature.table], [0])
            for feature in features
        ]

    def patch(self, table: int, ids: torch.Tensor, rows: torch.Tensor) -> Callable[[], None]:
        """Replace rows. The memory pages with these rows become private copies of this process."""
        return replace_rows(self._of(table), ids, rows)

    def stored(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        return self._of(table)[ids]

    def _of(self, table: int) -> torch.Tensor:
        return self._files[table].view(self.tables[table].stored_rows, self.tables[table].row_bytes)

    def pooled(self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        rows = torch.from_numpy(stored_rows_of(self.tables, self.features, values, offsets))
        batch = (len(offsets) - 1) // len(self.features)
        parts = []
        for position, pooler in enumerate(self._poolers):
            ends = offsets[position * batch : (position + 1) * batch + 1]
            own = None if weights is None else weights[ends[0] : ends[-1]]
            parts.append(pooler.pool(rows[ends[0] : ends[-1]], ends - ends[0], own))
        return torch.cat(parts, dim=1)
