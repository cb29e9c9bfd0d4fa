"""Choose this rank's device, and join the process group that torchrun's environment describes."""

from __future__ import annotations

import atexit
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pipeline import devices
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.process import watchdog
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.runtime.process.processes import ELASTIC_ROUND

if TYPE_CHECKING:
    from pipeline.config.jobs.train import TrainJob
    from pipeline.devices.base import Device

STORE_TIMEOUT_S = 10.0


def init_distributed(
    backend: str = "auto", timeout_s: float = 300.0, compute_device: str = "auto", fast_cpu: bool = True
) -> DistributedContext:
    """Collective: join the process group that torchrun describes, or one of a single rank without torchrun.

    Chooses the device of this process, which devices.current() answers with from then on.
    compute_device: hardware.compute_device, where cpu leaves a host's accelerators alone.
    fast_cpu=False: CPU ranks do without this package's kernels.

    Raises:
        ConfigError: the backend is of a device that is not here, or a host has more ranks than devices.
    """
    environ = os.environ
    rank, world_size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
    local_rank = int(environ.get("LOCAL_RANK", 0))
    local_world_size = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    device = _choose_device(backend, compute_device, local_rank, fast_cpu)
    chosen = device.backend if backend == "auto" else backend
    device.start()
    devices.use(device)
    if not dist.is_initialized():
        store = _join(rank, world_size, timeout_s) if "MASTER_ADDR" in environ else dist.HashStore()
        if device.needs_claim(local_world_size):
            store = store or next(dist.rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout_s)))[0]
            device.claim(store, local_rank)
        with watchdog.stage("joining"):  # init_process_group has been seen to wait for 303 s with a timeout of 60
            dist.init_process_group(
                chosen, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s), store=store,
                # NCCL guesses the GPU of a barrier without it, and connects at the first collective only.
                device_id=device.torch_device if device.has_own_memory and chosen == device.backend else None,
            )  # fmt: skip
        atexit.register(_leave)
    return DistributedContext(rank, world_size, local_rank, local_world_size, device.torch_device, chosen)


def init_for(job: TrainJob) -> DistributedContext:
    """Collective: init_distributed, as the job says."""
    comms = job.comms
    return init_distributed(comms.backend, comms.timeout_s, job.hardware.compute_device, job.sharding.fast_cpu)


def _choose_device(backend: str, compute_device: str, local_rank: int, fast_cpu: bool) -> Device:
    """The first accelerator that is here and has this backend, else the CPU.

    Raises:
        ConfigError: the backend is of a device that is not here, or a host has more ranks than
            devices, or the host's device is one that torch does not see.
    """
    host = devices.named("cpu", local_rank, plain=not fast_cpu)
    for name, kind in devices.kinds().items():
        if not kind.has_own_memory or backend not in ("auto", kind.backend):
            continue
        if compute_device == "cpu":
            if backend != "auto":
                raise ConfigError(
                    f"comms.backend={backend} needs GPUs and hardware.compute_device=cpu trains without; "
                    "use comms.backend=auto"
                )
        elif kind.is_available():
            return devices.named(name, kind.index_of(local_rank))
        elif backend != "auto":
            raise ConfigError(f"{kind.not_here} ({kind.why_absent()}); use comms.backend=gloo")
        else:
            kind.check_absence()
    return host


def describe_threads(context: DistributedContext) -> str:
    """How many ranks and threads share this host's cores, and what has decided so."""
    ranks, threads, cores = context.local_world_size, torch.get_num_threads(), len(os.sched_getaffinity(0))
    asked = os.environ.get("OMP_NUM_THREADS")
    why = f"OMP_NUM_THREADS={asked}" if asked else "torch's default, a thread a physical core"
    text = f"{ranks} rank(s) on this host x {threads} thread(s) ({why}) on {cores} core(s)"
    if ranks * threads > cores:
        return f"{text}: more threads than cores, set OMP_NUM_THREADS={max(1, cores // ranks)}"
    if not devices.current().has_own_memory and cores // ranks > threads:
        return f"{text}: OMP_NUM_THREADS={cores // ranks} would use them all"
    return text


def _join(rank: int, world_size: int, timeout_s: float) -> dist.Store | None:
    """The agent's store once all ranks have come, None without an agent: rank 0 then makes one.

    torch 2.13 takes the agent for one that makes a new store for each restart and drops the prefix that told the
    attempts apart; the c10d agent keeps its store, so a restarted rank may connect to the dead rank's address.

    Raises:
        TimeoutError: a rank has not come, and no watchdog runs to say so.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    # Nodes that come and go have counts of their own; their rounds are the same for all.
    attempt = os.environ.get(ELASTIC_ROUND) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    watchdog.watch_others(lambda: _connect(STORE_TIMEOUT_S), world_size, attempt)
    store = dist.PrefixStore(f"attempt_{attempt}", _connect(timeout_s))
    started = time.monotonic()
    with watchdog.stage("joining"):
        store.set(f"here/{rank}", "1")
        while not store.check([f"here/{other}" for other in range(world_size)]):
            if time.monotonic() - started > timeout_s and not watchdog.is_running():
                missing = [other for other in range(world_size) if not store.check([f"here/{other}"])]
                raise TimeoutError(f"rank(s) {missing} of {world_size} have not come within {timeout_s:g} s")
            time.sleep(0.05)
    return store


def _connect(timeout_s: float) -> dist.TCPStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
