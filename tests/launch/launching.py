"""A person's commands at the login node of the test's Slurm cluster, and what the job they start has written."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tests.launch.slurm_cluster import Cluster, wait_until

START_S = 300  # until the first steps of two ranks, on a machine that has other work
SAVED = re.compile(r"step (\d+)\s+saved")
SECRET = "never-to-be-seen-anywhere"  # in the environment of whoever submits
STEP = re.compile(r"step (\d+)/")


class Launch:
    """Commands of a person at the cluster's login node, in a folder of the test."""

    def __init__(self, cluster: Cluster, folder: Path, installed: dict[str, str], data: str) -> None:
        self.cluster, self.folder = cluster, folder
        self.env = {**installed, "OMP_NUM_THREADS": "1", "AWS_SECRET_ACCESS_KEY": SECRET}
        self.overrides = [
            "experiment=quickstart", "hardware=cpu", "planner=torchrec", f"data.path={data}", f"run_dir={folder}/run",
            "trainer.global_batch_size=256", "trainer.evaluate_batch_size=512", "trainer.evaluate_max_batches=2",
            "trainer.grace_s=18", "trainer.epochs=1000",
        ]  # fmt: skip

    def says(self, *words: str, code: int = 0) -> str:
        """Output and errors of a command, which are never a traceback."""
        done = self.cluster.run(words, self.folder, self.env, timeout_s=300)
        text = done.stdout + done.stderr
        assert done.returncode == code, text
        assert "Traceback" not in text, text
        return text

    @staticmethod
    def python(*words: str) -> list[str]:
        return [sys.executable, *words]

    def torchx(self, *words: str, code: int = 0) -> str:
        return self.says(sys.executable, "-m", "torchx.cli.main", "--log_level", "WARNING", *words, code=code)

    def render(self, verb: str, *words: str) -> str:
        """A script that says itself where this checkout is, which is not installed."""
        path = f"PYTHONPATH={self.env['PYTHONPATH']}"
        return self.says(sys.executable, "-m", "launch.render", "slurm", verb, "--env", path, *words)

    def sbatch(self, script: str) -> str:
        (self.folder / "job.sh").write_text(script)
        return self.says("sbatch", "--parsable", "job.sh").strip()

    def output(self, job_id: str) -> str:
        found = list(self.folder.glob(f"*-{job_id}.out"))
        return found[0].read_text(errors="replace") if found else ""

    def wait_for(self, job_id: str, pattern: str, times: int = 1) -> None:
        try:
            wait_until(lambda: len(re.findall(pattern, self.output(job_id))) >= times, f"{pattern!r}", START_S)
        except TimeoutError as error:
            raise AssertionError(f"{error}:\n{self.output(job_id)}") from None

    def trained_steps(self) -> list[int]:
        lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines if "samples_per_s" in line]
