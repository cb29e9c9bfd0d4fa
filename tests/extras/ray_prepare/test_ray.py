"""On a Ray cluster of two nodes a preparation has the bytes of the embedded engine, also when workers and a node die."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.data.dataset import load_dataset
from tests.data.criteo_rows import random_lines, run_prepare, write_lines
from tests.data.test_executors import digests
from tests.extras.ray_prepare.ray_cluster import RayCluster, ray_cluster

NUM_FILES, ROWS_A_FILE, NUM_KILLS = 8, 4_000, 20
pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    for day in range(NUM_FILES):
        write_lines(folder / f"day_{day}", random_lines(ROWS_A_FILE, seed=day, distinct=1_000))
    return folder


@pytest.fixture(scope="module")
def expected(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("embedded") / "ds"
    run_prepare(str(raw), folder, name="criteo_kaggle", rows_per_shard=1_500, rows_per_row_group=500)
    return digests(folder)


def start(cluster: RayCluster, raw: Path | str, path: Path | str, *words: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "pipeline", "prepare", "data=criteo_kaggle", f"source={raw}", f"data.path={path}", "engine=ray",
        "data.rows_per_shard=1500", "data.rows_per_row_group=500", "ray.max_retries=40", *words,
        "data.split.validation_fraction=0.1", "data.split.test_fraction=0.1",
    ]  # fmt: skip
    return subprocess.Popen(
        command,
        env=cluster.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize("cpus", [(1, 0), (1, 1), (2, 2)], ids=["1", "2", "4"])
def test_any_number_of_workers_writes_the_bytes_of_the_embedded_engine(
    raw: Path, expected: dict[str, str], tmp_path: Path, cpus: tuple[int, int]
) -> None:
    with ray_cluster(cpus) as cluster:
        output = finish(start(cluster, raw, tmp_path / "ds"))
    print(f"{sum(cpus)} workers: {len(expected)} files, all with the SHA-256 of the embedded engine\n{output}")
    assert digests(tmp_path / "ds") == expected


def test_killed_workers_and_a_lost_node_leave_no_trace(raw: Path, expected: dict[str, str], tmp_path: Path) -> None:
    kills = nodes = runs = 0
    with ray_cluster((2, 2)) as cluster:
        while kills < NUM_KILLS:
            path = tmp_path / f"ds{runs}"
            process = start(cluster, raw, path)
            while process.poll() is None:
                time.sleep(0.15)
                if kills < NUM_KILLS and cluster.kill_a_worker(kills):
                    kills += 1
                if kills >= 5 * (nodes + 1) and nodes < 2:
                    cluster.kill_other()
                    nodes += 1
                    cluster.start_other()
            finish(process)
            assert digests(path) == expected
            runs += 1
    dataset = load_dataset(str(path))
    assert dataset.accepted_rows == sum(split.num_rows for split in dataset.splits.values()) == NUM_FILES * ROWS_A_FILE
    print(f"{kills} workers and {nodes} nodes were killed in {runs} runs; all {len(expected)} files as without")
    assert nodes == 2


def test_no_cluster_and_tasks_that_fit_no_node_say_the_way_out(raw: Path, tmp_path: Path) -> None:
    with ray_cluster((1, 0)) as cluster:
        process = start(cluster, raw, tmp_path / "ds", "threads=3")
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 2 and "threads=3" in output and "1 CPUs" in output
    process = start(cluster, raw, tmp_path / "ds")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2 and "no Ray cluster at ray.address=" in output
