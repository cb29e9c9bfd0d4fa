"""Tests read and write nothing in the folder that pytest was started in, whatever `make train` has left there."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.forks import run_warm
from tests.support.own_folder import REPOSITORY
from tests.support.ranks import RankPool

# One test of each kind that failed when the checkout held a run of quickstart, or a plan for it.
TESTS = (
    "launch/test_components.py::test_train_runs_an_agent_with_logs_in_the_run_folder",
    "launch/test_elastic.py::test_a_schedule_has_no_nodes_that_come_and_go",
    "launch/test_kubernetes.py::test_one_pod_needs_no_service_and_no_fixed_port",
    "launch/test_render.py::test_a_data_set_in_a_store_is_read_from_there",
    "training/test_preflight.py::test_a_job_that_fits_gives_its_tables",
    "embeddings/test_compression_config.py::test_a_model_of_tensor_trains_alone_is_refused",
)
TRAPS = (
    "datasets/quickstart/dataset.json",
    "datasets/raw/quickstart.tsv",
    "artifacts/quickstart/manifest.json",
    "registry/quickstart/champion",
    "retraining/quickstart/ledger.jsonl",
    "outputs/trap.yaml",
    "sharding_plans/quickstart.autox1.json",
    "sharding_plans/quickstart.autox2.json",
)


def _folder_of_rank(rank: int) -> str:
    return os.getcwd()


def test_a_test_its_commands_and_its_ranks_share_an_empty_folder(ranks: RankPool) -> None:
    folder = os.getcwd()
    assert os.listdir() == [] and folder != str(REPOSITORY)
    assert ranks.run(1, _folder_of_rank) == [folder]
    asked = run_warm("timeit", "-n1", "-r1", "-s", "import os; print(os.getcwd())")
    assert asked.stdout.splitlines()[0] == folder


@pytest.mark.long
def test_what_make_train_leaves_in_the_folder_disturbs_no_test(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest is started in a folder that is full of traps: another run of quickstart, and files that nobody can read."""
    shutil.copytree(small_run, "runs/quickstart")
    for trap in TRAPS:
        Path(trap).parent.mkdir(parents=True, exist_ok=True)
        Path(trap).write_text("a trap")
    before = _contents()
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    asked = [f"{REPOSITORY}/tests/{test}" for test in TESTS]
    done = run_warm("pytest", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}", *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(TESTS)} passed" in done.stdout
    assert _contents() == before


def test_no_test_starts_a_process_in_the_checkout() -> None:
    folders = re.compile(r"cwd=(REPOSITORY|ROOT|root|CONF|EXAMPLES|Path\(__file__\))|chdir\((REPOSITORY|ROOT|CONF)")
    files = [file for file in (REPOSITORY / "tests").rglob("test_*.py") if file != Path(__file__)]
    assert [str(file) for file in files if folders.search(file.read_text())] == []


def _contents() -> dict[str, str]:
    files = [file for file in Path().rglob("*") if file.is_file()]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
