"""Predict how long a step waits for rows on an SSD, by the plan's forecasts, the predicted step and this machine's SSD."""

from __future__ import annotations

from collections import Counter

from pipeline.config.jobs import TrainJob
from pipeline.planner.record import PlanDescription
from pipeline.planner.tiers import stall_percent
from pipeline.runtime.errors import PlanError
from pipeline.sharding.tiers.probe import SsdSpeed, measure
from pipeline.training.tier_rates import tier_folder


def tier_outlook(job: TrainJob, plan: PlanDescription, step_ms: float) -> list[str]:
    """A line on the plan's tables in tiers; empty where there are none. Writes 128 MiB to the SSD for a second or two.

    Raises:
        PlanError: the stall is above planner.most_tier_stall_percent.
        TierError: the SSD cannot be written to.
    """
    held = [(choice, choice.tiers) for choice in plan.tables if choice.tiers is not None]
    if not held:
        return []
    rows: Counter[int] = Counter()
    for choice, tiers in held:
        for rank in choice.ranks:
            rows[rank] += tiers.rows_a_step / len(choice.ranks)  # type: ignore[assignment]  # a share of them
    widest = max((choice.weight_bytes + choice.state_bytes) // (4 * choice.num_embeddings) for choice, _ in held)
    speed = measure(tier_folder(job, held[0][0].name), max(widest, 1))
    most = max(rows.values())
    stall = stall_percent(most, step_ms, speed.loads_per_s, speed.stores_per_s)
    line = describe(len(held), most, step_ms, speed, stall)
    if stall > job.planner.most_tier_stall_percent:
        raise PlanError(
            f"{line}; planner.most_tier_stall_percent={job.planner.most_tier_stall_percent:g} allows less: raise "
            "tables.<name>.tiers.slots or the batch size, or use a faster SSD for sharding.tier_folder"
        )
    return [line]


def describe(num_tables: int, rows: float, step_ms: float, speed: SsdSpeed, stall: float) -> str:
    """`rows`: that come in a step, on the rank that has most."""
    io_ms = 1000 * rows * (1 / speed.loads_per_s + 1 / speed.stores_per_s)
    return (
        f"tiers       {num_tables} tables; {rows:,.0f} rows a step come and go, {io_ms:.3g} ms of this SSD "
        f"({speed.loads_per_s:,.0f} loads and {speed.stores_per_s:,.0f} stores a second) beside a step of {step_ms:.3g} ms: "
        f"predicted tier stall {stall:.0f} %"
    )
