"""Run FBGEMM's lookup modules on CPU by Numba kernels, with FBGEMM's weights, states and learning rates.

FBGEMM still holds the tables and the optimizer's state. The kernels replace FBGEMM's forward, which
reads the ids twice, and its backward, which sorts the ids of each table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.optimizers import all_optimizers
from pipeline.devices.cpu.kernel_pool import MIN_SHARE, on_all_threads
from pipeline.runtime.errors import ShardingError
from pipeline.runtime.logs import get_logger
from pipeline.sharding.table_storage import PinnedSlots, StorageLookup
from pipeline.sharding.torchrec.table_moments import feature_begins
from pipeline.sharding.torchrec.update_rule import UpdateRule

# FBGEMM's optimizer and its number in our kernels.
KINDS = {
    EmbOptimType[entry.fbgemm]: entry.cpu_kernel for entry in all_optimizers().values() if entry.cpu_kernel is not None
}
POOLINGS = (PoolingMode.SUM, PoolingMode.MEAN)
MIN_SAMPLES = 32  # minimum for each thread of a lookup, for any number of ids
SHARES = 2  # per thread; a table with more than one share is split
# of the work in partition_tables, because each part reads all ids of its table
MIN_UNIT = 100_000
MAX_SPLITS = 6  # each halves a table: 64 parts
logger = get_logger(__name__)


def speed_up_cpu_tables(modules: Iterable[nn.Module], rules: Mapping[str, UpdateRule] | None = None) -> int:
    """Replace forward and backward of each lookup that the kernels support; return how many.

    The kernels support fp32 and fp16 (rounded stochastically), SUM and MEAN, and optimizers that
    have a cpu_kernel. Without Numba nothing is replaced. rules: the rules of tables that need more
    than FBGEMM's settings.
    """
    inside = (child for module in modules for child in module.modules())
    lookups = [
        child for child in inside if isinstance(child, SplitTableBatchedEmbeddingBagsCodegen) and _is_supported(child)
    ]
    if not lookups:
        return 0
    try:
        from pipeline.devices.cpu.kernels.lookup import look_up
        from pipeline.devices.cpu.kernels.update import update_tables
    except ImportError as error:
        logger.info("tables are trained by FBGEMM's backward, which is slower: %s", error)
        return 0
    for lookup in lookups:
        lookup.forward = FastLookup(lookup, look_up, update_tables, rules or {})
    return len(lookups)


def fast_lookups(model: nn.Module) -> list[FastLookup]:
    """Return the fast lookups of all sharded tables in `model`."""
    sharded = [module for module in model.modules() if isinstance(module, ShardedEmbeddingBagCollection)]
    inside = (child for module in sharded for lookup in module._lookups for child in lookup.modules())
    return [child.forward for child in inside if isinstance(child.forward, FastLookup)]


def _is_supported(lookup: SplitTableBatchedEmbeddingBagsCodegen) -> bool:
    return bool(
        lookup.use_cpu
        and lookup.optimizer in KINDS
        and lookup.weights_precision in (SparseType.FP32, SparseType.FP16)
        and lookup.output_dtype == SparseType.FP32.as_int()
        and lookup.pooling_mode in POOLINGS
        and lookup.weights_host.numel()
    )


class Bags(NamedTuple):
    """Hold the bags of a lookup: indices [L], offsets [F * B + 1], and weights [L] if ids have weights."""

    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None = None

    def arrays(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the arrays that the kernels take. The array of weights is empty if ids have no weights."""
        weights = np.empty(0, np.float32) if self.weights is None else self.weights.detach().float().numpy()
        return self.indices.numpy(), self.offsets.numpy(), weights


