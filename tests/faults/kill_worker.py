"""A rank that saves steps 1 and 2 and is killed in the middle of step 3, where `phase` says:

python -m tests.faults.kill_worker RANK FOLDER STORE VICTIM PHASE ASYNCHRONOUS LINKS

LINKS: how many steps of a chain follow on a whole one; 0: every step is whole.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

from pipeline.checkpoint import shards, step_writer
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.collective_errors import Ranks
from pipeline.runtime.storage import atomic, storage
from pipeline.runtime.storage.checksums import ChecksummedWriter
from tests.faults.checkpoints import MIXED, differential
from tests.support.sharded_models import build_sharded, draw_batches, train_steps

# Phase: whose function, its name, and before or after which of its calls. Those of rank 0 alone come last.
PHASES: dict[str, tuple[Any, str, str, int]] = {
    "before the plan": (shards.ShardPlanner, "plan", "before", 1),
    "before the files": (step_writer, "write_shards", "before", 1),
    "in the first file": (ChecksummedWriter, "write", "after", 5),
    "later in the first file": (ChecksummedWriter, "write", "after", 60),
    "before the files are durable": (ChecksummedWriter, "close", "before", 1),
    "after the shards": (step_writer, "write_shards", "after", 1),
    "before the folder is durable": (atomic.LocalFolders, "deliver", "before", 1),
    "after they are read back": (Ranks, "gather_to_main", "before", 1),
    "after the reports": (Ranks, "gather_to_main", "after", 1),
    "before the verdict": (Ranks, "from_main", "before", 3),
    "after the verdict": (Ranks, "from_main", "after", 3),
    "in the purge": (step_writer.StepWriter, "_purge", "before", 1),
    "after the purge": (step_writer.StepWriter, "_purge", "after", 1),
}
PHASES_OF_RANK_0: dict[str, tuple[Any, str, str, int]] = {
    "before .metadata": (step_writer, "write_metadata", "before", 1),
    "after .metadata": (step_writer, "write_metadata", "after", 1),
    "before the manifest": (storage, "publish_text", "before", 1),
    "after the manifest": (storage, "publish_text", "after", 1),
    "before the rename": (atomic.os.path, "lexists", "after", 1),
    "before the parent is durable": (storage, "sync_folder", "before", 5),
    "after the commit": (atomic.LocalFolders, "commit", "after", 1),
    "while a step is removed": (atomic.shutil, "rmtree", "before", 1),
}


def arm(owner: Any, name: str, when: str, call: int) -> None:
    """SIGKILL this process before or after the `call`-th call from now on."""
    function, calls = getattr(owner, name), [0]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def run(rank: int, folder: str, store: str, victim: int, phase: str, asynchronous: bool, links: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    _, model, optimizer, context = build_sharded(MIXED)
    changes = differential(model, optimizer, links) if links else None
    checkpointer = Checkpointer(
        folder, model, optimizer, context, keep_last_n=2, asynchronous=asynchronous, differential=changes
    )
    for step in (1, 2, 3):
        train_steps(model, optimizer, draw_batches(rank, 2, 1, start=step - 1))
        if step == 3 and rank == victim:
            checkpointer.wait()
            arm(*{**PHASES, **PHASES_OF_RANK_0}[phase])
        checkpointer.save(step)
    checkpointer.wait()


if __name__ == "__main__":
    rank, folder, store, victim, phase, asynchronous, links = sys.argv[1:]
    run(int(rank), folder, store, int(victim), phase, bool(int(asynchronous)), int(links))
