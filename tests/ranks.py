"""One pool of gloo ranks for the whole test session: importing torchrec costs seconds, a spawn a test would too.

A test asks for the `ranks` fixture and calls `ranks.run(world_size, function, *args)`; `function(rank, *args)`
is a module-level function, runs on `world_size` processes inside a fresh gloo process group, and its return
values (picklable) come back in rank order. LOCAL_WORLD_SIZE is `local_world_size` (default: world_size).
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

TIMEOUT_S = 180


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    import torch.distributed as dist

    while (task := pipe.recv()) is not None:
        function, args, rank, world_size, local_world_size, store = task
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank % local_world_size),
            LOCAL_WORLD_SIZE=str(local_world_size), MASTER_ADDR="localhost", MASTER_PORT="0",
        )  # fmt: skip
        try:
            random.seed(0)
            torch.manual_seed(0)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT_S),
            )  # fmt: skip
            result = function(rank, *args)
            dist.barrier()
            pipe.send((True, result))
        except BaseException:  # the parent decides what to do with it
            pipe.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _forget_groups()


def _forget_groups() -> None:
    """TorchRec keeps for the life of a process what it agreed on, or made, within a process group."""
    if comm := sys.modules.get("torchrec.distributed.comm"):
        comm._INTRA_PG = comm._CROSS_PG = None  # type: ignore[attr-defined]
    if validation := sys.modules.get("torchrec.distributed.collective_utils"):
        validation._INITIALIZED = False  # type: ignore[attr-defined]  # 1.8; ranks that were not there would wait


class RankPool:
    """Processes start on first use and are reused; a failed run replaces them, for a rank may hang in a collective."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, local_world_size: int | None = None
    ) -> list[Any]:
        """Raises RuntimeError with the traceback of every rank that failed."""
        context = multiprocessing.get_context("spawn")
        while len(self._workers) < world_size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))
        with tempfile.TemporaryDirectory() as folder:
            workers = self._workers[:world_size]
            for rank, (_, pipe) in enumerate(workers):
                pipe.send((function, args, rank, world_size, local_world_size or world_size, f"{folder}/store"))
            results: dict[int, Any] = {}
            failures: dict[int, str] = {}
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
            while waiting:
                # Once a rank has failed, the others may wait for it in vain.
                answered = wait_for_any(list(waiting), 5 if failures else TIMEOUT_S + 20)
                if not answered:
                    failures |= dict.fromkeys(waiting.values(), "no answer: hangs, probably in a collective\n")
                    break
                for pipe in answered:
                    try:
                        passed, value = pipe.recv()
                    except EOFError:
                        passed, value = False, "the process died\n"
                    (results if passed else failures)[waiting.pop(pipe)] = value
        if failures:
            self.close()
            raise RuntimeError("".join(f"--- rank {rank}\n{text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers.clear()
