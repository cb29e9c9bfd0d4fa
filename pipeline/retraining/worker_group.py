"""Turn the ranks of a tick into one that decides and others that help it to train and to score.

Rank 0 finds windows, prepares data and promotes; what is collective it runs together with the others. A tick on one rank
is the same without the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from pipeline.runtime.process import watchdog

Result = TypeVar("Result")
PATIENCE = timedelta(days=30)  # of ranks that wait for rank 0 to prepare data


class Crew:
    """`run` on rank 0 and `follow` on the others, until rank 0 calls `end`."""

    def __init__(self, world_size: int, backend: str, timeout_s: float) -> None:
        self.rank, self.world_size = int(os.environ.get("RANK", 0)), world_size
        self._group: Any = None
        self._is_over = False
        if world_size > 1:
            import torch.distributed as dist

            from pipeline.runtime.process.distributed import init_distributed

            init_distributed(backend, timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def run(self, task: Callable[..., Result], *args: Any) -> Result:
        """Collective by way of the others' follow(): `task` is a function of a module, its arguments picklable."""
        self._tell((task, args))
        with watchdog.stage("starting"):
            return task(*args)

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            with suppress(
                RuntimeError
            ):  # others have ended themselves: SIGTERM has reached all ranks, or one tells why
                self._tell(None)

    def follow(self) -> None:
        """Raises what the tasks raise, but for a loss that is not finite, of which rank 0 makes a rejection."""
        from pipeline.training.agreement import NonFiniteLossError

        with watchdog.unwatched("waiting for rank 0"):
            while (told := self._hear()) is not None:
                task, args = told
                with watchdog.stage("starting"):
                    try:
                        task(*args)
                    except NonFiniteLossError:
                        continue

    def _tell(self, message: Any) -> None:
        if self.world_size > 1:
            import torch.distributed as dist

            dist.broadcast_object_list([message], src=0, group=self._group)

    def _hear(self) -> Any:
        import torch.distributed as dist

        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]
