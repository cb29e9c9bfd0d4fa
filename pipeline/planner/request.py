"""Define the request that a plan is made for, list the options of each table, and build a searcher's problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder

from pipeline.config.optimizers import find_optimizer
from pipeline.config.planner import PlannerConfig
from pipeline.config.registry import from_extra
from pipeline.embeddings.limits import COLUMN_SHARDING_TYPES, KERNELS_OF_MANAGED_ROWS, allowed_sharding_types
from pipeline.embeddings.table import Table
from pipeline.planner.cost_model import CostModel, wire_of, wire_precisions
from pipeline.planner.estimator import KeepFree, dense_part_bytes, shard_state_bytes, usable_bytes
from pipeline.planner.hardware import Hardware
from pipeline.planner.plan_record import Fingerprint, PlanRecord, RankLoad, library_versions
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.runtime.byte_counts import show_bytes
from pipeline.runtime.errors import PlanError


@dataclass(frozen=True)
class Placement:
    """Hold the sharding type of a table, and for each of its shards (rank, first row, rows, columns)."""

    table: str
    kind: str
    shards: tuple[tuple[int, int, int, int], ...]


class StepCost(Protocol):
    """Predict the time of a step. `needs_loads`: ms() also needs the loads of the ranks."""

    needs_loads: bool

    def ms(self, placements: Sequence[Placement], loads: Sequence[RankLoad] = ()) -> float:
        """Return the predicted milliseconds of a step with tables at these placements."""


@dataclass(frozen=True)
class PlanRequest:
    """The model (tables on meta), hardware and batch (per rank) that a plan is made for.

    suggests: if no plan fits, try other settings, which takes seconds. step_cost: creates the
    StepCost that planner.objective=step_time minimizes, from the measurements in the file
    `calibration`.
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
    """Hold a request, converted to the data that a search needs. `usable`: bytes of HBM and of host memory per rank for tables."""

    request: PlanRequest
    placed: list[PlacedTable]
    constraints: dict[str, ParameterConstraints]
    usable: tuple[int, int]
    reservation: KeepFree
    costs: CostModel
    dense_bytes: int


@dataclass(frozen=True)
class PlannedJob:
    """Hold a job with its tables, its plan, and the request that the plan was made for."""

    resolved: ResolvedJob
    request: PlanRequest
    record: PlanRecord


def fingerprint_of(problem: Problem) -> Fingerprint:
    """Return topology, tables, optimizer, wire precision, batch size per rank, and versions."""
    request, hardware = problem.request, problem.request.hardware
    topology = asdict(hardware)
    for label in ("name", "tflops_fp32", "tflops_bf16", "issue_us"):  # no plan depends on them
        del topology[label]
    if hardware.hosts_per_nvlink_domain == 1:  # plans of earlier releases lack it
        del topology["hosts_per_nvlink_domain"]
    return {
        "topology": topology,
        "tables": {entry.table.name: _describe_table(entry) for entry in problem.placed},
        "sparse_optimizer": asdict(request.optimizer),
        "comms": wire_precisions(request.sharders),
        "batch_size": request.batch_size,
        "libraries": library_versions(),
    }


def _describe_table(entry: PlacedTable) -> dict[str, Any]:
    """Describe a table without its frequencies, so that a plan stays valid when new data changes them."""
    described = asdict(entry.table)
    for left_out in (
        "name",
        "init",
        "frequencies",
        "compression",
        "max_ids",
        "part_of",
        "rows_of",
        "managed",
        "note",
        "updates",
        "positions",
        "padding",
    ):
        del described[left_out]
    for absent, is_default in (("is_weighted", not entry.table.is_weighted), ("tiers", entry.table.tiers is None)):
        if is_default:  # plans of earlier releases lack it
            del described[absent]
    frozen = {"frozen": True} if entry.table.updates.frozen else {}  # without optimizer state
    return {**described, **frozen, "module": entry.module}


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
    """Return the StepCost that planner.objective=step_time minimizes. Raises UserError if steps cannot be predicted."""
    cost: StepCost = from_extra("step_cost_of", "planner.objective=step_time")(resolved, request, threads)
    return cost


COLUMN_STEP = 4  # FBGEMM needs dims divisible by it
TORCHREC_MIN_PARTITION = 128


@dataclass(frozen=True)
class TableOptimizer:
    """Hold the settings of the sparse optimizer that a plan depends on."""

    name: str
    weight_decay: float = 0.0


@dataclass(frozen=True)
class PlacedTable:
    """Hold a table and its parameter in the model. `module`: the path of its EmbeddingBagCollection."""

    table: Table
    module: str
    parameter: nn.Parameter
    sharder: ModuleSharder[nn.Module]


def table_bytes(entry: PlacedTable, optimizer_name: str) -> int:
    """Return the bytes of one copy of a table and its optimizer state."""
    table = entry.table
    size = entry.parameter.element_size()
    weights = table.num_embeddings * table.embedding_dim * size
    return weights + state_bytes(table, optimizer_name)


def state_bytes(table: Table, optimizer_name: str) -> int:
    """Return the bytes of the optimizer state of one copy of a table."""
    if table.updates.frozen:
        return 0
    return shard_state_bytes(optimizer_name, table.num_embeddings, table.embedding_dim)


