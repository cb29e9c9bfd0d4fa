"""Turn what each rank found into one answer on all: a failure of one is raised on every rank, so none waits for it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pipeline.runtime.errors import CheckpointError, DamagedError
from pipeline.runtime.process.distributed import DistributedContext

# A slow disk is no dead rank: that one's connection breaks, and is seen at once.
GROUP_TIMEOUT = timedelta(hours=2)

Value = TypeVar("Value")


class Ranks:
    """Collectives over a gloo group of their own: saves go on beside training's collectives and wait for disks."""

    def __init__(self, context: DistributedContext) -> None:
        """Collective."""
        self.context = context
        self.group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)

    def from_main(self, compute: Callable[[], Value]) -> Value:
        """What rank 0 computes, on every rank. Raises there and here what it raises."""
        box: list[Any] = [None, None]
        if self.context.is_main:
            try:
                box[0] = compute()
            except (OSError, ValueError) as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0, group=self.group)
        if box[1] is not None:
            raise box[1]
        return box[0]  # type: ignore[no-any-return]

    def gather(self, value: Value) -> list[Value]:
        gathered: list[Any] = [None] * self.context.world_size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def gather_to_main(self, value: Value) -> list[Value] | None:
        gathered: list[Any] | None = [None] * self.context.world_size if self.context.is_main else None
        dist.gather_object(value, gathered, dst=0, group=self.group)
        return gathered

    def read(self, read: Callable[[], Value], is_local: bool) -> Value:
        """What `read` returns on this rank; where it fails on any, the same error on all.

        Raises:
            DamagedError: a file is not what it should be.
            CheckpointError: the storage does not answer, which says nothing of the step.
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
            problem = DamagedError(f"its manifest lacks something: {error!r}")
        except OSError as error:
            problem = DamagedError(str(error)) if is_local else CheckpointError(f"the storage does not answer: {error}")
        for found in self.gather(problem):
            if found is not None:
                raise found
        return value  # type: ignore[return-value]

    def barrier(self) -> None:
        dist.barrier(group=self.group)
