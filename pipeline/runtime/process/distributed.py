"""Initialize the process group, device and rank from torchrun's environment."""

from __future__ import annotations

import atexit
import os
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeline.runtime.errors import ConfigError
from pipeline.runtime.process import watchdog
from pipeline.runtime.process.gpu_choice import check_cpu_is_meant, claim_gpu, gpu_of_rank, why_no_gpu
from pipeline.runtime.process.processes import ELASTIC_ROUND

STORE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class DistributedContext:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def init_distributed(
    backend: str = "auto", timeout_s: float = 300.0, compute_device: str = "auto"
) -> DistributedContext:
    """Collective: join the process group that torchrun describes, or one of a single rank without torchrun.

    nccl on GPUs, gloo elsewhere; `backend` overrides the choice. compute_device: hardware.compute_device, where cpu
    leaves a host's GPUs alone.

    Raises:
        ConfigError: nccl without a GPU, more ranks than GPUs, or a GPU host whose GPUs torch does not see.
    """
    environ = os.environ
    rank, world_size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
    local_rank = int(environ.get("LOCAL_RANK", 0))
    local_world_size = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    device = _choose_device(backend, compute_device, local_rank)
    use_cuda = device.type == "cuda"
    chosen = ("nccl" if use_cuda else "gloo") if backend == "auto" else backend
    if use_cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        store = _join(rank, world_size, timeout_s) if "MASTER_ADDR" in environ else dist.HashStore()
        if use_cuda and local_world_size > 1 and torch.cuda.device_count() == 1:
            store = store or next(dist.rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout_s)))[0]
            claim_gpu(store, local_rank)
        with watchdog.stage("joining"):  # init_process_group has been seen to wait for 303 s with a timeout of 60
            dist.init_process_group(
                chosen, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s), store=store,
                # NCCL guesses the GPU of a barrier without it, and connects at the first collective only.
                device_id=device if chosen == "nccl" else None,
            )  # fmt: skip
        atexit.register(_leave)
    return DistributedContext(rank, world_size, local_rank, local_world_size, device, chosen)


def _choose_device(backend: str, compute_device: str, local_rank: int) -> torch.device:
    """Raises ConfigError for nccl without a GPU, more ranks than GPUs, or a CPU that nobody has asked for."""
    if backend == "nccl" and compute_device == "cpu":
        raise ConfigError(
            "comms.backend=nccl needs GPUs and hardware.compute_device=cpu trains without; use comms.backend=auto"
        )
    if backend == "gloo" or compute_device == "cpu" or not torch.cuda.is_available():
        if backend == "nccl":
            raise ConfigError(
                f"comms.backend=nccl needs an NVIDIA GPU and torch sees none ({why_no_gpu()}); use comms.backend=gloo"
            )
        if backend != "gloo" and compute_device != "cpu":
            check_cpu_is_meant()
        return torch.device("cpu")
    return torch.device("cuda", gpu_of_rank(local_rank))


def true_on_any_rank(flag: bool, context: DistributedContext) -> bool:
    """Collective."""
    if context.world_size == 1:
        return flag
    value = torch.tensor(int(flag), device=context.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def describe_threads(context: DistributedContext) -> str:
    """How many ranks and threads share this host's cores, and what has decided so."""
    ranks, threads, cores = context.local_world_size, torch.get_num_threads(), len(os.sched_getaffinity(0))
    asked = os.environ.get("OMP_NUM_THREADS")
    why = f"OMP_NUM_THREADS={asked}" if asked else "torch's default, a thread a physical core"
    text = f"{ranks} rank(s) on this host x {threads} thread(s) ({why}) on {cores} core(s)"
    if ranks * threads > cores:
        return f"{text}: more threads than cores, set OMP_NUM_THREADS={max(1, cores // ranks)}"
    if context.device.type == "cpu" and cores // ranks > threads:
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


def own_store(name: str) -> dist.Store:
    """The process group's store below `name`, over a connection of its own: a thread that waits there holds up nobody else."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return store.clone()  # type: ignore[attr-defined, no-any-return]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
