"""Estimate the milliseconds of each phase for each shard by TorchRec's formulas with corrections.

The formulas (planner/estimator/estimator.py of 1.8) run on arrays, for all shards of an option at
once. With `corrected=False` they give TorchRec's numbers to the last digit. docs/adr/0007 lists the
corrections and reasons.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.planner.constants import (
    BATCHED_COPY_PERF_FACTOR,
    BWD_COMPUTE_MULTIPLIER,
    DP_ELEMENTWISE_KERNELS_PERF_FACTOR,
    FULL_BLOCK_EMB_DIM,
    HALF_BLOCK_PENALTY,
    QUARTER_BLOCK_PENALTY,
    UVM_CACHING_RATIO,
    WEIGHTED_KERNEL_MULTIPLIER,
    kernel_bw_lookup,
)
from torchrec.distributed.planner.types import Perf, ShardingOption
from torchrec.distributed.types import CommOp, ModuleSharder, QuantizedCommCodecs

from pipeline.config.registry import from_extra
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.planner.hardware import BYTES_PER_MS, Hardware, links_of
from pipeline.planner.plan_record import TierForecast
from pipeline.planner.search.problem import Floats

ID_BYTES, LENGTH_BYTES, WEIGHT_BYTES = 8, 4, 4  # int64 ids, int32 lengths (data/batch.py), fp32 weights
MIN_LOOKUP_WIDTH = 32  # columns that a lookup of an unsplit table reads at least; TorchRec's
# fbgemm's int8 codec adds a scale and a bias of 4 bytes each to every 32 numbers
INT8_WIRE_BYTES = 1 + 8 / 32
UVM_SLOWDOWN = 10  # TorchRec's factor for rows that cross PCIe one by one
SSD_READ_BYTES = 4096  # a block device reads at least this
BY_TABLE = ("table_wise", "column_wise", "table_column_wise")
BY_HOST = ("table_row_wise", "grid_shard")
KEY_VALUE = "key_value"
UVM_KERNELS = ("fused_uvm", "fused_uvm_caching")
CACHED_KERNELS = ("fused_uvm_caching", KEY_VALUE)

Rows = NDArray[np.int64]


class StepPerf(Perf):
    """Add the time that a step waits for its input to the total. TorchRec's total omits this time."""

    @property
    def total(self) -> float:
        return super().total + self.input_dist_comms

    def __add__(self, other: Perf) -> StepPerf:
        plain = Perf.__add__(self, other)
        return StepPerf(**vars(plain))

    __radd__ = __add__  # TorchRec starts its sums from a Perf


@dataclass(frozen=True)
class Wire:
    """Hold the bytes of a number on the wire; None: as in the table. summed_*: for reduce-scatter and all-gather."""

    forward: float | None = None
    backward: float | None = None
    summed_forward: float | None = None
    summed_backward: float | None = None


COLLECTIVES = {
    "all_to_all": CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
    "reduce_scatter": CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
}
UNQUANTIZED = "as pooled"


def wire_precisions(sharders: Iterable[ModuleSharder[nn.Module]]) -> dict[str, dict[str, str]]:
    """Return collective -> direction -> the precision of the sharders' codecs."""
    registries = (sharder.qcomm_codecs_registry for sharder in sharders)
    registry: dict[str, QuantizedCommCodecs] = next((found for found in registries if found), {})

    def precision(operation: CommOp, way: str) -> str:
        codecs = registry.get(operation.name)
        return UNQUANTIZED if codecs is None else str(getattr(codecs, way).quantized_dtype).removeprefix("torch.")

    return {
        name: {way: precision(operation, way) for way in ("forward", "backward")}
        for name, operation in COLLECTIVES.items()
    }


def wire_of(sharders: Iterable[ModuleSharder[nn.Module]]) -> Wire:
    """Return the precisions of the sharders' codecs in bytes per number."""

    def size(precision: str) -> float | None:
        if precision == UNQUANTIZED:
            return None
        num_bytes = float(getattr(torch, precision).itemsize)
        return INT8_WIRE_BYTES if num_bytes == 1 else num_bytes

    return Wire(*(size(precision) for ways in wire_precisions(sharders).values() for precision in ways.values()))


