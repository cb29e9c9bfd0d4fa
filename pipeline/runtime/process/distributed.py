"""Describe this rank, and let ranks agree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


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
    """Collective: return whether the flag is true on any rank."""
    if context.world_size == 1:
        return flag
    value = torch.tensor(int(flag), device=context.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def own_store(name: str) -> dist.Store:
    """Return the process group's store with the prefix `name`, over a separate connection, so that
    waiting blocks only its user.
    """
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return store.clone()
