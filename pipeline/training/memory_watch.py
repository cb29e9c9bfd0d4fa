"""Compare each rank's peak memory after the first training step with the prediction of its plan."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from pipeline import devices
from pipeline.planner.plan_record import PlanDescription, RankLoad
from pipeline.runtime.byte_counts import show_bytes
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.distributed import DistributedContext

MAX_RANKS = 16  # with a line each; of more ranks, only the fullest ranks are printed
logger = get_logger("pipeline.training")
NOT_PREDICTED = (
    "activations, workspace and libraries are in it and are not predicted: "
    "planner.reserved_memory_fraction is kept for them"
)


class MemoryWatch:
    """Measures peak memory. Create it before the tables: on CPU, memory in use at that time does
    not count."""

    def __init__(self, context: DistributedContext) -> None:
        self._context = context
        self.peak_bytes = devices.current().watch_memory()

    def report(self, plan: PlanDescription) -> None:
        """Log all ranks' figures on rank 0. Collective."""
        local = torch.tensor([self.peak_bytes()], dtype=torch.int64, device=self._context.device)
        measured = [torch.zeros_like(local) for _ in range(self._context.world_size)]
        dist.all_gather(measured, local)
        for line in describe_memory(plan, [int(each) for each in measured], devices.current().memory_figure):
            logger.info("%s", line)


def describe_memory(plan: PlanDescription, measured_bytes: list[int], what: str) -> list[str]:
    """Return log lines. `measured_bytes` has one number per rank and `what` describes it. The plan
    does not predict activations, workspace and libraries; it reserves memory for them."""
    # A plan for the ranks of one host holds for every other host.
    loads = [replace(plan.ranks[rank % len(plan.ranks)], rank=rank) for rank in range(len(measured_bytes))]
    ranks = sorted(zip(loads, measured_bytes, strict=True), key=lambda pair: -pair[1])
    more = len(ranks) - MAX_RANKS
    lines = [f"peak memory after the first step, a rank (measured: {what}; {NOT_PREDICTED})"]
    lines += [
        _line(plan, load, measured) for load, measured in sorted(ranks[:MAX_RANKS], key=lambda pair: pair[0].rank)
    ]
    return lines + ([f"  and {more} ranks that take less"] if more > 0 else [])


def _line(plan: PlanDescription, load: RankLoad, measured: int) -> str:
    tables = load.hbm_bytes if plan.usable_hbm_bytes else load.ddr_bytes
    return (
        f"  rank {load.rank}: predicted {show_bytes(tables + plan.dense_bytes)} (tables {show_bytes(tables)}, "
        f"dense part {show_bytes(plan.dense_bytes)}), measured {show_bytes(measured) if measured else 'no growth'}"
    )
