"""Turn a path into a run folder that one run at a time writes to."""

from __future__ import annotations

import fcntl
import os
from typing import IO

import torch.distributed as dist

from pipeline.distributed import DistributedContext

LOCK = ".lock"


def take_run_folder(path: str, context: DistributedContext) -> IO[str] | None:
    """Collective: make the folder and hold it for as long as the file that rank 0 gets back is open.

    Raises:
        ValueError: on every rank, when it cannot be written to, or another run holds it.
    """
    held, problem = None, ""
    if context.is_main:
        try:
            os.makedirs(path, exist_ok=True)
            held = open(os.path.join(path, LOCK), "a+")  # noqa: SIM115  # stays open
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.truncate(0)
            held.write(f"process {os.getpid()} on {os.uname().nodename}")
            held.flush()
        except BlockingIOError:
            assert held is not None
            held.seek(0)
            problem = f"another run writes to run_dir={path} ({held.read() or 'it does not say who'}); wait, or choose another"
        except OSError as error:
            problem = f"run_dir={path} cannot be written to ({error}); choose another"
    box = [problem]
    dist.broadcast_object_list(box, src=0)
    if box[0]:
        raise ValueError(box[0])
    return held
