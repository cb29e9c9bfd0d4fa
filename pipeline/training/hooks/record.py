"""Write a run folder's record (config, plan, a line of starts.jsonl per start), and log the step
that a run resumes from."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pipeline
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.config.saved_jobs import save_job
from pipeline.planner.plan_codec import write_plan
from pipeline.runtime.logs import attempt, fields, get_logger, to_json
from pipeline.runtime.masking import mask
from pipeline.training.continued import check_finished, describe_differences, differences
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState

STARTS = "starts.jsonl"
logger = get_logger("pipeline.train")


@register("hook", "record")
class RunRecord(Hook):
    """Writes config, plan and starts.jsonl just before the first batch is read.

    Before that nothing in the folder changes.
    """

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._manifest: dict[str, Any] | None = None  # of the step that was restored at the start

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        self._manifest = manifest

    def on_fit_start(self, state: TrainingState) -> None:
        """Log what differs from the earlier run.

        Raises TrainingError if the run is finished and the job would train other weights.
        """
        # manifests of tests may lack a config
        if self._manifest is None or "config" not in self._manifest:
            return
        found = differences(self.job, self._manifest["config"])
        log_fields: dict[str, object] = {}
        if state.is_over:
            lines = [text] if (text := check_finished(self.job.run_dir, state.step, found)) else []
        else:
            ranks, libraries = self._manifest["world_size"], self._manifest["libraries"]
            lines = [
                f"resumed from step {state.step}, trained on {ranks} rank(s) with torch {libraries.get('torch', '?')}; "
                f"{state.total_steps - state.step} steps to go; attempt {attempt()}"
            ]
            log_fields = {
                "event": "resumed",
                "step": state.step,
                "steps_to_go": state.total_steps - state.step,
                "saved_by_ranks": ranks,
            }
            lines += describe_differences(found)
        for line in lines:
            logger.info("%s %s", self.job.run_dir, line, extra=fields(**log_fields))
            log_fields = {}

    def on_train_start(self, state: TrainingState) -> None:
        """Write config, plan and start on rank 0."""
        if self.parts.writer is None or self.parts.plan is None:
            return
        save_job(self.job, f"{self.job.run_dir}/config.yaml")
        write_plan(f"{self.job.run_dir}/plan.json", self.parts.plan)
        with open(f"{self.job.run_dir}/{STARTS}", "a") as file:
            file.write(to_json(describe_start(state.step, self.parts.context.world_size)) + "\n")


def describe_start(step: int, world_size: int) -> dict[str, Any]:
    """Describe when, where and with which command a training starts or resumes after `step`.

    Credentials are masked.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "from_step": step,
        "attempt": attempt(),
        "command": mask(shlex.join(["python", *sys.orig_argv[1:]])),
        "host": socket.gethostname(),
        "world_size": world_size,
        "version": pipeline.__version__,
        "commit": _commit(),
    }


def _commit() -> str:
    """Return the commit of the code's checkout, with "-dirty" if files differ; "" for an installed
    package."""
    root = Path(pipeline.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
