"""One pool of gloo ranks for the whole test session, forked from a process that has imported what they need.

A test asks for the `ranks` fixture and calls `ranks.run(world_size, function, *args)`; `function(rank, *args)`
is a module-level function, runs on `world_size` processes inside a fresh gloo process group, and its return
values (picklable) come back in rank order. LOCAL_WORLD_SIZE is `local_world_size` (default: world_size).
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from multiprocessing.connection import wait as wait_for_any
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from tests.support.forks import ENVIRONMENT, PASSED, WarmCommand
from tests.support.process_state import own_process_state

TIMEOUT_S = 900  # compilers and four ranks on a busy machine too


def serve(pipe: Connection, do: Callable[..., None]) -> None:
    """Do tasks until the pool sends none; `do` answers each."""
    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        with own_process_state():
            do(pipe, *task)


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
    """Answer (True, what `function` returns) or (False, the traceback)."""
    import torch.distributed as dist

    os.chdir(folder)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank % local_world_size),
        LOCAL_WORLD_SIZE=str(local_world_size),
        MASTER_ADDR="localhost",
        MASTER_PORT="0",
    )
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        result = function(rank, *args)
        dist.barrier()
        pipe.send((True, result))
    except BaseException:  # the parent decides what to do with it
        pipe.send((False, traceback.format_exc()))


class RankPool:
    """Processes start on first use and are reused; where one gave no answer, it may hang in a collective: all are replaced."""

    pids: ClassVar[set[int]] = set()  # of all ranks of this process, those of before too

    def __init__(self, module: str = "tests.support.ranks") -> None:
        self._module = module  # what a rank runs: it calls serve()
        self._workers: list[tuple[WarmCommand, Connection]] = []
        # Of the stores that ranks meet by. It is there as long as the ranks are: a group that the garbage collector ends
        # late opens its store's file once more, and ends the process if the folder is gone.
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_tasks = 0

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, local_world_size: int | None = None
    ) -> list[Any]:
        """Raises RuntimeError with the traceback of every rank that failed."""
        while len(self._workers) < world_size:
            ours, theirs = Pipe()
            with theirs, patch.dict(os.environ, ENVIRONMENT, clear=True):
                process = WarmCommand(self._module, output=(1, 2), passed=theirs.fileno())
            self._workers.append((process, ours))
            self.pids.add(process.pid)
        self._folder = self._folder or tempfile.TemporaryDirectory()
        self._num_tasks += 1
        store = f"{self._folder.name}/store{self._num_tasks}"
        workers = self._workers[:world_size]
        for rank, (_, pipe) in enumerate(workers):
            sizes = rank, world_size, local_world_size or world_size
            pipe.send((function, args, *sizes, store, os.getcwd()))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        lost = False
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
        while waiting:
            # Once a rank has failed, the others may wait for it in vain.
            answered = wait_for_any(list(waiting), 5 if failures else TIMEOUT_S + 20)
            if not answered:
                failures |= dict.fromkeys(waiting.values(), "no answer: hangs, probably in a collective\n")
                lost = True
                break
            for pipe in answered:
                try:
                    passed, value = pipe.recv()
                except (EOFError, ConnectionError):
                    passed, value, lost = False, "the process died\n", True
                (results if passed else failures)[waiting.pop(pipe)] = value
        if lost:
            self.close()
        if failures:
            raise RuntimeError("".join(f"--- rank {rank}\n{text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            process.wait()
            pipe.close()
        self._workers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


if __name__ == "__main__":
    serve(Connection(int(os.environ[PASSED])), _do)