def place_tables(tables: list[Table], model: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[PlacedTable]:
    """Find each table in the model, in the order of `tables`."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    found = {
        name: (path, parameter, by_type[type(module)])
        for path, module in _sharded_modules("", model, set(by_type))
        for name, parameter in by_type[type(module)].shardable_parameters(module).items()
    }
    expected = {table.name for table in tables}
    assert found.keys() == expected, f"model and tables differ in {sorted(found.keys() ^ expected)}"
    return [PlacedTable(table, *found[table.name]) for table in tables]


def _sharded_modules(path: str, module: nn.Module, types: set[type]) -> Iterator[tuple[str, nn.Module]]:
    if type(module) in types:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _sharded_modules(f"{path}.{name}" if path else name, child, types)


def build_constraints(
    placed: list[PlacedTable], hardware: Hardware, optimizer: TableOptimizer
) -> dict[str, ParameterConstraints]:
    """Return for each table its pooling factors, and the sharding types and kernels that train it
    exactly.

    Raises PlanError if no option remains for a table.
    """
    return {
        entry.table.name: ParameterConstraints(
            sharding_types=_sharding_types(entry, hardware, optimizer),
            compute_kernels=_compute_kernels(entry, hardware),
            min_partition=_min_partition(entry.table),
            pooling_factors=list(entry.table.pooling_factors),
        )
        for entry in placed
    }


def _sharding_types(entry: PlacedTable, hardware: Hardware, optimizer: TableOptimizer) -> list[str]:
    table, named = entry.table, bool(entry.table.sharding.sharding_types)
    offered = entry.sharder.sharding_types(hardware.compute_device)
    types = [kind for kind in allowed_sharding_types(table, optimizer.name) if kind in offered]
    if not named:
        types = [kind for kind in types if kind in _worth_trying(table, hardware, optimizer)]
    widest = hardware.device.max_shard_width
    if widest is not None and table.embedding_dim > widest:
        types = [kind for kind in types if kind in COLUMN_SHARDING_TYPES]
        if not types:
            raise PlanError(
                f"tables.{table.config_name}.embedding_dim={table.embedding_dim}, but FBGEMM's kernels on {hardware.compute_device} "
                f"read rows of at most {widest} numbers: use {widest} at most, or split the rows over several ranks by "
                f"tables.{table.config_name}.sharding.sharding_types=[column_wise] and an optimizer with a state for each number, "
                "such as optimizer.sparse.name=adagrad"
            )
    if table.tiers is not None:  # a replicated table is completely in memory
        types = [kind for kind in types if kind != "data_parallel"]
    if table.sharding.compute_kernels and "dense" not in table.sharding.compute_kernels:
        types = [kind for kind in types if kind != "data_parallel"]
    if not types:
        raise PlanError(
            f"table {table.config_name!r} may be sharded as {table.sharding.sharding_types or 'anything exact'} with kernels "
            f"{table.sharding.compute_kernels or 'of any kind'}, but on {hardware.compute_device} "
            f"there is {', '.join(sorted(offered))}, and data_parallel needs the dense kernel; "
            f"change tables.{table.config_name}.sharding"
        )
    return types


def _worth_trying(table: Table, hardware: Hardware, optimizer: TableOptimizer) -> list[str]:
    """List the types to try if the config names none: they train exactly and differ in cost on this hardware."""
    if hardware.world_size == 1:
        return ["table_wise"]
    by_columns = table.embedding_dim > (table.sharding.min_partition or TORCHREC_MIN_PARTITION)
    types = ["table_wise", "row_wise"] + (["column_wise"] if by_columns else [])
    if hardware.num_hosts > 1:
        types += ["table_row_wise"] + (["table_column_wise"] if by_columns else [])
    # A replicated table's optimizer has state of the table's type.
    is_replicable = find_optimizer(optimizer.name).replicated_states is not None
    if table.data_type == "fp32" and is_replicable:
        types.append("data_parallel")
    return types


def _compute_kernels(entry: PlacedTable, hardware: Hardware) -> list[str]:
    table, there = entry.table, hardware.device.table_kernels
    if table.managed is not None:
        there = tuple(kernel for kernel in there if kernel in KERNELS_OF_MANAGED_ROWS)
    kernels = [kernel for kernel in table.sharding.compute_kernels or there if kernel in there]
    if not kernels:
        why = "" if table.managed is None else " for managed_collision, which writes rows without the cache"
        raise PlanError(
            f"table {table.config_name!r} asks for kernels {table.sharding.compute_kernels}, on {hardware.compute_device} "
            f"there are {', '.join(there)}{why}; change tables.{table.config_name}.sharding.compute_kernels"
        )
    return kernels


def _min_partition(table: Table) -> int | None:
    """Return the minimum width of a column shard; None is TorchRec's 128.

    A table that must be split by columns is split at least in two.
    """
    sharding, half = table.sharding, table.embedding_dim // 2
    only_columns = bool(sharding.sharding_types) and set(sharding.sharding_types) <= set(COLUMN_SHARDING_TYPES)
    if sharding.min_partition is None and only_columns and half < TORCHREC_MIN_PARTITION and half % COLUMN_STEP == 0:
        return half
    return sharding.min_partition
