"""Fixtures that all tests share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.data.prepare.run import prepare
from pipeline.serving.artifact.export import ExportSummary, export
from tests.support import (
    examples,  # noqa: F401  # its profile holds for all tests
    forks,
)
from tests.support.cpu_report import CpuReport
from tests.support.exchange_paths import ranks_each_way  # noqa: F401  # a fixture
from tests.support.jobs import train_on_rank
from tests.support.made_once import made_once
from tests.support.own_folder import enter_own_folder, remove_own_folders
from tests.support.process_state import own_process_state
from tests.support.ranks import RankPool

SAMPLES = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-report", metavar="FILE", help="append each test's CPU seconds, with its processes, to FILE")


def pytest_configure(config: pytest.Config) -> None:
    if "TESTS_GPU" not in os.environ:  # set for tests/gpu; all other tests run on the CPU of a GPU host too
        os.environ["CUDA_VISIBLE_DEVICES"] = forks.ENVIRONMENT["CUDA_VISIBLE_DEVICES"] = ""
    path = config.getoption("--cpu-report")
    if path and not config.getoption("numprocesses", None):  # with -n the workers write it
        config.pluginmanager.register(CpuReport(path), "cpu-report")
    if config.getoption("numprocesses", None):
        os.environ[forks.ADDRESS] = forks.server_address()


def pytest_unconfigure() -> None:
    forks.end_server()
    remove_own_folders()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[object]:
    """What a test or the fixtures that it sets up change for the whole process ends with the test.

    Its working folder is empty: see tests.support.own_folder.
    """
    with own_process_state():
        enter_own_folder()
        return (yield)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def samples() -> Path:
    """The folder of real samples; tests that need it skip where it is absent."""
    if not SAMPLES.is_dir():
        pytest.skip(f"the real samples are not at {SAMPLES}")
    return SAMPLES


@pytest.fixture(scope="session")
def prepared_clicks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small generated data set: 24,000 training rows, 3,000 in each other split, prepared as real ones."""

    def make(folder: Path) -> str:
        source = str(folder / "clicks.tsv")
        generate(load_config(GenerateJob, ["data=quickstart", f"output={source}", "data.synthetic.num_rows=30000"]))
        options = ["data=quickstart", f"source={source}", f"data.path={folder / 'prepared'}"]
        return prepare(load_config(PrepareJob, [*options, "data.rows_per_row_group=512"])).path

    return made_once(tmp_path_factory, "clicks", make)


@pytest.fixture(scope="session")
def small_run(ranks: RankPool, prepared_clicks: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks over prepared_clicks, saved at steps 10, 20 and 30. Copy it before changing it."""

    def make(folder: Path) -> Path:
        overrides = [
            "experiment=quickstart",
            "hardware=cpu",
            "trainer.global_batch_size=256",
            "trainer.evaluate_batch_size=512",
            f"data.path={prepared_clicks}",
            f"run_dir={folder / 'run'}",
            "trainer.max_steps=30",
            "checkpoint.save_every_steps=10",
            "checkpoint.keep_last_n=9",
            "trainer.evaluate_every_steps=10",
            "trainer.evaluate_max_batches=2",
            "tables.cat_25.sharding.sharding_types=[row_wise]",
            "tables.cat_24.sharding.sharding_types=[table_wise]",
        ]
        ranks.run(2, train_on_rank, overrides)
        shutil.copytree(folder / "run", folder / "as_trained", ignore=shutil.ignore_patterns("checkpoints"))
        return folder / "run"

    return made_once(tmp_path_factory, "small", make)


@pytest.fixture(scope="session")
def run_as_trained(small_run: Path) -> Path:
    """small_run without its checkpoints, and without what exports and evaluations of it have written since."""
    return small_run.parent / "as_trained"


@pytest.fixture(scope="session")
def small_artifact(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportSummary:
    """What exporting small_run's last step in int8 came to. Copy the folder before changing it."""

    def make(folder: Path) -> ExportSummary:
        words = [f"run={small_run}", f"output={folder / 'artifact'}", "precision=int8"]
        return export(load_config(ExportJob, words))

    return made_once(tmp_path_factory, "exported", make)
