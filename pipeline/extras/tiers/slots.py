"""Choose which tables have tiers, and how many slots, so that steps read few rows from the SSD
(sharding.tiers=auto).

A table may have any share of its rows in slots, from what batches in flight need up to all. A table
that is completely in memory needs no map, so its last rows need less memory. Each table has a curve
of rows per step from the SSD by bytes of memory. Memory is given to the table where it saves most
rows, along the lower convex hulls of these curves. For few tables, dynamic programming over bytes
is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.config.jobs.train import TrainJob
from pipeline.config.optimizers import find_optimizer
from pipeline.config.tables import TableConfig, TiersConfig
from pipeline.embeddings.physical import leaves
from pipeline.embeddings.table import Table
from pipeline.extras.tiers.forecast import distinct_rows, forecast, memory_bytes
from pipeline.planner.estimator import dense_part_bytes
from pipeline.planner.hardware import Hardware
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.runtime.errors import PlanError
from pipeline.runtime.logs import get_logger
from pipeline.training.sharded_model import build_task

BATCHES_IN_FLIGHT = 4  # one that trains, two that are prefetched, and one in reserve
POINTS = 40  # shares that are tried per table
FEW_TABLES, BUCKETS = 40, 1000  # of bytes; a table's bytes are rounded up to buckets
# of a rank in addition to tables and layers: libraries, batches, kernels (docs/do/tiers.md)
PROCESS_BYTES = 768 << 20
SPREAD = 0.9  # of the memory of several ranks, because tables do not fill them evenly
logger = get_logger(__name__)
BYTES_A_NUMBER = {"fp32": 4, "fp16": 2}


@dataclass(frozen=True)
class SlotChoice:
    """Hold the choice: by table the share of rows with a slot; the memory of all tables on all
    ranks, with tiers and without.
    """

    slots: Mapping[str, float]
    memory_bytes: float
    whole_bytes: float
    room_bytes: float
    rows_a_step: float


@dataclass(frozen=True)
class _Point:
    share: float
    memory: float
    rows_a_step: float


def room_for_tiers(capacity_bytes: float, reserved_fraction: float, dense_bytes: float, world_size: int) -> float:
    """Return the memory for the tables of all ranks. capacity_bytes, dense_bytes: per rank."""
    room = capacity_bytes - max(reserved_fraction * capacity_bytes, PROCESS_BYTES) - dense_bytes
    return world_size * room * (1.0 if world_size == 1 else SPREAD)


def choose_slots(job: TrainJob, tables: Sequence[Table], room_bytes: float, world_size: int) -> SlotChoice:
    """Return the choice. room_bytes: memory of all ranks together.

    Raises:
        PlanError: the minimum number of slots does not fit next to the tables that stay in memory.
    """
    cost = _cost_of(job, world_size)
    batch_size = job.trainer.micro_batch_size
    open_tables = [table for table in tables if is_open(table)]
    others = sum(cost(table)[0] for table in tables if not is_open(table))
    points = {table.name: list(_points(table, batch_size, cost)) for table in open_tables}
    curves = {name: _hull(own) for name, own in points.items()}
    whole = others + sum(cost(replace(table, tiers=None))[0] for table in open_tables)
    if whole <= room_bytes:
        return SlotChoice({}, whole, whole, room_bytes, 0.0)
    least = others + sum(curve[0].memory for curve in curves.values())
    if least > room_bytes:
        raise PlanError(_too_small(others, least, whole, room_bytes, world_size, len(curves)))
    ways = [_spend(curves, room_bytes - others)]
    if len(points) <= FEW_TABLES:
        ways += _spend_by_buckets(points, room_bytes - others)
    ways = [_spend_rest(points, way, room_bytes - others) for way in ways]
    chosen = min(ways, key=lambda way: sum(point.rows_a_step for point in way.values()))
    return SlotChoice(
        {name: point.share for name, point in chosen.items() if point.share < 1},
        others + sum(point.memory for point in chosen.values()),
        whole,
        room_bytes,
        sum(point.rows_a_step for point in chosen.values()),
    )


def is_open(table: Table) -> bool:
    """Return whether `auto` may choose the table's slots: the config sets none, and the table would
    train exactly with tiers.
    """
    named = table.tiers is not None and table.tiers.slots != 1
    managed = table.compression is not None and table.compression.kind == "managed_collision"
    least = (table.tiers or TiersConfig()).min_rows
    return (
        not named
        and not managed
        and table.data_type == "fp32"
        and table.sharding.sharding_types != ["data_parallel"]
        and any(leaf.num_embeddings >= least for leaf in leaves(replace(table, tiers=None)))
    )


def with_slots(
    configs: Mapping[str, TableConfig], tables: Sequence[Table], choice: SlotChoice
) -> dict[str, TableConfig]:
    """Return `configs` with an entry for each table of the choice, so that a run stores it in its
    config.yaml.
    """
    resolved = dict(configs)
    for table in tables:
        if table.name in choice.slots:
            config = resolved.get(table.config_name, TableConfig())
            resolved[table.config_name] = replace(config, tiers=tiers_of(table, choice))
    return resolved


def tiers_of(table: Table, choice: SlotChoice) -> TiersConfig:
    return replace(table.tiers or TiersConfig(), slots=choice.slots[table.name])


def describe(choice: SlotChoice) -> str:
    return (
        f"tiers       sharding.tiers=auto: {len(choice.slots)} tables have tiers; all tables use "
        f"{_gib(choice.memory_bytes)} of {_gib(choice.room_bytes)} of memory, or "
        f"{_gib(choice.whole_bytes)} without tiers; about {choice.rows_a_step:,.0f} rows per step "
        "are loaded and evicted"
    )


def with_tiers(resolved: ResolvedJob, choice: SlotChoice) -> ResolvedJob:
    """Write the choice into the job's tables, as if the user had set it."""

    def placed(table: Table) -> Table:
        if table.name not in choice.slots:
            return table
        note = "; ".join(filter(None, [table.note, "slots by sharding.tiers=auto"]))
        return replace(table, tiers=tiers_of(table, choice), note=note)

    logger.info("%s", describe(choice))
    return replace(
        resolved,
        job=replace(resolved.job, tables=with_slots(resolved.job.tables, resolved.tables, choice)),
        all_tables=[placed(table) for table in resolved.all_tables],
        tables=[placed(table) for table in resolved.tables],
    )


