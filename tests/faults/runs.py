"""Start runs with planted faults, with an agent or without, and read what they left."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.owners import HEADER_BYTES
from tests.support.forks import ADDRESS, WarmCommand, server_address

TIMEOUT_S = 1500
NOT_COMPARED = re.compile(r"time|samples_per_(cpu_)?s|input_stall_percent|comms_percent|peak_memory_gb|tier_.*")
SMALL = [
    "experiment=quickstart",
    "hardware=cpu",
    "trainer.global_batch_size=256",
    "trainer.log_every_steps=10",
    "trainer.evaluate_batch_size=512",
    "trainer.max_steps=60",
    "checkpoint.save_every_steps=10",
    "trainer.evaluate_every_steps=20",
]


@dataclass(frozen=True)
class Run:
    data: str
    folder: Path
    overrides: tuple[str, ...] = ()
    warm: bool = (
        False  # agent and ranks fork from the session's server (tests.support.forks); processes stand for the ranks
    )

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def words(self) -> list[str]:
        return [*SMALL, f"data.path={self.data}", f"run_dir={self.run_dir}", *self.overrides]

    def command(self, *faults: dict[str, Any], ranks: int = 0, max_restarts: int = 0, verb: str = "train") -> list[str]:
        """`ranks` 0: one process without an agent."""
        self.folder.mkdir(parents=True, exist_ok=True)
        plan = self.folder / "faults.json"
        planted = [{"attempt": 0, "rank": 0, **fault} for fault in faults]
        plan.write_text(json.dumps({"folder": str(self.folder), "faults": planted, "verb": verb}))
        agent = [
            "-m",
            "pipeline",
            "agent",
            "--grace-s",
            "30",
            "--standalone",
            f"--nproc-per-node={ranks}",
            f"--max-restarts={max_restarts}",
            "--redirects=3",
            f"--log-dir={self.folder}/logs",
        ]
        words = self.words if verb == "train" else [f"run={self.run_dir}"]
        return [sys.executable, *(agent if ranks else []), "-m", "tests.faults.planted", str(plan), *words]

    def start(self, *faults: dict[str, Any], env: dict[str, str] | None = None, **how: Any) -> Any:
        """A subprocess.Popen with one stream of output; a WarmCommand where the run is warm."""
        warm = {"WARM": "1", ADDRESS: server_address()} if self.warm else {}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **warm, **(env or {})}
        command = self.command(*faults, **how)
        if self.warm:
            return WarmCommand(command[2], command[3:], environment)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)

    def finish(self, *faults: dict[str, Any], env: dict[str, str] | None = None, **how: Any) -> tuple[int, str]:
        """(exit code, output)."""
        process = self.start(*faults, env=env, **how)
        output, errors = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, output + (errors or "")

    def log(self, attempt: int, rank: int) -> str:
        (path,) = self.folder.glob(f"logs/*/attempt_{attempt}/{rank}/stderr.log")
        return path.read_text()

    def checksums(self, step: int) -> dict[str, str]:
        """SHA-256 of all that the step holds of model, optimizers and random generators; which save wrote it does not count."""
        folder = self.run_dir / "checkpoints" / f"step_{step:08d}"
        files = sorted(set(os.listdir(folder)) - {"manifest.json", ".metadata"})
        assert files, "a step without files shows nothing"
        return {name: hashlib.sha256(_without_save(name, (folder / name).read_bytes())).hexdigest() for name in files}

    def metrics(self, kind: str) -> list[dict[str, float]]:
        """Of the lines `train` or `validation`: all but times and memory."""
        lines = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        mine = [line for line in lines if line.pop("kind") == kind]
        return [{key: value for key, value in line.items() if not NOT_COMPARED.search(key)} for line in mine]

    def lineage(self, num_ranks: int) -> list[int]:
        """The rows of the steps that led to the last one, in order: of each step, those of its last attempt."""
        rows: dict[tuple[int, int], list[int]] = {}
        for rank in range(num_ranks):
            for line in (self.folder / f"rows.{rank}.jsonl").read_text().splitlines():
                record = json.loads(line)
                rows[record["step"], rank] = record["rows"]
        return [row for key in sorted(rows) for row in rows[key]]


def processes_of(run: Run) -> list[int]:
    """Processes that name the run's folder in their command line."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if str(run.run_dir).encode() in words:
            found.append(int(pid))
    return found


def left_over(run: Run, within_s: float = 120.0) -> list[int]:
    """Processes of the run that do not end within that time, though its agent has."""
    until = time.monotonic() + within_s
    while (found := processes_of(run)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _without_save(name: str, content: bytes) -> bytes:
    if name.endswith(".distcp"):
        return content[HEADER_BYTES:]
    values = json.loads(content)
    del values["save_id"]
    return json.dumps(values).encode()