@dataclass(frozen=True)
class _Work:
    """Describe the work of one option. Arrays are [S] by shard. `lookups`, `outputs`: for the samples of all ranks."""

    option: ShardingOption
    element_bytes: int
    num_rows: Floats
    num_columns: Floats
    lookups: Floats  # ids that a shard looks up
    outputs: float  # pooled rows that it returns
    num_lengths: float
    hits: Floats  # share of the lookups that hit the cache in HBM
    weighted: bool

    @property
    def kind(self) -> str:
        return self.option.sharding_type


class CostModel:
    """Replace TorchRec's estimator of time (a ShardEstimator): set the `perf` of every shard."""

    def __init__(self, hardware: Hardware, tables: Iterable[Table], wire: Wire, corrected: bool = True) -> None:
        self._hardware, self._wire, self._corrected = hardware, wire, corrected
        tables = list(tables)
        self._frequencies = {table.name: table.frequencies for table in tables}
        self._padding = {table.name: table.padding for table in tables}
        self.in_tiers = {table.name: table for table in tables if table.tiers is not None}
        self.frozen = {table.name for table in tables if table.updates.frozen}
        self.links = links_of(hardware)

    def estimate(self, sharding_options: list[ShardingOption], *_: Any, **__: Any) -> None:
        """Set the estimates. TorchRec's versions give the other arguments different names."""
        for option in sharding_options:
            cost = self.phases_ms(option)
            made: dict[tuple[float, ...], StepPerf] = {}
            for shard, phases in zip(option.shards, map(tuple, cost.tolist()), strict=True):
                if phases not in made:
                    ids, forward, forward_comms, backward, backward_comms = phases
                    made[phases] = StepPerf(forward, forward_comms, backward, backward_comms, ids)
                shard.perf = made[phases]

    def phases_ms(self, option: ShardingOption) -> Floats:
        """Return [S, P]: the milliseconds of each shard in each phase of plan_record.PHASES."""
        work = self._work(option)
        forward, backward = self._compute(work)
        columns = [self._input_dist(work), forward, self._forward_comms(work), backward, self._backward_comms(work)]
        return np.stack([np.broadcast_to(column, len(option.shards)) for column in columns], axis=1)

    def hit_rate(self, option: ShardingOption) -> float:
        """Return the share of lookups that hit the caches, over all shards of the table."""
        work = self._work(option)
        return float((work.hits * work.lookups).sum() / max(work.lookups.sum(), 1e-30))

    def tier_forecast(self, option: ShardingOption) -> TierForecast | None:
        """Return the forecast of a table with tiers, or None if the whole table is in memory."""
        table = self.in_tiers.get(option.name)
        if table is None:
            return None
        forecast = from_extra("tier_forecast", f"tables.{table.config_name}.tiers")
        found: TierForecast = forecast(table, option.batch_size * self._hardware.world_size * sum(option.input_lengths))
        return found

    def weights_bytes(self, option: ShardingOption) -> Floats:
        """Return [S]: the bytes of the weights of the ids that each shard looks up in a step."""
        work = self._work(option)
        return work.lookups * (WEIGHT_BYTES if work.weighted else 0)

    def knows_frequencies(self, table: str) -> bool:
        return self._frequencies[table] is not None

    def _work(self, option: ShardingOption) -> _Work:
        hardware = self._hardware
        world, local = hardware.world_size, hardware.local_world_size
        sizes = np.array([shard.size for shard in option.shards], dtype=np.int64)
        first_rows = np.array([shard.offset[0] for shard in option.shards], dtype=np.int64)
        replicated = option.sharding_type == "data_parallel"
        samples = option.batch_size * (1 if replicated else world)
        split_by = {"row_wise": world, **dict.fromkeys(BY_HOST, local)}.get(option.sharding_type, 1)
        frequencies = self._frequencies[option.name]
        shares: Any = 1 / split_by
        if self._corrected and split_by > 1:
            shares = shard_shares(frequencies, first_rows, sizes[:, 0], option.tensor.shape[0])
        hits = np.zeros(len(sizes))
        if option.compute_kernel in CACHED_KERNELS:
            hits = hit_rates(frequencies, first_rows, sizes[:, 0], cache_load_factor(option))
        factors = option.input_lengths
        return _Work(
            option=option,
            element_bytes=option.tensor.element_size(),
            num_rows=sizes[:, 0].astype(float),
            num_columns=sizes[:, 1].astype(float),
            lookups=np.broadcast_to(samples * sum(factors) * shares, len(sizes)),
            outputs=samples * (sum(min(1.0, factor) for factor in factors) + self._padding[option.name]),
            num_lengths=samples * len(factors),
            hits=hits,
            weighted=bool(option.is_weighted),
        )

    def _fast_memory(self) -> float:
        """Return the bandwidth of a rank's fastest memory in bytes/ms."""
        return self._hardware.memory_gb_per_s * BYTES_PER_MS

    def _kernel_speed(self, option: ShardingOption) -> float:
        """Return bytes/ms from TorchRec's table. If a cache serves a part of the lookups, return the average."""
        hardware = self._hardware
        ddr, uvm = hardware.ddr_gb_per_s * BYTES_PER_MS, hardware.hbm_to_ddr_gb_per_s * BYTES_PER_MS
        device, kernel = hardware.compute_device, option.compute_kernel
        if kernel == KEY_VALUE:
            return hardware.ssd_gb_per_s * BYTES_PER_MS
        speed = kernel_bw_lookup(device, kernel, self._fast_memory(), ddr, uvm, option.cache_load_factor)
        assert speed, f"TorchRec knows no bandwidth of {kernel} on {device}"
        return float(speed)

    def _compute(self, work: _Work) -> tuple[Floats, Floats]:
        option, by_table = work.option, work.kind in BY_TABLE
        inputs = np.ceil(work.lookups * ID_BYTES) * (2 if work.weighted else 1)
        width = np.maximum(work.num_columns, MIN_LOOKUP_WIDTH) if by_table else work.num_columns
        rows = work.lookups * width * work.element_bytes
        number = work.element_bytes if work.kind == "data_parallel" else self._wire_bytes(work, forward=True)
        moved = inputs + rows + work.outputs * work.num_columns * number
        if by_table:
            moved = moved * _narrowness(work.num_columns)
        in_place = option.compute_kernel in ("dense", "fused") or not self._corrected
        forward = moved / (self._kernel_speed(option) if in_place else self._fast_memory())
        backward = forward * (BWD_COMPUTE_MULTIPLIER + (WEIGHTED_KERNEL_MULTIPLIER if work.weighted else 0.0))
        if in_place:
            return forward, backward
        # Ids, outputs and cached rows lie in HBM. Only rows that the cache misses cross the slow link; in backward a
        # row in the cache is written back once, one that is not there is read and written.
        missed = self._missed_ms(work)
        return forward + missed, backward + missed * (2 if option.compute_kernel == "fused_uvm" else 1)

    def _missed_ms(self, work: _Work) -> Floats:
        row = work.num_columns * work.element_bytes
        if work.option.compute_kernel == KEY_VALUE:
            speed, row = self._hardware.ssd_gb_per_s * BYTES_PER_MS, np.maximum(row, SSD_READ_BYTES)
        else:
            speed = self._hardware.hbm_to_ddr_gb_per_s * BYTES_PER_MS / UVM_SLOWDOWN
        return work.lookups * (1 - work.hits) * row / speed

    def _wire_bytes(self, work: _Work, forward: bool, summed: bool | None = None) -> float:
        wire = self._wire
        by_rows = work.kind == "row_wise" or work.kind in BY_HOST if summed is None else summed
        number_bytes = (
            (wire.summed_forward if by_rows else wire.forward)
            if forward
            else (wire.summed_backward if by_rows else wire.backward)
        )
        if number_bytes == INT8_WIRE_BYTES and not self._corrected:
            return 1.0
        return work.element_bytes if number_bytes is None else number_bytes

    def _input_dist(self, work: _Work) -> Floats:
        """Return the time to send a shard's ids, lengths and weights from other ranks to the shard."""
        if work.kind == "data_parallel":
            return np.zeros(1)
        if not self._corrected:  # TorchRec sends all ids to every shard of rows
            samples = work.option.batch_size * self._hardware.world_size
            return self._exchange(np.ceil([samples * sum(work.option.input_lengths) * ID_BYTES]))
        of_an_id = ID_BYTES + (WEIGHT_BYTES if work.weighted else 0)
        return self._exchange(work.lookups * of_an_id + work.num_lengths * LENGTH_BYTES)

    def _exchange(self, num_bytes: Floats) -> Floats:
        if self._corrected:
            return self.links.all_to_all_ms(num_bytes)
        return num_bytes / (self.links.inter if self.links.num_hosts > 1 else self.links.intra)

    def _forward_comms(self, work: _Work) -> Floats:
        if work.kind == "data_parallel":
            return np.zeros(1)
        return self._output_ms(work, forward=True)

    def _backward_comms(self, work: _Work) -> Floats:
        if work.kind == "data_parallel":
            return self._replicas_ms(work)
        moved = self._output_ms(work, forward=False)
        if work.kind in BY_TABLE:
            return moved
        speed = self._fast_memory() if self._corrected else self._kernel_speed(work.option)
        copied = work.outputs * work.num_columns * self._wire_bytes(work, forward=False) * BATCHED_COPY_PERF_FACTOR
        return moved + copied / speed

    def _output_ms(self, work: _Work, forward: bool) -> Floats:
        """Return the time to send pooled rows to the samples' ranks, or the gradients of pooled rows back."""
        links, whole = self.links, work.outputs * work.num_columns * self._wire_bytes(work, forward)
        if work.kind in BY_TABLE:
            return self._exchange(whole)
        if work.kind == "row_wise":
            return links.ring_ms(whole) if self._corrected else self._exchange(whole)
        # Summed within the host, then sent to the ranks of equal position on the other hosts: one step after the other.
        number = self._wire_bytes(work, forward, summed=False)
        apart = work.outputs / links.local_world_size * work.num_columns * number
        if self._corrected:
            return links.host_ring_ms(whole) + links.across_hosts_ms(apart)
        return whole / links.intra + (apart / links.inter if links.num_hosts > 1 else 0.0)

    def _replicas_ms(self, work: _Work) -> Floats:
        links, table = self.links, work.num_rows * work.num_columns * work.element_bytes
        if self._corrected:  # TorchRec sums over the network even within a host
            summed = 2 * links.ring_ms(table)
        else:
            hosts = min(links.num_hosts, 2)
            summed = table * (2 * hosts - 1) / hosts / (links.inter * links.local_world_size)
            summed = summed * (2 if links.num_hosts > 2 else 1)
        return summed + table * DP_ELEMENTWISE_KERNELS_PERF_FACTOR / self._kernel_speed(work.option)


