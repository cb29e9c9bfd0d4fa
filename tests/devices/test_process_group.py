"""The device of a rank, and what is said of ranks and threads."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pipeline.devices import cuda
from pipeline.devices.cuda import Cuda
from pipeline.devices.process_group import _choose_device, describe_threads, init_distributed
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.process.distributed import DistributedContext
from tests.support.messages import mentions
from tests.support.ranks import RankPool


@pytest.mark.parametrize(
    ("ranks", "threads", "asked", "said"),
    [
        (2, 1, "1", "2 rank(s) on this host x 1 thread(s) (OMP_NUM_THREADS=1) on 2 core(s)"),
        (1, 2, None, "1 rank(s) on this host x 2 thread(s) (torch's default: one thread per physical core) on 2 core(s)"),
        (2, 2, "2", "2 rank(s) on this host x 2 thread(s) (OMP_NUM_THREADS=2) on 2 core(s): more threads than cores, set OMP_NUM_THREADS=1"),
        (1, 1, "1", "1 rank(s) on this host x 1 thread(s) (OMP_NUM_THREADS=1) on 2 core(s): OMP_NUM_THREADS=2 would use them all"),
    ],
)  # fmt: skip
def test_the_log_says_how_cores_are_shared_and_why(
    monkeypatch: pytest.MonkeyPatch, ranks: int, threads: int, asked: str | None, said: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert describe_threads(DistributedContext(0, ranks, 0, ranks, torch.device("cpu"), "gloo")) == said


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sees two GPUs here, as far as choosing one goes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_more_ranks_than_gpus_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert Cuda.index_of(1) == 1
    with pytest.raises(ConfigError) as error:
        Cuda.index_of(2)
    assert mentions(str(error.value), "LOCAL_RANK=2 3 2 CUDA_VISIBLE_DEVICES=4,5 hardware=cpu")


def test_a_task_that_sees_one_gpu_uses_it_unless_another_rank_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=next(gpus)))
    store, gpus = dist.HashStore(), iter(["GPU-a", "GPU-b", "GPU-b"])
    for local_rank in range(2):
        assert Cuda.index_of(local_rank) == 0
        Cuda().claim(store, local_rank)
    with pytest.raises(ConfigError) as error:
        Cuda().claim(store, 2)
    assert mentions(str(error.value), "LOCAL_RANK=2 --gpus-per-task=1")


@pytest.fixture
def unseen_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The host has a GPU whose driver is too old for torch."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(cuda, "GPU_FILE", tmp_path / "nvidia0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nPlease update")

    monkeypatch.setattr(torch.cuda, "init", init)


@pytest.mark.usefixtures("unseen_gpu")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_that_torch_does_not_see_stops_the_job_with_torchs_reason(device: str) -> None:
    with pytest.raises(ConfigError) as error:
        _choose_device("auto", device, 0, fast_cpu=True)
    assert mentions(str(error.value), "nvidia0 driver too old 12040 hardware=cpu comms.backend=gloo pipeline doctor")


@pytest.mark.usefixtures("unseen_gpu")
@pytest.mark.parametrize(
    ("backend", "device", "visible"), [("gloo", "auto", "0"), ("auto", "cpu", "0"), ("auto", "auto", "")]
)
def test_whoever_asks_for_the_cpu_of_a_gpu_host_gets_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    chosen = _choose_device(backend, device, 0, fast_cpu=True)
    assert chosen.torch_device == torch.device("cpu")


def test_torch_says_why_it_sees_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    assert Cuda.why_absent() not in ("", "torch gives no reason")


def test_hardware_cpu_alone_trains_on_the_cpu_of_a_gpu_host(ranks: RankPool) -> None:
    (device, backend, refused), *_ = ranks.run(1, devices_beside_gpus)
    assert (device, backend) == ("cpu", "gloo") and mentions(refused, "comms.backend=nccl comms.backend=auto")


def devices_beside_gpus(rank: int) -> tuple[str, str, str]:
    with patch.object(torch.cuda, "is_available", lambda: True), patch.object(torch.cuda, "device_count", lambda: 1):
        context = init_distributed(compute_device="cpu")
        with pytest.raises(ConfigError) as error:
            init_distributed("nccl", compute_device="cpu")
    return context.device.type, context.backend, str(error.value)
