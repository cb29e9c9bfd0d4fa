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
_times_joined = 0


def init_distributed(
    backend: str = "auto", timeout_s: float = 300.0, compute_device: str = "auto", fast_cpu: bool = True
) -> DistributedContext:
    """Collective: choose the device, and join torchrun's group, or make a group of one rank.

    compute_device: the value of hardware.compute_device; "cpu" ignores accelerators.
    fast_cpu=False: without this package's CPU kernels. Raises ConfigError if the host has no device
    for a rank or backend.
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
        # init_process_group was seen to wait for 303 s with a timeout of 60
        with watchdog.stage("joining"):
            dist.init_process_group(
                chosen, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s), store=store,
                # Without it, NCCL guesses the GPU of a barrier, and connects late.
                device_id=device.torch_device if device.has_own_memory and chosen == device.backend else None,
            )  # fmt: skip
        atexit.register(leave)
    return DistributedContext(rank, world_size, local_rank, local_world_size, device.torch_device, chosen)


def init_for(job: TrainJob) -> DistributedContext:
    """Collective: call init_distributed with the settings of the job."""
    comms = job.comms
    return init_distributed(comms.backend, comms.timeout_s, job.hardware.compute_device, job.sharding.fast_cpu)


def _choose_device(backend: str, compute_device: str, local_rank: int, fast_cpu: bool) -> Device:
    """Return the first accelerator of this host with this backend, otherwise the CPU.

    Raises ConfigError if this host has no device for the backend, has too few, or torch does not
    see it.
    """
    host = devices.named("cpu", local_rank, plain=not fast_cpu)
    for name, kind in devices.kinds().items():
        if not kind.has_own_memory or backend not in ("auto", kind.backend):
            continue
        if compute_device == "cpu":
            if backend != "auto":
                raise ConfigError(
                    f"comms.backend={backend} needs GPUs, but hardware.compute_device=cpu uses "
                    "none; "
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
    """Return one line that says how ranks and threads share this host's cores, and why."""
    ranks, threads, cores = context.local_world_size, torch.get_num_threads(), len(os.sched_getaffinity(0))
    asked = os.environ.get("OMP_NUM_THREADS")
    why = f"OMP_NUM_THREADS={asked}" if asked else "torch's default: one thread per physical core"
    text = f"{ranks} rank(s) on this host x {threads} thread(s) ({why}) on {cores} core(s)"
    if ranks * threads > cores:
        return f"{text}: more threads than cores, set OMP_NUM_THREADS={max(1, cores // ranks)}"
    if not devices.current().has_own_memory and cores // ranks > threads:
        return f"{text}: OMP_NUM_THREADS={cores // ranks} would use them all"
    return text


def _join(rank: int, world_size: int, timeout_s: float) -> dist.Store | None:
    """Return the agent's store after all ranks have joined; None without an agent.

    The c10d agent keeps its store, and torch 2.13 no longer adds a prefix for each attempt. So a
    restarted rank might connect to the address of the dead rank. Raises TimeoutError if a rank is
    missing.
    """
    global _times_joined
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    # Nodes that leave and rejoin have separate restart counts. The round is the same for all nodes.
    attempt = os.environ.get(ELASTIC_ROUND) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    watchdog.watch_others(lambda: _connect(STORE_TIMEOUT_S), world_size, attempt)
    # A process that has left a group may join again: the keys of the former group are still there.
    _times_joined += 1
    store = dist.PrefixStore(f"attempt_{attempt}.{_times_joined}", _connect(timeout_s))
    started = time.monotonic()
    with watchdog.stage("joining"):
        store.set(f"here/{rank}", "1")
        while not store.check([f"here/{other}" for other in range(world_size)]):
            if time.monotonic() - started > timeout_s and not watchdog.is_running():
                missing = [other for other in range(world_size) if not store.check([f"here/{other}"])]
                raise TimeoutError(f"rank(s) {missing} of {world_size} did not join within {timeout_s:g} s")
            time.sleep(0.05)
    return store


def _connect(timeout_s: float) -> dist.TCPStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def leave() -> None:
    """Leave the process group. The process may join a new group afterwards."""
    atexit.unregister(leave)
    if dist.is_initialized():
        dist.destroy_process_group()
