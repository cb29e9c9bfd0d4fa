"""Describe the work of the tables' kernels on one rank in numbers that their time grows with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.optimizers import find_optimizer
from pipeline.planner.step_time.frequency import Bands, touched

CACHE_MIB = (2, 8, 16, 24, 32, 64)  # sizes tried for what the last cache keeps of tables
LANES = 16  # numbers that the kernels move at once; what is left over goes one by one
BAG_WORK, ROW_WORK = 256, 16  # of pipeline.sharding.torchrec.cpu_tables.partition_tables


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
class TableWork:
    lookup: dict[str, float]
    update: dict[str, float]


def work_of(tables: Sequence[TableShape], optimizer: str, number_bytes: int, threads: int) -> TableWork:
    """Of one lookup over `tables` whose pooled rows, and gradients, have `number_bytes` a number."""
    entry = find_optimizer(optimizer)
    bands, ids = [table.bands for table in tables], [table.ids for table in tables]
    weights = [4.0 * table.dim for table in tables]
    states = [4.0 * (entry.state_per_element * table.dim + entry.state_per_row) for table in tables]
    bags = sum(table.samples * table.features for table in tables)
    pooled = sum(table.samples * table.features * table.dim for table in tables) * number_bytes
    single = sum(table.ids for table in tables if table.pooling <= 1)
    lookup = {
        "tables": float(len(tables)), "bags": bags, "ids": sum(ids), "pooled_bytes": pooled,
        "row_bytes": sum(count * size for count, size in zip(ids, weights, strict=True)),
        "tail_numbers": sum(table.ids * (table.dim % LANES) for table in tables),
        "bag_ids": sum(ids) - single,
        "bag_bytes": sum(table.ids * 4 * table.dim for table in tables if table.pooling > 1),
        "bag_tail_numbers": sum(table.ids * (table.dim % LANES) for table in tables if table.pooling > 1),
    }  # fmt: skip
    update = {name: lookup[name] for name in ("tables", "bags", "ids", "row_bytes", "tail_numbers")}
    update["gradient_bytes"] = pooled
    for size in CACHE_MIB:
        found = touched(
            bands, ids, [weight + state for weight, state in zip(weights, states, strict=True)], size * 2**20
        )
        lookup[f"missed_ids_{size}"] = sum(each.missed_ids for each in found)
        lookup[f"missed_bytes_{size}"] = sum(each.missed_ids * w for each, w in zip(found, weights, strict=True))
        update[f"missed_rows_{size}"] = sum(each.missed_rows for each in found)
        update[f"missed_bytes_{size}"] = sum(
            each.missed_rows * (w + s) for each, w, s in zip(found, weights, states, strict=True)
        )
        update["distinct"] = sum(each.distinct for each in found)
        update["distinct_bytes"] = sum(
            each.distinct * (w + s) for each, w, s in zip(found, weights, states, strict=True)
        )
    share = _share_of_slowest([table.ids * (table.dim + ROW_WORK) + BAG_WORK for table in tables], threads)
    return TableWork(lookup, {name: round(value * share, 3) for name, value in update.items()})


def _share_of_slowest(work: Sequence[float], threads: int) -> float:
    """Tables go to threads whole: what the one with most of them has of all work."""
    loads = [0.0] * max(1, min(threads, len(work)))
    for amount in sorted(work, reverse=True):
        loads[loads.index(min(loads))] += amount
    return max(loads) / max(sum(loads), 1e-12)
