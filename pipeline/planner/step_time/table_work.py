"""Describe the work of the tables' kernels on one rank in numbers that their time grows with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.config.optimizers import find_optimizer
from pipeline.planner.step_time.frequency import Bands, power_law, touched

CACHE_MIB = (1, 4, 16, 32)  # sizes of caches whose misses have a rate each
# Of pooled rows: larger blocks are new pages of the kernel's each time (pipeline.devices.cpu.memory); the latter where a rank has so much memory
KEPT_BYTES, KEPT_IN_ROOM_BYTES, ROOMY_BYTES = 64 << 20, 256 << 20, 8 << 30
POOLED_BYTES = 8 << 20  # of pooled rows or gradients: more do not stay in the caches between kernels
LANES = 16  # numbers that the kernels move at once; what is left over goes one by one
# Of pipeline.sharding.torchrec.cpu_tables.partition_tables, which is said there.
BAG_WORK, ROW_WORK, UNIT_SHARES, LEAST_UNIT, MOST_SPLITS = 256, 16, 2, 100_000, 6
AMOUNTS, SHARES = 3.0, 0.75  # how far likeness of tables' kernels reaches: doublings of an amount, shares of the ids
LEAST_SHARE, LEAST_SAMPLES = 256, 32  # of a thread, of pipeline.devices.cpu.kernel_pool and of FastLookup.fill


@dataclass(frozen=True)
class TableShape:
    """A table, or a shard, as its rank's lookup sees it. `samples`: bags of one feature; `features` share the table."""

    bands: Bands
    dim: int
    pooling: float  # ids a bag, of one feature
    samples: float
    features: int = 1

    @property
    def ids(self) -> float:
        return self.pooling * self.samples * self.features


@dataclass(frozen=True)
class TableSample:
    """Tables of a measurement, a feature each. skew 4: the first x of a table's rows have x^(1/4) of its lookups."""

    rows: list[int]
    dim: int
    pooling: list[int]
    batch: int
    skew: float

    @property
    def shapes(self) -> list[TableShape]:
        return [
            TableShape(power_law(rows, self.skew), self.dim, float(pooling), self.batch)
            for rows, pooling in zip(self.rows, self.pooling, strict=True)
        ]


@dataclass(frozen=True)
class TableWork:
    lookup: dict[str, float]
    update: dict[str, float]