class FastLookup:
    """Replace forward(indices [L], offsets [F * B + 1], weights [L]) -> [B, all features' D]."""

    def __init__(
        self,
        lookup: SplitTableBatchedEmbeddingBagsCodegen,
        pool: Callable[..., bool],
        update: Callable[..., None],
        rules: Mapping[str, UpdateRule],
    ) -> None:
        self._fbgemm_forward, self._lookup = lookup.forward, lookup
        self._is_frozen = getattr(lookup, "is_frozen", False)  # set by fbgemm_lookups.freeze
        self._pool, self._update = pool, update
        tiers = getattr(lookup, "tiers", None)
        self.tiered: StorageLookup | None = tiers.lookup if tiers is not None else None
        shard_rows = [spec[0] for spec in lookup.embedding_specs]
        own = [rules[name] for name in lookup.table_names or [] if name in rules]
        own = own or [_rule_of(lookup)] * len(shard_rows)
        self._rule = own[0]  # rules of one optimizer, so they differ only in l2 and all_rows
        self._l2s = np.array([rule.l2 for rule in own], dtype=np.float32)
        self._every = np.array(
            [rows if rule.all_rows else 0 for rows, rule in zip(shard_rows, own, strict=True)], np.int64
        )
        # Bitmaps of updated rows, table by table. Empty until track_rows() is called.
        self._marks, self._mark_begins = np.empty(0, np.uint8), np.zeros(len(shard_rows) + 1, np.int64)
        self.step = 0  # micro-batches of the run; seeds the rounding of fp16 rows
        self.num_steps = 0  # updates that the optimizer has made
        # Set if the model uses it (pipeline.models.layers.dlrm): the columns to reserve before the
        # features' columns, which the model writes. Pooled rows then have autocast's type if
        # autocast is on.
        self.reserved_columns = 0
        self.follows_autocast = False
        self._feature_begins = feature_begins(lookup)
        self._columns = lookup.D_offsets.numpy().astype(np.int64)
        self._num_rows = lookup.rows_per_table.numpy().astype(np.int64)  # of each feature's table

    @property
    def weights(self) -> torch.Tensor:
        """Return the weights of all tables as one flat tensor."""
        return self._lookup.weights_host

    @property
    def dims(self) -> list[int]:
        """Return the dim of each feature."""
        return [int(dim) for dim in np.diff(self._columns)]

    def track_rows(self) -> list[np.ndarray[Any, Any]]:
        """Keep a bitmap of updated rows for each table (numpy.packbits, bitorder="little").

        The reader of a bitmap must clear it.
        """
        if not len(self._marks):
            sizes = [-(-spec[0] // 8) for spec in self._lookup.embedding_specs]
            self._mark_begins = np.array([0, *accumulate(sizes)], dtype=np.int64)
            self._marks = np.zeros(sum(sizes), np.uint8)
        return [self._marks[begin:end] for begin, end in pairwise(self._mark_begins)]

    def _mark_ids(self, indices: torch.Tensor, offsets: torch.Tensor) -> None:
        from pipeline.devices.cpu.kernels.update import mark_ids

        indices, offsets, _, _ = self._lookup.prepare_inputs(indices, offsets, force_cast_input_types=True)
        num_samples = (len(offsets) - 1) // len(self._num_rows)
        mark_ids(
            self._marks, self._mark_begins, self._feature_begins, indices.numpy(), offsets.numpy(), np.uint64(num_samples)
        )  # fmt: skip

    def __call__(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        *arguments: Any,
        **keywords: Any,
    ) -> torch.Tensor:
        special = any(argument is not None for argument in (*arguments, *keywords.values()))
        trains_weights = per_sample_weights is not None and per_sample_weights.requires_grad
        by_fbgemm = special or trains_weights
        bags = Bags(indices, offsets.to(indices.dtype), per_sample_weights)
        if self.tiered is not None:
            return self._in_tiers(self.tiered, bags, special or (trains_weights and torch.is_grad_enabled()))
        # FBGEMM's backward will update them
        if by_fbgemm and len(self._marks) and torch.is_grad_enabled():
            self._mark_ids(indices, offsets)
        if by_fbgemm or not torch.is_grad_enabled():
            return self._fbgemm_forward(indices, offsets, per_sample_weights, *arguments, **keywords)
        return self._trained(bags, None)

    def _trained(self, bags: Bags, pins: PinnedSlots | None) -> torch.Tensor:
        self.count_step()
        return _Pooled.apply(self.weights, *bags, self.row_dtype(), self, pins)

    def count_step(self) -> None:
        """Count a trained forward in FBGEMM's counter."""
        self._lookup.step += 1

    def row_dtype(self) -> torch.dtype:
        """Return the dtype of the pooled rows."""
        bf16 = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        return torch.bfloat16 if bf16 and self.follows_autocast else torch.float32

    def _in_tiers(self, tiered: StorageLookup, bags: Bags, by_fbgemm: bool) -> torch.Tensor:
        """Look up slots of tables with tiers. Slots keep their rows until the batch's backward has finished."""
        if by_fbgemm:
            raise ShardingError("tables with tiers do not train the weights of ids; remove tables.*.tiers")
        training = torch.is_grad_enabled()
        slots, pins = tiered.to_slots(bags.indices.numpy(), bags.offsets.numpy(), training)
        bags = bags._replace(indices=torch.from_numpy(slots))
        if training:
            return self._trained(bags, pins)
        try:
            return self._fbgemm_forward(*bags)
        finally:
            pins.release()

    def look_up(self, bags: Bags, dtype: torch.dtype) -> tuple[torch.Tensor, Bags]:
        """Return the pooled rows, and the bags with FBGEMM's corrections.

        Raises RuntimeError if ids are out of range and FBGEMM's bounds check is set to raise.
        """
        num_samples = (len(bags.offsets) - 1) // len(self._num_rows)
        out = torch.empty(num_samples, self.reserved_columns + int(self._columns[-1]), dtype=dtype)
        if not self.fill(out, self.reserved_columns, bags):
            bags = self.fill_fixed(out, self.reserved_columns, bags)
        return out[:, self.reserved_columns :], bags

    def fill_fixed(self, out: torch.Tensor, begin: int, bags: Bags) -> Bags:
        """Fill as fill() does, after FBGEMM has corrected the bags. Raises RuntimeError as look_up does."""
        bags = Bags(*self._lookup.prepare_inputs(*bags, force_cast_input_types=True)[:3])
        if not self.fill(out, begin, bags):
            raise RuntimeError("FBGEMM accepted ids or offsets that are out of range")
        return bags

    def fill(self, out: torch.Tensor, begin: int, bags: Bags) -> bool:
        """Fill the columns of `out` [B, width] from `begin` on. Return False if an id is out of
        range.

        The samples are divided among torch's threads. The offsets need not begin at 0.
        """
        fbgemm, num_samples, width = self._lookup, len(out), out.shape[1]
        if not num_samples:
            return True
        arguments = (
            *bags.arrays(), np.uint64(num_samples), self._columns + begin, _flat(fbgemm.weights_host), fbgemm.weights_offsets.numpy(), self._num_rows, fbgemm.pooling_mode == PoolingMode.MEAN, _flat(out), np.uint64(width),
        )  # fmt: skip
        # The minimum for a thread is counted in ids.
        least_share = MIN_SHARE * min(len(self._num_rows) * num_samples, len(bags.indices)) // max(len(bags.indices), 1)
        return on_all_threads(self._pool, arguments, num_samples, max(least_share, MIN_SAMPLES))

    def update(self, gradients: torch.Tensor, bags: Bags) -> None:
        """Update the tables on torch's threads. Only one thread updates a row, so bits do not depend on threads."""
        if self._is_frozen:
            return
        fbgemm, rule = self._lookup, self._rule
        is_half = fbgemm.weights_precision == SparseType.FP16
        stored = _flat(fbgemm.weights_host)
        weights = np.empty(0, np.float32) if is_half else stored
        halves = stored if is_half else np.empty(0, np.uint16)
        states = _state(fbgemm, fbgemm.momentum1_host, fbgemm.momentum1_offsets)
        squares = _state(fbgemm, fbgemm.momentum2_host, fbgemm.momentum2_offsets)
        num_samples, bounds = len(gradients), bags.offsets.numpy()
        rows, width = _rows(gradients)
        arguments = (
            self._feature_begins, *bags.arrays(), np.uint64(num_samples), rows, np.uint64(width),
            self._columns, weights, halves, is_half, fbgemm.weights_offsets.numpy(), *states, *squares, rule.kind,
            fbgemm.pooling_mode == PoolingMode.MEAN, rule.numbers(fbgemm.get_learning_rate(), self.num_steps + 1), self._l2s,
            self._every, np.uint64(self.step), self._marks, self._mark_begins,
        )  # fmt: skip
        first_ids = bounds[self._feature_begins * num_samples]
        dims = self._columns[self._feature_begins[:-1] + 1] - self._columns[self._feature_begins[:-1]]
        units = partition_tables(first_ids, dims, self._every, can_split=not len(self._marks))
        on_all_threads(self._update, (units, *arguments), len(units), 1, len(units))


def _rule_of(lookup: SplitTableBatchedEmbeddingBagsCodegen) -> UpdateRule:
    settings = lookup.optimizer_args
    return UpdateRule(KINDS[lookup.optimizer], settings.eps, settings.beta1, settings.beta2)


def _state(
    lookup: SplitTableBatchedEmbeddingBagsCodegen, values: torch.Tensor, offsets: torch.Tensor
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return a state's numbers and the positions where the features' tables begin; empty without such a state."""
    if values.dtype != torch.float32:  # FBGEMM's placeholder
        return np.empty(0, np.float32), lookup.weights_offsets.numpy()
    return values.detach().numpy(), offsets.detach().numpy()


def _flat(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the numbers of a contiguous tensor as a 1-D array; bf16 and fp16 as uint16."""
    values = values.detach()
    bits = values if values.dtype == torch.float32 else values.view(torch.uint16)
    return bits.numpy().reshape(-1)


def _rows(gradients: torch.Tensor) -> tuple[np.ndarray[Any, Any], int]:
    """Return the memory of fp32 or bf16 [B, D] as a 1-D array, and the distance of rows in numbers."""
    if gradients.dtype not in (torch.float32, torch.bfloat16):
        gradients = gradients.float()
    if gradients.stride(1) != 1 or gradients.stride(0) < gradients.shape[1]:
        gradients = gradients.contiguous()
    width = gradients.stride(0)
    count = (len(gradients) - 1) * width + gradients.shape[1] if len(gradients) else 0
    return _flat(torch.as_strided(gradients.detach(), (count,), (1,))), width


def partition_tables(
    first_ids: np.ndarray[Any, Any],
    dims: np.ndarray[Any, Any],
    every: np.ndarray[Any, Any] | int = 0,
    can_split: bool = True,
) -> np.ndarray[Any, Any]:
    """Return units of work [n, 3], the largest first. A unit is (table, part of its rows, number of
    parts).

    first_ids [T + 1]: where the tables' ids begin. every [T]: the table's rows if rows without an
    id are updated too; such a table is not split. Parts have separate rows, so the split changes no
    result.
    """
    # Reading a row costs about as much as 16 of its numbers.
    work = np.diff(first_ids) * (dims + 16) + every * dims + 256
    parts = np.ones(len(work), np.int64)
    if can_split and (threads := torch.get_num_threads()) > 1:
        most = max(int(work.sum()) // (SHARES * threads), MIN_UNIT)
        wanted = np.ceil(np.log2(np.maximum(work / most, 1.0))).astype(np.int64)
        parts = np.where(np.broadcast_to(every, work.shape) > 0, 1, 1 << np.minimum(wanted, MAX_SPLITS))
    units = [
        (table, part, parts[table])
        for table in np.argsort(-work / parts, kind="stable")
        for part in range(parts[table])
    ]
    return np.array(units, dtype=np.int64).reshape(-1, 3)


class FusedLookup:
    """Look up all tables of one CPU rank at once: map a batch with the keys `feature_names` to [B,
    all D].

    TorchRec uses a separate lookup for each pooling and data type, and must split the batch and
    join the rows. For a small model this takes longer than the lookups.
    """

    def __init__(self, lookups: Sequence[FastLookup], feature_names: list[str]) -> None:
        """The features are those of the first lookup, then of the second, and so on."""
        self.lookups, self.feature_names = list(lookups), feature_names
        self.reserved_columns = 0
        self.dims = [dim for lookup in lookups for dim in lookup.dims]
        counts = [len(lookup.dims) for lookup in lookups]
        self._features = list(pairwise(accumulate(counts, initial=0)))
        self._columns = list(pairwise(accumulate((sum(lookup.dims) for lookup in lookups), initial=0)))
        self._orders: dict[tuple[str, ...], torch.Tensor | None] = {}

    def reserve_columns(self, columns: int) -> None:
        """Leave `columns` columns free before the rows of the features. The model fills them with its
        dense vector. Rows then have the dtype of autocast."""
        self.reserved_columns = columns
        for lookup in self.lookups:
            lookup.reserved_columns, lookup.follows_autocast = columns, True

    def __call__(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Look up a batch. Raises RuntimeError as FastLookup.look_up does."""
        values, offsets, weights = features.values(), features.offsets(), features.weights_or_none()
        if len(self.lookups) == 1:
            return self.lookups[0](values, offsets, weights)
        bags = Bags(values, offsets.to(values.dtype), weights)
        if not torch.is_grad_enabled() or (weights is not None and weights.requires_grad):
            pairs = zip(self.lookups, self._parts(bags), strict=True)
            return torch.cat([lookup(*part) for lookup, part in pairs], dim=1)
        for lookup in self.lookups:
            lookup.count_step()
        dtype = self.lookups[0].row_dtype()
        return _Pooled.apply(self.lookups[0].weights, *bags, dtype, self, None)

    def in_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor | None:
        """Return the batch with the keys feature_names, or None if a key is missing."""
        keys = features.keys()
        if keys == self.feature_names:
            return features
        known = tuple(keys)
        if known not in self._orders:
            has_all = set(self.feature_names) <= set(keys)
            order = [keys.index(name) for name in self.feature_names] if has_all else []
            self._orders[known] = torch.tensor(order, dtype=torch.int32) if has_all else None
        permutation = self._orders[known]
        return None if permutation is None else features.permute(permutation.tolist(), permutation)

    def _parts(self, bags: Bags) -> list[Bags]:
        """Return the bags of each lookup, with offsets that begin at 0."""
        stride = (len(bags.offsets) - 1) // len(self.dims)
        parts = []
        for first, last in self._features:
            offsets = bags.offsets[first * stride : last * stride + 1]
            begin, end = int(offsets[0]), int(offsets[-1])
            weights = None if bags.weights is None else bags.weights[begin:end]
            parts.append(Bags(bags.indices[begin:end], offsets - begin, weights))
        return parts

    def look_up(self, bags: Bags, dtype: torch.dtype) -> tuple[torch.Tensor, list[Bags]]:
        """Return the pooled rows, and each lookup's bags with FBGEMM's corrections."""
        num_samples = (len(bags.offsets) - 1) // len(self.dims)
        out = torch.empty(num_samples, self.reserved_columns + sum(self.dims), dtype=dtype)
        parts = []
        for number, (lookup, (first, last)) in enumerate(zip(self.lookups, self._features, strict=True)):
            # Offsets of the complete batch. The kernels accept offsets that do not begin at 0.
            part = bags._replace(offsets=bags.offsets[first * num_samples : last * num_samples + 1])
            position = self.reserved_columns + self._columns[number][0]
            is_whole = lookup.fill(out, position, part)
            parts.append(part if is_whole else lookup.fill_fixed(out, position, self._parts(bags)[number]))
        return out[:, self.reserved_columns :], parts

    def update(self, gradients: torch.Tensor, parts: list[Bags]) -> None:
        for lookup, (begin, end), part in zip(self.lookups, self._columns, parts, strict=True):
            lookup.update(gradients[:, begin:end], part)


class _Pooled(torch.autograd.Function):
    """Return the pooled rows of a FastLookup or FusedLookup. The backward updates the tables.

    Autograd calls the backward because `weights` is an input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weights: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        factors: torch.Tensor | None,
        dtype: torch.dtype,
        lookup: FastLookup | FusedLookup,
        pins: PinnedSlots | None,
    ) -> torch.Tensor:
        pooled, ctx.bags = lookup.look_up(Bags(indices, offsets, factors), dtype)
        ctx.lookup, ctx.pins = lookup, pins
        return pooled

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[None, ...]:
        ctx.lookup.update(gradients, ctx.bags)
        if ctx.pins is not None:
            ctx.pins.release()
        return None, None, None, None, None, None, None
