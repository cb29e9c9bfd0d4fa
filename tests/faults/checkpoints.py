"""What the faults of checkpoints have in common: a folder of steps, what each step holds, and what is loaded from it."""

from __future__ import annotations

import logging
from typing import Any

from pipeline.checkpoint.changes import CHECKPOINT
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.extras.differential.links import Differential
from pipeline.extras.differential.tracked_rows import TrackedRows
from pipeline.runtime.errors import CheckpointError
from tests.support.sharded_models import build_sharded, digest, draw_batches, train_steps

MIXED = {"a": "table_wise", "b": "row_wise", "c": "data_parallel", "d": "table_wise"}


def differential(model: Any, optimizer: Any, links: int, is_packed: bool = False) -> Differential:
    """As checkpoint.differential=true, but for links of any size: these models are too small for half of their base."""
    return Differential(TrackedRows(model, optimizer.replicated, [CHECKPOINT]), links, 1e9, is_packed)


def save_steps(
    rank: int, folder: str, steps: list[int], options: dict[str, Any] | None = None, links: int = 0
) -> dict[int, str]:
    """Train to each of `steps`, save it, with `links` of a chain after each whole step; the digest of every one (on rank 0)."""
    _, model, optimizer, context = build_sharded(MIXED)
    given = {"keep_last_n": 99, **(options or {})}
    is_packed = given.pop("is_packed", False)
    if links:
        given["differential"] = differential(model, optimizer, links, is_packed)
    checkpointer = Checkpointer(folder, model, optimizer, context, **given)
    digests, done = {}, 0
    for step in steps:
        train_steps(model, optimizer, draw_batches(rank, context.world_size, step - done, start=done))
        done = step
        checkpointer.save(step)
        digests[step] = digest(model)
    checkpointer.wait()
    return digests


class Loader:
    """One model into which many damaged folders are loaded, as a restarted run would."""

    def __init__(self) -> None:
        _, self.model, self.optimizer, self.context = build_sharded(MIXED, seed=99)

    def load(self, folder: str) -> tuple[int, str]:
        """(step, digest), or (-1, why not)."""
        logging.disable(logging.WARNING)
        try:
            manifest = Checkpointer(folder, self.model, self.optimizer, self.context).restore_latest()
        except CheckpointError as error:
            return -1, str(error)
        finally:
            logging.disable(logging.NOTSET)
        return (manifest["step"], digest(self.model)) if manifest else (-1, "no step")


def load_once(rank: int, folder: str) -> tuple[int, str]:
    return Loader().load(folder)
