"""Predict how long a step waits for rows on an SSD, from the plan, the predicted step and this
machine's SSD.
"""

from __future__ import annotations

from collections import Counter

from pipeline.config.jobs.train import TrainJob
from pipeline.config.planner import HardwareConfig
from pipeline.extras.tiers.forecast import io_ms, stall_percent, tiered_step_ms
from pipeline.extras.tiers.probe import SsdSpeed, measure
from pipeline.extras.tiers.rates import tier_folder
from pipeline.planner.plan_record import PlanDescription
from pipeline.runtime.errors import PlanError

BLOCK_BYTES = 4096  # size of random reads in data sheets
READS_AT_ONCE = 16
ROWS_A_STORE = 8  # that leave together, for a read and a write of a segment


def tier_outlook(job: TrainJob, plan: PlanDescription, step_ms: float) -> list[str]:
    """Describe the plan's tables with tiers in one line; empty if there are none.

    If no data sheet has the SSD's speed, measure it: write 128 MiB to the SSD, which takes a second
    or two.

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
    most = max(rows.values())
    speed = data_sheet(job.hardware) or measure(tier_folder(job, held[0][0].name), max(widest, 1), int(most))
    stall = stall_percent(step_ms, io_ms(most, speed.loads_per_s, speed.stores_per_s), speed.slowdown, speed.spread)
    line = describe(len(held), most, step_ms, speed, stall)
    if stall > job.planner.most_tier_stall_percent:
        raise PlanError(
            f"{line}; planner.most_tier_stall_percent={job.planner.most_tier_stall_percent:g} allows less: raise "
            "tables.<name>.tiers.slots or the batch size, or use a faster SSD for sharding.tier_folder"
        )
    return [line]


def data_sheet(hardware: HardwareConfig) -> SsdSpeed | None:
    """Return speeds from hardware.ssd_gb_per_s and ssd_latency_us.

    The model is that each row is one block, and that READS_AT_ONCE reads run at a time.
    """
    if not hardware.ssd_gb_per_s or not hardware.ssd_latency_us:
        return None
    loads = min(READS_AT_ONCE * 1e6 / hardware.ssd_latency_us, 1e9 * hardware.ssd_gb_per_s / BLOCK_BYTES)
    return SsdSpeed(loads, ROWS_A_STORE * loads)


def describe(num_tables: int, rows: float, step_ms: float, speed: SsdSpeed, stall: float) -> str:
    """Return the line. rows: rows per step on the rank that has the most."""
    moving_ms = io_ms(rows, speed.loads_per_s, speed.stores_per_s)
    return (
        f"tiers       {num_tables} tables; {rows:,.0f} rows per step are loaded and evicted, "
        f"{moving_ms:.3g} ms of the SSD ({speed.loads_per_s:,.0f} loads and "
        f"{speed.stores_per_s:,.0f} stores per second) for a step of {step_ms:.3g} ms: "
        f"{tiered_step_ms(step_ms, moving_ms, speed.slowdown, speed.spread):.3g} ms in total, "
        f"predicted tier stall {stall:.0f} %"
    )
