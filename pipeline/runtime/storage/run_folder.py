"""Lease a run folder for all ranks of one run. Not in lease.py, which loads no torch."""

from __future__ import annotations

import atexit

import torch.distributed as dist

from pipeline.runtime.errors import StorageError
from pipeline.runtime.process import preemption
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.runtime.storage.lease import Lease, RunFolderHeldError, take_lease


def take_run_folder(path: str, context: DistributedContext, ttl_s: float = 120.0) -> Lease | None:
    """Collective: make the folder and hold it until rank 0, which gets the lease, releases it or ends.

    A run that loses its lease is asked to stop, as by SIGTERM; its fence keeps it from committing.

    Raises:
        StorageError: on every rank, when it cannot be written to, or another run holds it.
    """
    lease, problem = None, ""
    if context.is_main:
        try:
            lease = take_lease(path, ttl_s, when_lost=preemption.request)
            atexit.register(lease.release)
        except RunFolderHeldError as error:
            problem = str(error)
        except OSError as error:
            problem = f"run_dir={path} cannot be written to ({error}); choose another"
    box = [problem]
    dist.broadcast_object_list(box, src=0)
    if box[0]:
        raise StorageError(box[0])
    return lease
