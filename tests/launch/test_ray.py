"""A preparation by Ray is rendered for Slurm and Kubernetes, and a node of it ends with the code of prepare."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.render import render
from tests.launch.manifests import assert_valid, read

JOB = ("data=criteo_kaggle", "source=raw/day_*", "engine=ray")
POD = ("--image", "registry/image:1", "--cpu", "8", "--memMB", "32000")


def test_slurm_starts_a_node_of_ray_on_every_host() -> None:
    script = render("slurm", ["prepare", "-j", "8x1", "--memMB", "64000", "--", *JOB])
    assert "#SBATCH --nodes=8\n" in script and "#SBATCH --ntasks-per-node=1\n" in script
    words = " ".join(script.replace("\\\n", " ").split())
    assert (
        "ray_prepare.node --address \"$head_node:$port\" --memory-mb 64000 -- data=criteo_kaggle 'source=raw/day_*' engine=ray"
        in words
    )
    asked = render("slurm", ["prepare", "-j", "8x1", "--", *JOB, "ray.dashboard=true"])
    assert "--dashboard --" in " ".join(asked.replace("\\\n", " ").split())


def test_kubernetes_gets_a_ray_job_of_a_head_and_workers() -> None:
    (job,) = read(render("kubernetes", ["prepare", "-j", "3x1", *POD, "--max-retries", "2", "--", *JOB]))
    assert_valid(job)
    cluster = job["spec"]["rayClusterSpec"]
    assert job["spec"]["entrypoint"] == "python -u -m pipeline prepare data=criteo_kaggle 'source=raw/day_*' engine=ray"
    assert job["spec"]["shutdownAfterJobFinishes"] is True and job["spec"]["backoffLimit"] == 2
    assert cluster["workerGroupSpecs"][0]["replicas"] == 2
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["resources"]["limits"] == {"cpu": "8", "memory": "32000Mi"} and "command" not in head
    (alone,) = read(render("kubernetes", ["prepare", *POD, "--", *JOB]))
    assert "workerGroupSpecs" not in alone["spec"]["rayClusterSpec"]


@pytest.mark.parametrize(
    ("target", "words", "said"),
    [
        ("slurm", ["-j", "2x1", "--", "data=criteo_kaggle", "source=x"], "engine=ray"),
        ("slurm", ["-j", "2x8", "--", *JOB], "-j 2x1"),
        ("slurm", ["-j", "2x1", "--", *JOB, "ray.address=head:6379"], "ray.address"),
        ("kubernetes", [*POD, "--kind", "rayjob", "--", "data=criteo_kaggle", "source=x"], "engine=ray"),
    ],
    ids=["embedded", "ranks", "address", "kind"],
)
def test_what_ray_cannot_be_says_the_way_out(
    target: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        render(target, ["prepare", *words])
    assert said in capsys.readouterr().err


@pytest.mark.campaign
def test_two_nodes_prepare_and_end_with_the_code_of_prepare(tmp_path: Path) -> None:
    """As srun starts them: the same command twice, here on one host."""
    pytest.importorskip("ray")
    from tests.data.criteo_rows import random_lines, run_prepare, write_lines
    from tests.data.test_executors import digests
    from tests.extras.ray_prepare.ray_cluster import ENVIRONMENT, free_port

    for day in range(4):
        write_lines(tmp_path / "raw" / f"day_{day}", random_lines(500, seed=day))
    run_prepare(str(tmp_path / "raw"), tmp_path / "expected", name="criteo_kaggle")
    port = free_port()

    def start(number: int, source: Path, num_nodes: int = 2) -> subprocess.Popen[str]:
        words = ["data=criteo_kaggle", f"source={source}", f"data.path={tmp_path / 'ds'}", "engine=ray", "memory_limit_gb=0.5",
                 "data.split.validation_fraction=0.1", "data.split.test_fraction=0.1"]  # fmt: skip
        command = [sys.executable, "-m", "pipeline.extras.ray_prepare.node", "--address", f"127.0.0.1:{port}",
                   "--memory-mb", "1000", "--", *words]  # fmt: skip
        of_slurm = {"SLURM_NODEID": str(number), "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NUM_NODES": str(num_nodes)}
        environment = {**os.environ, **ENVIRONMENT, **of_slurm}
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    head = start(0, tmp_path / "raw")
    time.sleep(8)  # the worker joins late, and prepare waits for it
    worker = start(1, tmp_path / "raw")
    outputs = [head.communicate(timeout=300)[0]]
    ended = time.monotonic()
    outputs.append(worker.communicate(timeout=300)[0])
    print(f"the worker ended {time.monotonic() - ended:.1f} s after the head")
    assert [head.returncode, worker.returncode] == [0, 0], outputs
    assert re.search(r"Ray [\d.]+: 2 nodes", outputs[0]), outputs[0]
    assert digests(tmp_path / "ds") == digests(tmp_path / "expected")
    head = start(0, tmp_path / "nothing", num_nodes=1)
    output, _ = head.communicate(timeout=300)
    assert head.returncode == 2 and "names no file" in output
