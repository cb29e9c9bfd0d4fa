"""Memory of a host: the lowest of what it has and of the limits that a container or a job sets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.container import as_container
from pipeline.planner.hardware import GIB
from pipeline.runtime import host_memory
from pipeline.runtime.host_memory import free_host_bytes, host_memory_bytes
from tests.planner.problems import on


@pytest.mark.parametrize(
    ("limited", "own"),
    [
        ("memory.max", "0::/"),
        ("memory/memory.limit_in_bytes", ""),
        ("slurm/job_7/memory.max", "0::/slurm/job_7/step_0"),  # a job's, from the outside
        ("slurm/job_7/step_0/memory.max", "0::/slurm/job_7/step_0"),
        ("memory/slurm/uid_4/memory.limit_in_bytes", "5:cpuset:/\n4:memory:/slurm/uid_4/job_7"),
    ],
)
def test_a_limit_of_memory_below_the_hosts_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limited: str, own: str
) -> None:
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "own")
    for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "own").write_text(own)
    file = tmp_path / "cgroup" / limited
    file.parent.mkdir(parents=True)
    file.write_text("max\n")
    assert host_memory_bytes() > GIB
    file.write_text(f"{GIB}\n")
    assert host_memory_bytes() == GIB
    assert on("cpu", 4).ddr_cap_bytes == GIB // 4


@pytest.mark.campaign
def test_the_limit_of_a_real_container_counts(tmp_path: Path) -> None:
    """RUNC=/usr/sbin/runc pytest -m campaign tests/runtime/test_host_memory.py, as root."""
    runc = os.environ.get("RUNC") or shutil.which("runc")
    if not runc or os.geteuid():
        pytest.skip("no container can be started: RUNC names no runc and the PATH has none, or this is not root")
    code = "from pipeline.runtime.host_memory import host_memory_bytes; print(host_memory_bytes())"
    command = as_container(runc, [sys.executable, "-c", code], dict(os.environ), tmp_path, memory_bytes=2 * GIB)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == [str(2 * GIB)], done.stderr
    assert host_memory_bytes() > 2 * GIB


@pytest.mark.parametrize(
    "given", [{"SLURM_MEM_PER_NODE": "2048"}, {"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "4"}]
)
def test_the_memory_of_a_slurm_job_counts(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert host_memory_bytes() == 2 * GIB
    for name in given:
        monkeypatch.setenv(name, "0")  # all of the node's
    assert host_memory_bytes() > 2 * GIB


def test_what_ranks_use_of_a_limit_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1024")
    assert free_host_bytes(GIB // 4) == GIB - GIB // 4
    assert free_host_bytes(2 * GIB) < 0
