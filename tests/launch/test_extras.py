"""The core of launch renders for Slurm and Kubernetes without launch/extras."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RENDER = """
import sys
# The finder of an editable install would look in the checkout.
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in getattr(each, "__module__", "")]
from launch import chain, render, schedule
job = ["experiment=mlperf_dlrmv2", "data.path=datasets/criteo"]
pods = ["--image", "ours:1", "--cpu", "8", "--gpu", "0", "--memMB", "9000", "--no-check-data", "--", *job]
assert "#SBATCH" in render.render("slurm", ["train", "--gpu", "8", "--no-check-data", "--", *job])
for kind, word in (("job", "kind: Job"), ("jobset", "kind: JobSet")):
    assert word in render.render("kubernetes", ["train", "--kind", kind, *pods])
assert "kind: CronJob" in schedule.schedule("kubernetes", ["--cron", "@daily", "--verb", "train", *pods])
assert "sbatch" in chain.render_chain(["slurm", "chain.yaml"])
try:
    render.render("kubernetes", ["train", "--kind", "volcano", *pods])
except SystemExit as end:
    sys.exit(end.code)
"""


@pytest.mark.long
def test_the_core_renders_without_the_folder_of_extras(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "launch", tmp_path / "launch", ignore=shutil.ignore_patterns("extras", "__pycache__"))
    for name in ("pipeline", "conf", "setup.cfg"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    shutil.copy(REPOSITORY / "examples" / "chain.yaml", tmp_path)
    done = subprocess.run([sys.executable, "-c", RENDER], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "'volcano' is not one of job, jobset" in done.stderr, done.stderr
