"""Describe this rank, and let ranks agree."""

from __future__ import annotations

import atexit
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeline.runtime.errors import StorageError
from pipeline.runtime.process import preemption
from pipeline.runtime.storage.lease import Lease, RunFolderHeldError, take_lease


@dataclass(frozen=True)
class DistributedContext:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def true_on_any_rank(flag: bool, context: DistributedContext) -> bool:
    """Collective: return True on all ranks if the flag is true on any rank."""
    if context.world_size == 1:
        return flag
    value = torch.tensor(int(flag), device=context.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def own_store(name: str) -> dist.Store:
    """Return the group's store with the prefix `name`, over a separate connection."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return store.clone()


def take_run_folder(path: str, context: DistributedContext, ttl_s: float = 120.0) -> Lease | None:
    """Collective: make the folder and hold it until rank 0, which gets the lease, releases it or ends.

    A run that loses its lease is asked to stop, as by SIGTERM; its fence keeps it from committing.
    Raises StorageError on every rank if the folder cannot be written to, or another run holds it.
    """
    lease, problem = None, ""
    if context.is_main:
        try:
            lease = take_lease(path, ttl_s, when_lost=preemption.request)
            atexit.register(lease.release)
        except RunFolderHeldError as error:
            problem = str(error)
        except OSError as error:
            problem = f"run_dir={path} cannot be written to ({error}); choose another"
    box = [problem]
    dist.broadcast_object_list(box, src=0)
    if box[0]:
        raise StorageError(box[0])
    return lease
