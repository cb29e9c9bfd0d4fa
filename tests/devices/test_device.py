"""A device decides what its kind needs, and a switch of the CPU changes nothing on other devices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline import devices
from pipeline.cli.verb import Verb
from pipeline.config.registry import load_plugins
from pipeline.config.tables import TableConfig
from pipeline.devices.base import Device
from pipeline.devices.cpu import process
from pipeline.devices.cpu.products import is_for_onednn
from pipeline.embeddings.tables import resolve_tables
from pipeline.models.build import build_model
from pipeline.models.linear import LogisticRegressionConfig
from pipeline.models.tasks.task import TaskModel
from tests.support.datasets import described_dataset


class Accelerator(Device):
    """Records what it is asked, for no accelerator is here."""

    device_type = "cuda"
    backend = "nccl"

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        self.asked.append(f"autocast {dtype}")
        return nullcontext()

    def fork_rng(self) -> AbstractContextManager[None]:
        self.asked.append("fork_rng")
        return nullcontext()


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with devices.using(Accelerator()) as device:
        assert isinstance(device, Accelerator)
        yield device


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))  # in host memory, as the first of a model may be

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        return dense_features * self.weight


class Loss(nn.Module):
    def forward(self, outputs: torch.Tensor, batch: object) -> tuple[torch.Tensor, torch.Tensor]:
        return outputs.sum(), outputs


def test_bf16_is_the_devices_even_if_the_first_weight_is_in_host_memory(accelerator: Accelerator) -> None:
    batch: Any = type("Batch", (), {"dense_features": torch.ones(2), "sparse_features": torch.ones(2)})
    TaskModel(Layers(), Loss(), precision="bf16")(batch)
    assert accelerator.asked == ["autocast torch.bfloat16"]


def test_building_a_model_keeps_the_generators_of_the_device(accelerator: Accelerator) -> None:
    """torch.manual_seed seeds those of all devices."""
    tables = resolve_tables({"default": TableConfig(embedding_dim=8)}, described_dataset({"user": 100}))
    build_model(LogisticRegressionConfig(), tables, num_dense_features=2)
    assert accelerator.asked == ["fork_rng"]


def test_onednn_multiplies_tensors_of_the_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.devices.cpu.products.onednn_multiplies_faster", lambda: True)
    on_host, elsewhere = (torch.empty(2048, 1024, device=name) for name in ("cpu", "meta"))
    assert is_for_onednn(on_host, on_host, 1024)
    assert not is_for_onednn(elsewhere, elsewhere, 1024)


def test_fast_cpu_changes_nothing_on_a_gpu() -> None:
    assert type(devices.named("cuda")) is type(devices.named("cuda", plain=True))
    fast, plain = devices.named("cpu"), devices.named("cpu", plain=True)
    assert (fast.has_kernels, plain.has_kernels, devices.named("cuda").has_kernels) == (True, False, False)


def test_a_device_of_a_plugin_is_plain_torchrec() -> None:
    load_plugins(["tests.plugins.sample_plugin"])
    device = devices.named("sample_accelerator")
    assert device.pipeline("auto", 1) == "sparse_dist" and device.fbgemm_is_complete and not device.has_kernels
    assert not device.is_available() and device.torch_device == torch.device("xpu", 0)


@pytest.mark.parametrize(
    ("arguments", "visible", "runs_on_ranks", "is_set"),
    [
        ([], "0", True, False),
        (["hardware=cpu"], "0", True, True),
        (["comms.backend=gloo"], "0", True, True),
        ([], "", True, True),  # hidden on purpose
        ([], "0", False, True),  # export and prediction run on the CPU everywhere
    ],
)
def test_a_training_on_gpus_keeps_the_process_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    visible: str,
    runs_on_ranks: bool,
    is_set: bool,
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(process, "GPU_FILE", tmp_path / "nvidia0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    names = ("GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["train", *arguments])
    Verb(dict, dict, "", runs_kernels=True, runs_on_ranks=runs_on_ranks).prepare_process()
    assert {name in os.environ for name in names} == {is_set}


def test_the_page_states_the_kernels_of_each_device() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "do" / "gpu.md").read_text()
    kinds = devices.named("cpu"), devices.named("cpu", plain=True), devices.named("cuda")
    assert f"| `compute_kernels` | {' | '.join(', '.join(kind.table_kernels) for kind in kinds)} |" in page
