"""Define what a plan is made for, and build the problem that a searcher solves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder

from pipeline.config.planner import PlannerConfig
from pipeline.config.registry import from_extra
from pipeline.embeddings.table import Table
from pipeline.planner.constraints import PlacedTable, TableOptimizer, build_constraints, place_tables
from pipeline.planner.cost_model import CostModel, wire_of, wire_precisions
from pipeline.planner.estimator import KeepFree, dense_part_bytes, usable_bytes
from pipeline.planner.fingerprint import take_fingerprint
from pipeline.planner.hardware import Hardware
from pipeline.planner.plan_record import Fingerprint, PlanRecord, RankLoad
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.runtime.byte_counts import show_bytes
from pipeline.runtime.errors import PlanError


@dataclass(frozen=True)
class Placement:
    """The sharding type of a table, and for each of its shards (rank, first row, rows, columns)."""

    table: str
    kind: str
    shards: tuple[tuple[int, int, int, int], ...]


class StepCost(Protocol):
    """Predicts a step. `needs_loads`: ms() needs the loads of the ranks too."""

    needs_loads: bool

    def ms(self, placements: Sequence[Placement], loads: Sequence[RankLoad] = ()) -> float:
        """Milliseconds of a step whose tables are placed so."""


@dataclass(frozen=True)
class PlanRequest:
    """The model, hardware and batch that a plan is made for.

    `batch_size` is per rank; tables must be on meta.

    suggests: if nothing fits, try other settings to make a suggestion, which takes seconds.
    step_cost: makes what planner.objective=step_time minimizes. calibration: the file of
    measurements that it uses.
    """

    tables: list[Table]
    model: nn.Module
    sharders: list[ModuleSharder[nn.Module]]
    hardware: Hardware
    optimizer: TableOptimizer
    batch_size: int
    suggests: bool = True
    step_cost: Callable[[PlanRequest], StepCost] | None = None
    calibration: str | None = None


@dataclass(frozen=True)
class Problem:
    """A request in a searcher's form. `usable`: HBM and host memory per rank for tables."""

    request: PlanRequest
    placed: list[PlacedTable]
    constraints: dict[str, ParameterConstraints]
    usable: tuple[int, int]
    reservation: KeepFree
    costs: CostModel
    dense_bytes: int


@dataclass(frozen=True)
class PlannedJob:
    """A job with its tables, the request that a plan was made for, and the plan."""

    resolved: ResolvedJob
    request: PlanRequest
    record: PlanRecord


def fingerprint_of(problem: Problem) -> Fingerprint:
    request = problem.request
    comms = wire_precisions(request.sharders)
    return take_fingerprint(problem.placed, request.hardware, request.optimizer, request.batch_size, comms)


def build_problem(config: PlannerConfig, request: PlanRequest) -> Problem:
    """Build the problem. Raises PlanError if the dense part leaves no memory for tables."""
    hardware, fraction = request.hardware, config.reserved_memory_fraction
    placed = place_tables(request.tables, request.model, request.sharders)
    constraints = build_constraints(placed, hardware, request.optimizer)
    dense_bytes = dense_part_bytes(request.model, [entry.parameter for entry in placed])
    usable = usable_bytes(
        hardware.compute_device, hardware.hbm_cap_bytes, hardware.ddr_cap_bytes, fraction, dense_bytes
    )
    if hardware.fastest_bytes(*usable) <= 0:
        raise PlanError(
            f"the dense part needs {show_bytes(dense_bytes)} in training, and of a rank of "
            f"{hardware.name} "
            f"({show_bytes(hardware.hbm_cap_bytes or hardware.ddr_cap_bytes)}) {100 * fraction:g} % are kept free: nothing "
            "is left for tables; use smaller layers, other hardware=, or a lower planner.reserved_memory_fraction"
        )
    costs = CostModel(hardware, request.tables, wire_of(request.sharders))
    return Problem(request, placed, constraints, usable, KeepFree(fraction, dense_bytes), costs, dense_bytes)


def cost_of_steps(resolved: ResolvedJob, request: PlanRequest, threads: int | None = None) -> StepCost:
    """Ask the extra `step_time` what planner.objective=step_time minimizes. Raises UserError if it cannot tell."""
    cost: StepCost = from_extra("step_cost_of", "planner.objective=step_time")(resolved, request, threads)
    return cost
