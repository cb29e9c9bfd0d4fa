"""A rank of the pool for GPU tests: it does each task on its GPU, a shadow or a real one, or on the CPU."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

from tests.gpu import preloaded
from tests.support.forks import PASSED
from tests.support.ranks import serve

TIMEOUT_S = 120


def _do(
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    local_world_size: int,
    store: str,
    folder: str,
) -> None:
    """Answer (True, (what `function` returns, the shadow's report)) or (False, the traceback)."""
    os.chdir(folder)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank % local_world_size),
        LOCAL_WORLD_SIZE=str(local_world_size),
        MASTER_ADDR="localhost",
        MASTER_PORT="0",
        SHADOW_GPU_FOLDER=f"{store}-ranks",
    )
    on_cpu, *args = args
    try:
        if on_cpu:
            with patch("torch.cuda.is_available", lambda: False):  # a job that leaves the choice takes the CPU
                result = _in_group("gloo", rank, world_size, store, function, args), None
        elif preloaded.IS_REAL:
            result = _in_group("nccl", rank, world_size, store, function, args), None
        else:
            with preloaded.shadow.running(rank) as report:
                result = _in_group("nccl", rank, world_size, store, function, args), report
        pipe.send((True, result))
    except BaseException:  # the parent decides what to do with it
        pipe.send((False, traceback.format_exc()))


def _in_group(
    backend: str, rank: int, world_size: int, store: str, function: Callable[..., Any], args: list[Any]
) -> Any:
    import torch
    import torch.distributed as dist

    local_rank = int(os.environ["LOCAL_RANK"])
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    result = function(rank, *args)
    dist.barrier()
    return result


if __name__ == "__main__":
    serve(Connection(int(os.environ[PASSED])), _do)