def slots_for(whole: ResolvedJob, hardware: Hardware) -> SlotChoice:
    """Choose the tables that have tiers on this hardware, and their numbers of slots (sharding.tiers=auto).

    Raises:
        PlanError: GPU ranks, or memory that does not hold the fewest slots.
    """
    job = whole.job
    if not hardware.on_cpu:
        raise PlanError(
            f"sharding.tiers=auto is for CPU ranks, but these are {hardware.compute_device}: "
            "remove it, and use "
            "tables.default.sharding.compute_kernels=[fused_uvm_caching]"
        )
    task = build_task(whole, hardware.compute_device)
    modules = [module for module in task.modules() if isinstance(module, EmbeddingBagCollection)]
    dense = dense_part_bytes(task, [parameter for module in modules for parameter in module.parameters()])
    room = room_for_tiers(hardware.ddr_cap_bytes, job.planner.reserved_memory_fraction, dense, hardware.world_size)
    return choose_slots(job, whole.tables, room, hardware.world_size)


Cost = Callable[[Table], tuple[float, float]]


def _cost_of(job: TrainJob, world_size: int) -> Cost:
    """Return a function that maps a table's tiers to (bytes of memory with the optimizer's state,
    rows per step from the SSD).
    """
    optimizer = find_optimizer(job.optimizer.sparse.name)

    def cost(table: Table) -> tuple[float, float]:
        memory, rows = 0.0, 0.0
        for leaf in leaves(table):
            state = optimizer.state_per_element * leaf.embedding_dim + optimizer.state_per_row
            row_bytes = leaf.embedding_dim * BYTES_A_NUMBER.get(leaf.data_type, 4) + 4 * state
            if leaf.tiers is not None:
                memory += memory_bytes(leaf, leaf.num_embeddings, row_bytes)
                rows += forecast(leaf, job.trainer.micro_batch_size * sum(leaf.pooling_factors)).rows_a_step
                continue
            copies = world_size if leaf.sharding.sharding_types == ["data_parallel"] else 1
            memory += copies * leaf.num_embeddings * row_bytes
        return memory, rows

    return cost


