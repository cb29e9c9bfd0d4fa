"""Run the collective parts of a retraining on all ranks, led by rank 0.

Rank 0 finds windows, prepares data and promotes. It runs collective functions together with the
other ranks. With one rank there are no other ranks to lead.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from pipeline.runtime.process import watchdog

Result = TypeVar("Result")
PATIENCE = timedelta(days=30)  # ranks wait this long for rank 0 to prepare data


class WorkerGroup:
    """Call `run` on rank 0 and `follow` on the other ranks, until rank 0 calls `end`."""

    def __init__(self, world_size: int, backend: str, timeout_s: float, compute_device: str = "auto") -> None:
        self.rank, self.world_size = int(os.environ.get("RANK", 0)), world_size
        self._gloo: Any = None
        self._is_over = False
        if world_size > 1:
            import torch.distributed as dist

            from pipeline.devices.process_group import init_distributed

            init_distributed(backend, timeout_s, compute_device)
            self._gloo = dist.new_group(backend="gloo", timeout=PATIENCE)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def run(self, task: Callable[..., Result], *args: Any) -> Result:
        """Collective, together with follow() on the other ranks.

        `task` is a function of a module with picklable arguments.
        """
        self._send((task, args))
        with watchdog.stage("starting"):
            return task(*args)

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            # the other ranks have ended: SIGTERM reached all ranks, or a rank has reported an error
            with suppress(RuntimeError):
                self._send(None)

    def follow(self) -> None:
        """Run rank 0's tasks.

        Raises what they raise, except for a loss that is not finite, which rank 0 turns into a
        rejection.
        """
        from pipeline.training.step_sync import NonFiniteLossError

        with watchdog.unwatched("waiting for rank 0"):
            while (command := self._receive()) is not None:
                task, args = command
                with watchdog.stage("starting"):
                    try:
                        task(*args)
                    except NonFiniteLossError:
                        continue

    def _send(self, message: Any) -> None:
        if self.world_size > 1:
            import torch.distributed as dist

            dist.broadcast_object_list([message], src=0, group=self._gloo)

    def _receive(self) -> Any:
        import torch.distributed as dist

        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=self._gloo)
        return box[0]