def cache_load_factor(option: ShardingOption) -> float:
    """Return the share of a shard's rows that its cache in HBM can hold."""
    return UVM_CACHING_RATIO if option.cache_load_factor is None else option.cache_load_factor


def _narrowness(num_columns: Floats) -> Floats:
    """Return the slowdown of rows narrower than 128 columns, FBGEMM's block width, as TorchRec measured it."""
    narrow = np.where(num_columns >= FULL_BLOCK_EMB_DIM // 2, HALF_BLOCK_PENALTY, QUARTER_BLOCK_PENALTY)
    return np.where(num_columns >= FULL_BLOCK_EMB_DIM, 1.0, narrow)


def shard_shares(frequencies: RowFrequencies | None, first_rows: Rows, num_rows: Rows, table_rows: int) -> Floats:
    """Return [S]: for each shard the share of the table's lookups that are for rows first_rows ..
    first_rows + num_rows.

    Lookups count as uniform if frequencies are unknown or ids are hashed.
    """
    if frequencies is None or not frequencies.by_row:
        return num_rows / table_rows
    return _upto(frequencies, first_rows + num_rows) - _upto(frequencies, first_rows)


def hit_rates(frequencies: RowFrequencies | None, first_rows: Rows, num_rows: Rows, load_factor: float) -> Floats:
    """Return [S]: the share of each shard's lookups that are for its load_factor x num_rows hottest
    rows.

    FBGEMM's LFU cache reaches nearly this hit rate; so does LRU if hot rows are in every batch. If
    frequencies are unknown, lookups count as uniform.
    """
    cached = np.minimum(num_rows, load_factor * num_rows)
    if frequencies is None:
        return np.full(len(num_rows), min(1.0, load_factor))
    if not frequencies.by_row:  # each shard has its share of the hot rows
        whole = frequencies.rows[-1]
        return np.full(len(num_rows), float(_upto(frequencies, np.array([load_factor * whole]))[0]))
    before = _upto(frequencies, first_rows)
    lookups = _upto(frequencies, first_rows + num_rows) - before
    hits = _upto(frequencies, first_rows + cached) - before
    return np.divide(hits, lookups, out=np.ones_like(hits), where=lookups > 0)


def _upto(frequencies: RowFrequencies, rows: Rows | Floats) -> Floats:
    """Return the share of lookups that are for the first `rows` rows. Rows after the curve's end have no lookups."""
    return np.interp(rows, frequencies.rows, frequencies.shares)
