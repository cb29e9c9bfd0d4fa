"""Tests of the GPU program: on a real GPU where torch sees one, else on the shadow GPU.

    .venv-gpu/bin/python -m pytest -m gpu tests/gpu

`gpus` is the fixture. All that a test runs on a GPU goes through it, because a process that has
imported torch cannot get shadow GPUs any more: ranks fork from one that has them.

    def test_a_kernel(gpus):
        [sums], [report] = gpus.run(1, _sum_on_gpu, 3)    # on each rank: _sum_on_gpu(rank, 3)
        assert not report.problems                         # report is None on a real GPU

    def test_a_job(gpus, prepared_clicks, tmp_path):
        job = gpus.train(2, ["experiment=quickstart", f"data.path={prepared_clicks}"], tmp_path / "run")
        job.summary, job.reports, job.run_dir              # TrainSummary of rank 0, a Report a rank

- `run(world_size, function, *args)`: `function` is a module-level function of a module that the
  ranks can import; it runs within a process group of nccl, `cuda:<rank>` is the current device.
- `run_on_cpu(world_size, function, *args)`: the same processes, gloo, no GPU: the results alone.
- `train(world_size, overrides, run_dir, on="gpu" or "cpu")`: BASE and hardware are added, and
  sharding.fast_cpu=false on the CPU, so that both take TorchRec's own path.
- A failure raises RuntimeError with the traceback of every rank. `report.kinds("race")` and the
  like give one kind of problems: race, reuse, host_read, device, collective (report.py).
- `needs_shadow` skips a test on a real GPU: tests of the shadow itself, and of planted faults.
- On a machine with fewer GPUs than `world_size`, `train` uses as many ranks as there are GPUs, on the CPU
  too; `run` skips the test, and so does the fixture `needs_two_gpus`. TESTS_GPU_COUNT=1 tries that on the shadow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.training.summary import TrainSummary
from tests.gpu.jobs import train_on_rank
from tests.support import forks
from tests.support.ranks import RankPool

HERE = Path(__file__).parent
IS_REAL = torch.cuda.is_available()
NUM_GPUS = torch.cuda.device_count() if IS_REAL else int(os.environ.get("TESTS_GPU_COUNT", 8))
BASE = [
    "trainer.max_steps=3",
    "trainer.global_batch_size=64",
    "trainer.evaluate_max_batches=2",
    "planner.timeout_s=2",
    "trainer.evaluate_batch_size=64",
    "logger.report=false",
    "logger.tensorboard=false",
]


def pytest_configure(config: pytest.Config) -> None:
    """Have ranks fork from a process with shadow GPUs: only where nothing but tests/gpu is run."""
    named = [Path(word.partition("::")[0]).resolve() for word in config.args]
    if torch.version.cuda is not None and named and all(HERE in (each, *each.parents) for each in named):
        # FBGEMM asks torch.cuda.is_available() when it is imported. By NVML that starts no CUDA, which a fork would lose.
        variables = {"TESTS_GPU": "real" if IS_REAL else "shadow", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        os.environ.update(variables)
        forks.ENVIRONMENT.update(variables)
        forks.preload("tests.gpu.preloaded")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    why = None
    if torch.version.cuda is None:
        why = "torch is a CPU build: run .venv-gpu/bin/python -m pytest -m gpu tests/gpu"
    elif "TESTS_GPU" not in os.environ:
        why = "its ranks fork from another process than other tests': run tests/gpu alone"
    for item in ours:
        item.add_marker("gpu")
        if why:
            item.add_marker(pytest.mark.skip(reason=why))


@dataclass
class Job:
    """A job that has run: the summary of rank 0, the shadow's report of each rank, and where it wrote."""

    summary: TrainSummary
    reports: list[Any]
    run_dir: Path


class Gpus:
    """Ranks with a GPU each, which fork from one process and are used again."""

    def __init__(self) -> None:
        self._pool = RankPool("tests.gpu.ranks")

    @staticmethod
    def at_most(world_size: int) -> int:
        """Return `world_size`, or the number of GPUs if that is smaller."""
        return min(world_size, NUM_GPUS)

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, local_world_size: int | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Give what each rank returned, and each rank's report."""
        if world_size > NUM_GPUS:
            pytest.skip(f"needs {world_size} GPUs, and there are {NUM_GPUS}")
        both = self._pool.run(world_size, function, False, *args, local_world_size=local_world_size)
        return [result for result, _ in both], [report for _, report in both]

    def run_on_cpu(
        self, world_size: int, function: Callable[..., Any], *args: Any, local_world_size: int | None = None
    ) -> list[Any]:
        both = self._pool.run(world_size, function, True, *args, local_world_size=local_world_size)
        return [result for result, _ in both]

    def train(
        self,
        world_size: int,
        overrides: list[str],
        run_dir: Path,
        on: str = "gpu",
        local_world_size: int | None = None,
    ) -> Job:
        hardware = [] if any(each.startswith("hardware=") for each in overrides) else ["hardware=h100_80gb"]
        if on == "cpu":
            hardware = ["hardware=cpu", "sharding.fast_cpu=false"]
        words = [*BASE, *hardware, f"run_dir={run_dir}", *overrides]
        world_size = self.at_most(world_size)
        if on == "cpu":
            summaries = self.run_on_cpu(world_size, train_on_rank, words, local_world_size=local_world_size)
            return Job(summaries[0], [], run_dir)
        summaries, reports = self.run(world_size, train_on_rank, words, local_world_size=local_world_size)
        return Job(summaries[0], reports, run_dir)

    def close(self) -> None:
        self._pool.close()


@pytest.fixture(scope="session")
def gpus() -> Iterator[Gpus]:
    made = Gpus()
    yield made
    made.close()


@pytest.fixture
def needs_shadow() -> None:
    if IS_REAL:
        pytest.skip("shows something of the shadow GPU")


@pytest.fixture
def needs_two_gpus() -> None:
    if NUM_GPUS < 2:
        pytest.skip("compares different numbers of GPUs, and there is one")
