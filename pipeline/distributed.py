"""Turn torchrun's environment into a process group, a device and a rank."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta

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


def init_distributed(backend: str = "auto", timeout_s: float = 300.0) -> DistributedContext:
    """Collective: join the process group that torchrun describes, or one of a single rank without torchrun.

    nccl on GPUs, gloo elsewhere; `backend` overrides the choice.
    """
    environ = os.environ
    rank, world_size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
    local_rank = int(environ.get("LOCAL_RANK", 0))
    use_cuda = backend != "gloo" and torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    chosen = ("nccl" if use_cuda else "gloo") if backend == "auto" else backend
    if chosen == "nccl" and not use_cuda:
        raise ValueError("comms.backend=nccl needs an NVIDIA GPU and torch sees none; use comms.backend=gloo")
    if use_cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        store = None if "MASTER_ADDR" in environ else dist.HashStore()
        dist.init_process_group(
            chosen, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s), store=store
        )
        atexit.register(_leave)
    return DistributedContext(
        rank, world_size, local_rank, int(environ.get("LOCAL_WORLD_SIZE", world_size)), device, chosen
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
