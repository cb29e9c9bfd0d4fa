"""Describe a plan: choices, loads, cost, and what it was made for, in addition to the ShardingPlan.

This module does not import torch, so that showing and comparing plan files is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan

Fingerprint = dict[str, Any]  # JSON values, see fingerprint.py
# In the order of a step.
PHASES = ("input_dist_ms", "forward_compute_ms", "forward_comms_ms", "backward_compute_ms", "backward_comms_ms")


SECTOR_BYTES = 512


@dataclass(frozen=True)
class TierForecast:
    """A table with tiers in a steady state: lookups served from slots, and distinct rows that a step reads."""

    slots: int
    hit_rate: float
    rows_a_step: float

    @property
    def read_bytes(self) -> float:
        """Bytes read in a step: at least a sector for each row."""
        return SECTOR_BYTES * self.rows_a_step


@dataclass(frozen=True)
class TableChoice:
    """A table's choice.

    Byte counts and `cost_ms` are sums over its shards; input and output buffers count as memory.

    cache_load_factor: the share of rows that a cache in HBM holds; None without a cache.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    weight_bytes: int  # one copy of the table
    state_bytes: int  # optimizer state of that copy
    hbm_bytes: int
    ddr_bytes: int
    ssd_bytes: int
    sharding_type: str
    compute_kernel: str
    ranks: list[int]
    cost_ms: float
    reason: str
    cache_load_factor: float | None = None
    tiers: TierForecast | None = None  # of a table with most rows on an SSD

    @property
    def share_in_memory(self) -> float:
        """Return the share of its rows in memory."""
        return 1.0 if self.tiers is None else self.tiers.slots / self.num_embeddings


@dataclass(frozen=True)
class RankLoad:
    """Memory and time of a rank's tables.

    Times are estimates. The latency of each collective of the plan is in its phase, on every rank.
    """

    rank: int
    hbm_bytes: int
    ddr_bytes: int
    ssd_bytes: int
    input_dist_ms: float
    forward_compute_ms: float
    forward_comms_ms: float
    backward_compute_ms: float
    backward_comms_ms: float

    @property
    def cost_ms(self) -> float:
        return float(sum(getattr(self, phase) for phase in PHASES))


@dataclass(frozen=True)
class Objective:
    """The objectives. max_rank: the slowest rank's total cost, which TorchRec minimizes.
    critical_path: the sum of each phase's slowest rank.

    `lower_bound_ms` and `gap` (of the objective named `minimised`) are None if nothing was proven.
    """

    minimised: str
    max_rank_ms: float
    critical_path_ms: float
    lower_bound_ms: float | None = None
    gap: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlanDescription:
    """A plan without its ShardingPlan.

    `usable_*_bytes`: a rank's memory for tables, without the reserve and the dense part.

    `dense_bytes`: training memory of the layers on each rank. `torchrec_objective`: what TorchRec's
    planner reached for the same request; None if it was not called.
    """

    planner: str
    hardware: str
    tables: list[TableChoice]
    ranks: list[RankLoad]
    objective: Objective
    usable_hbm_bytes: int
    usable_ddr_bytes: int
    usable_ssd_bytes: int
    dense_bytes: int
    fingerprint: Fingerprint
    torchrec_objective: Objective | None = None


@dataclass(frozen=True, kw_only=True)
class PlanRecord(PlanDescription):
    """A plan with its description: the content of a plan file."""

    plan: ShardingPlan


def critical_path_ms(ranks: list[RankLoad]) -> float:
    """Return the critical path.

    Every phase ends in a collective, in which all ranks wait for the slowest.
    """
    return sum(max(getattr(load, phase) for load in ranks) for phase in PHASES)
