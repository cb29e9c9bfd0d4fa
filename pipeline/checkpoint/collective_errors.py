"""Share results and failures across ranks.

An error of one rank is raised on every rank, so that no rank waits for the failed rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pipeline.runtime.errors import CheckpointError, DamagedError
from pipeline.runtime.process.distributed import DistributedContext

# Long, because a slow disk is not a dead rank. The connection of a dead rank breaks, which is
# detected at once.
GROUP_TIMEOUT = timedelta(hours=2)

Value = TypeVar("Value")


# the default group at the time, and the shared group
_shared: tuple[Any, dist.ProcessGroup] | None = None


class Ranks:
    """Collectives over a gloo group that is separate from training's, because saves wait for disks.

    A group has its own threads and connections, so all checkpoints of a process share one.
    `own_group` makes a separate group for saves in a thread, because their collectives run at the
    same time as other collectives; close() destroys that group.
    """

    def __init__(self, context: DistributedContext, own_group: bool = False) -> None:
        """Create or reuse the group. Collective."""
        self.context, self._owns_group = context, own_group
        self.group: dist.ProcessGroup = _new_group() if own_group else _shared_group()

    def close(self) -> None:
        """Destroy the group, unless it is shared."""
        if self._owns_group:
            self._owns_group = False
            dist.destroy_process_group(self.group)

    def from_main(self, compute: Callable[[], Value]) -> Value:
        """Return on every rank the value that rank 0 computes. If rank 0 raises an error, every
        rank raises the same error.
        """
        box: list[Any] = [None, None]
        if self.context.is_main:
            try:
                box[0] = compute()
            except (OSError, ValueError) as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0, group=self.group)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def gather(self, value: Value) -> list[Value]:
        gathered: list[Any] = [None] * self.context.world_size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def gather_to_main(self, value: Value) -> list[Value] | None:
        gathered: list[Any] | None = [None] * self.context.world_size if self.context.is_main else None
        dist.gather_object(value, gathered, dst=0, group=self.group)
        return gathered

    def read(self, read: Callable[[], Value], is_local: bool) -> Value:
        """Return what `read` returns on this rank. If it fails on any rank, every rank raises the
        same error.

        Raises:
            DamagedError: a file is damaged.
            CheckpointError: the storage does not answer, so the step may be intact.
        """
        value: Value | None = None
        problem: CheckpointError | None = None
        try:
            value = read()
        except CheckpointError as error:
            problem = error
        except pickle.UnpicklingError as error:
            problem = DamagedError(str(error))
        except (KeyError, TypeError, IndexError) as error:
            problem = DamagedError(f"its manifest lacks something: {repr(error)[:200]}")
        except OSError as error:
            problem = DamagedError(str(error)) if is_local else CheckpointError(f"the storage does not answer: {error}")
        for found in self.gather(problem):
            if found is not None:
                raise found
        return value  # type: ignore[return-value]

    def barrier(self) -> None:
        dist.barrier(group=self.group)


def _new_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def _shared_group() -> dist.ProcessGroup:
    """Create the shared group on first use. Collective, after each process has joined the default
    group.
    """
    global _shared
    if _shared is None or _shared[0] is not dist.group.WORLD:
        _shared = (dist.group.WORLD, _new_group())
    return _shared[1]