def work_of(
    tables: Sequence[TableShape], optimizer: str, number_bytes: int, threads: int, memory_bytes: float = ROOMY_BYTES
) -> TableWork:
    """Of one lookup over `tables` whose pooled rows, and gradients, have `number_bytes` a number; of the slowest thread of a rank
    whose share of its host's memory is `memory_bytes`.

    Layers pass through the caches between two lookups, so the first touch of a row in a batch is a miss of the small ones; of the
    last cache it is one where more frequent rows fill it. A lookup prefetches one row of each bag, the others are waited for.
    """
    entry = find_optimizer(optimizer)
    bands, ids = [table.bands for table in tables], [table.ids for table in tables]
    weights = [4.0 * table.dim for table in tables]
    states = [4.0 * (entry.state_per_element * table.dim + entry.state_per_row) for table in tables]
    both = [weight + state for weight, state in zip(weights, states, strict=True)]
    pooled = sum(table.samples * table.features * table.dim for table in tables) * number_bytes
    several = [table for table in tables if table.pooling > 1]
    shared = {
        "tables": float(len(tables)),
        "bags": sum(table.samples * table.features for table in tables),
        "ids": sum(ids),
        "row_bytes": sum(count * size for count, size in zip(ids, weights, strict=True)),
        "tail_numbers": sum(table.ids * (table.dim % LANES) for table in tables),
        "pooled_bytes": pooled,
        "pooled_beyond_bytes": max(0.0, pooled - POOLED_BYTES),
    }
    kept = KEPT_IN_ROOM_BYTES if memory_bytes >= ROOMY_BYTES else KEPT_BYTES
    lookup = shared | {
        "new_page_bytes": pooled if pooled > kept else 0.0,
        "sums": sum(table.samples * table.features for table in several),
        "sum_bytes": sum(table.samples * table.features * 4 * table.dim for table in several),
        "bag_ids": sum(table.ids for table in several),
        "bag_bytes": sum(table.ids * 4 * table.dim for table in several),
        "bag_tail_numbers": sum(table.ids * (table.dim % LANES) for table in several),
    }
    update = dict(shared)
    waited = [max(0.0, 1 - 1 / max(table.pooling, 1e-9)) for table in tables]
    for size in CACHE_MIB:
        found = touched(bands, ids, both, size * 2**20)
        for amounts, row_bytes in ((lookup, weights), (update, both)):
            amounts[f"missed_rows_{size}"] = sum(each.missed_rows for each in found)
            amounts[f"missed_bytes_{size}"] = sum(
                each.missed_rows * count for each, count in zip(found, row_bytes, strict=True)
            )
            amounts["distinct"] = sum(each.distinct for each in found)
            amounts["distinct_bytes"] = sum(each.distinct * count for each, count in zip(found, row_bytes, strict=True))
        lookup[f"waited_rows_{size}"] = sum(each.missed_rows * share for each, share in zip(found, waited, strict=True))
    # What an optimizer computes of a row is its own.
    update[f"rows_by_{optimizer}"] = update["distinct"]
    update[f"numbers_by_{optimizer}"] = sum(
        each.distinct * table.dim for each, table in zip(found, tables, strict=True)
    )
    shares = _lookup_shares(tables, threads)
    work = _units([table.ids * (table.dim + ROW_WORK) + BAG_WORK for table in tables], threads)
    return TableWork(
        _of_thread(lookup, 1 / shares, shares),
        _of_thread(update, _share_of_slowest(work, threads), max(1, min(threads, len(work)))),
    )


def _lookup_shares(tables: Sequence[TableShape], threads: int) -> int:
    """On how many threads a lookup runs; what is worth one is counted in ids where bags have several."""
    samples = max((table.samples for table in tables), default=0.0)
    ids, bags = sum(table.ids for table in tables), sum(table.samples * table.features for table in tables)
    worth = LEAST_SHARE / max(1.0, ids / max(bags, 1.0))
    return max(1, min(threads, int(samples / max(worth, LEAST_SAMPLES))))


def _of_thread(amounts: dict[str, float], share: float, threads: int) -> dict[str, float]:
    """`other_threads`: those that work is handed to."""
    return {name: value * share for name, value in amounts.items()} | {"other_threads": threads - 1.0}


def _units(work: Sequence[float], threads: int) -> list[float]:
    """What threads take one after the other: tables, and parts of those that are large."""
    if threads < 2:
        return list(work)
    most = max(sum(work) / (UNIT_SHARES * threads), LEAST_UNIT)
    parts = [1 << min(math.ceil(math.log2(max(amount / most, 1.0))), MOST_SPLITS) for amount in work]
    return [amount / count for amount, count in zip(work, parts, strict=True) for _ in range(count)]


def _share_of_slowest(work: Sequence[float], threads: int) -> float:
    """What the thread with most of these units has of all work."""
    loads = [0.0] * max(1, min(threads, len(work)))
    for amount in sorted(work, reverse=True):
        loads[loads.index(min(loads))] += amount
    return max(loads) / max(sum(loads), 1e-12)


def table_place(amounts: Mapping[str, float]) -> tuple[float, ...]:
    """Where a lookup or update is among others: doublings of its ids and their likes, and shares of them, by their reach."""
    ids, bags = max(amounts["ids"], 1e-9), max(amounts["bags"], 1e-9)
    sizes = (ids, amounts["row_bytes"] / ids, amounts["tables"], ids / bags, amounts["pooled_bytes"] / bags)
    shares = (amounts["distinct"], amounts["missed_rows_1"], amounts["missed_rows_16"])
    return (
        *(math.log2(1 + size) / AMOUNTS for size in sizes),
        *(share / ids / SHARES for share in shares),
        amounts["other_threads"] / AMOUNTS,
    )
