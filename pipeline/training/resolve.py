"""Resolve a job against its data set and this host's hardware. All ranks get the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from pipeline import devices
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import from_extra
from pipeline.config.tables import TableConfig
from pipeline.data.dataset import Dataset
from pipeline.embeddings.table import Table
from pipeline.planner.hardware import Hardware, available_memory, resolve_hardware
from pipeline.planner.resolved_job import SPLIT_KEY, ResolvedJob, resolve_job
from pipeline.runtime.errors import TrainingError, UserError
from pipeline.runtime.process.distributed import DistributedContext

T = TypeVar("T")


def resolve(
    job: TrainJob, dataset: Dataset, context: DistributedContext, earlier: dict[str, TableConfig] | None = None
) -> ResolvedJob:
    """Return the same resolved job on all ranks. Rank 0 chooses `head_rows: auto` and
    `sharding.tiers: auto`. Collective.

    `earlier` holds the tables of the run that this job resumes; their head rows do not change.
    """

    def hardware() -> Hardware:
        return resolve_hardware(
            job.hardware,
            context.world_size,
            local_world_size=context.local_world_size,
            device_type=devices.current().device_type,
        )

    def choose(tables: list[Table], auto: list[Table]) -> dict[str, int]:
        def decide() -> dict[str, int]:
            choose_heads = from_extra("choose_heads", SPLIT_KEY)
            room = available_memory(job.planner, hardware())
            heads: dict[str, int] = choose_heads(job, tables, auto, dataset, context.world_size, room, earlier)
            return heads

        return _broadcast_from_rank0(context, decide)

    def choose_tiers(whole: ResolvedJob) -> Any:
        slots_for = from_extra("slots_for", "sharding.tiers=auto")
        return _broadcast_from_rank0(context, lambda: slots_for(whole, hardware()))

    return resolve_job(job, dataset, context.world_size, choose, choose_tiers)


def _broadcast_from_rank0(context: DistributedContext, decide: Callable[[], T]) -> T:
    """Return rank 0's decision on all ranks.

    Raises TrainingError on all ranks if rank 0 fails. Collective.
    """
    message: list[Any] = [None, ""]
    if context.is_main:
        try:
            message[0] = decide()
        except UserError as error:
            message[1] = str(error)
    if context.world_size > 1:
        dist.broadcast_object_list(message, src=0, device=context.device)
    if message[1]:
        raise TrainingError(message[1])
    decision: T = message[0]
    return decision