def _points(table: Table, batch_size: int, cost: Cost) -> Iterator[_Point]:
    tiers = table.tiers or TiersConfig()
    least = max(
        (
            BATCHES_IN_FLIGHT * distinct_rows(leaf, batch_size * sum(leaf.pooling_factors)) / leaf.num_embeddings
            for leaf in leaves(replace(table, tiers=None))
            if leaf.num_embeddings >= tiers.min_rows
        ),
        default=1.0,
    )
    if least < 1:
        for number in range(POINTS - 1):
            share = math.ceil(1e6 * max(least, 1e-6) ** (1 - number / (POINTS - 1))) / 1e6
            if share < 1:
                yield _Point(share, *cost(replace(table, tiers=replace(tiers, slots=share))))
    yield _Point(1.0, *cost(replace(table, tiers=None)))


def _hull(points: Sequence[_Point]) -> list[_Point]:
    """Return the points of the lower convex hull, ascending by memory: each additional byte saves
    fewer rows.
    """
    hull: list[_Point] = []
    for point in sorted(points, key=lambda each: (each.memory, each.rows_a_step)):
        if hull and point.rows_a_step >= hull[-1].rows_a_step:
            continue
        while len(hull) >= 2 and _saved(hull[-2], hull[-1]) <= _saved(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _saved(less: _Point, more: _Point) -> float:
    """Return how many rows per step each additional byte saves."""
    return (less.rows_a_step - more.rows_a_step) / max(more.memory - less.memory, 1e-9)


def _spend(curves: Mapping[str, list[_Point]], room_bytes: float) -> dict[str, _Point]:
    chosen = {name: curve[0] for name, curve in curves.items()}
    left = room_bytes - sum(point.memory for point in chosen.values())
    steps = [(_saved(less, more), name, less, more) for name, curve in curves.items() for less, more in pairwise(curve)]
    for _, name, less, more in sorted(steps, key=lambda step: (-step[0], step[1])):
        if chosen[name] is less and more.memory - less.memory <= left:
            left -= more.memory - less.memory
            chosen[name] = more
    return chosen


def _spend_by_buckets(points: Mapping[str, list[_Point]], room_bytes: float) -> list[dict[str, _Point]]:
    """Choose the best point for each table, with bytes rounded up to buckets. Return nothing if the
    tables then do not fit.
    """
    # rows per step of the tables so far, by the buckets that are left for other tables
    best = [0.0] * (BUCKETS + 1)
    taken: list[tuple[list[int], list[int]]] = []
    for own in points.values():
        sizes = [math.ceil(point.memory / room_bytes * BUCKETS) for point in own]
        totals, choices = [math.inf] * (BUCKETS + 1), [0] * (BUCKETS + 1)
        for number, (point, size) in enumerate(zip(own, sizes, strict=True)):
            for bucket in range(size, BUCKETS + 1):
                if (total := best[bucket - size] + point.rows_a_step) < totals[bucket]:
                    totals[bucket], choices[bucket] = total, number
        taken.append((choices, sizes))
        best = totals
    if math.isinf(best[BUCKETS]):
        return []
    found, bucket = {}, BUCKETS
    for (name, own), (choices, sizes) in reversed([*zip(points.items(), taken, strict=True)]):
        found[name] = own[choices[bucket]]
        bucket -= sizes[choices[bucket]]
    return [found]


def _spend_rest(
    points: Mapping[str, list[_Point]], chosen: Mapping[str, _Point], room_bytes: float
) -> dict[str, _Point]:
    """Where the hull's next step is too large for the remaining memory, choose a point of the curve between both."""
    found = dict(chosen)
    while True:
        left = room_bytes - sum(point.memory for point in found.values())
        moves = [
            (found[name].rows_a_step - point.rows_a_step, name, point)
            for name, own in points.items()
            for point in own
            if point.memory - found[name].memory <= left and point.rows_a_step < found[name].rows_a_step
        ]
        if not moves:
            return found
        _, name, best = max(moves, key=lambda move: (move[0], move[1]))
        found[name] = best


def _too_small(others: float, least: float, whole: float, room: float, world_size: int, num_open: int) -> str:
    return (
        f"sharding.tiers=auto: tables take {_gib(whole)} with their optimizer's state, and {_gib(least)} at least in tiers "
        f"({_gib(others)} of tables that stay in memory whole, {_gib(least - others)} of slots that {BATCHES_IN_FLIGHT} batches need "
        f"in {num_open} others), where {world_size} rank(s) have {_gib(max(room, 0.0))} for them; lower trainer.global_batch_size "
        "or embedding_dim, add ranks, compress tables, or raise hardware.ddr_cap_gb"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
