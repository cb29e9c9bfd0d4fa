"""Resolve a job against its data set and this host's hardware, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline import devices
from pipeline.config.jobs.train import TrainJob
from pipeline.config.tables import TableConfig
from pipeline.data.dataset import Dataset
from pipeline.embeddings.table import Table
from pipeline.planner.estimator import dense_part_bytes
from pipeline.planner.hardware import Hardware, available_memory, resolve_hardware
from pipeline.planner.head_rows import choose_heads
from pipeline.planner.resolved_job import ResolvedJob, resolve_job
from pipeline.planner.tier_slots import SlotChoice, choose_slots, room_for_tiers
from pipeline.runtime.errors import PlanError, TrainingError, UserError
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training.build import build_task

T = TypeVar("T")


def resolve(
    job: TrainJob, dataset: Dataset, context: DistributedContext, earlier: dict[str, TableConfig] | None = None
) -> ResolvedJob:
    """Collective: return the same job on all ranks. Rank 0 chooses `head_rows: auto` and `sharding.tiers: auto`.

    earlier: the tables of the run that this job resumes; their head rows stay as they are.
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
            room = available_memory(job.planner, hardware())
            return choose_heads(job, tables, auto, dataset, context.world_size, room, earlier)

        return _decided(context, decide)

    def choose_tiers(whole: ResolvedJob) -> SlotChoice:
        return _decided(context, lambda: slots_for(whole, hardware()))

    return resolve_job(job, dataset, context.world_size, choose, choose_tiers)


def _decided(context: DistributedContext, decide: Callable[[], T]) -> T:
    """Collective: return rank 0's decision on all ranks. Raises TrainingError on all ranks if rank 0 fails."""
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


def slots_for(whole: ResolvedJob, hardware: Hardware) -> SlotChoice:
    """Choose the tables that have tiers on this hardware, and their numbers of slots (sharding.tiers=auto).

    Raises:
        PlanError: GPU ranks, or memory that does not hold the fewest slots.
    """
    job = whole.job
    if not hardware.on_cpu:
        raise PlanError(
            f"sharding.tiers=auto is for CPU ranks, and these are {hardware.compute_device}: leave it out, and use "
            "tables.default.sharding.compute_kernels=[fused_uvm_caching]"
        )
    task = build_task(whole, hardware.compute_device)
    modules = [module for module in task.modules() if isinstance(module, EmbeddingBagCollection)]
    dense = dense_part_bytes(task, [parameter for module in modules for parameter in module.parameters()])
    room = room_for_tiers(hardware.ddr_cap_bytes, job.planner.reserved_memory_fraction, dense, hardware.world_size)
    return choose_slots(job, whole.tables, room, hardware.world_size)
