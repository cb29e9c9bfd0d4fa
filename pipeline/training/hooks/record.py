"""Write a run folder's record, and log the step that a run resumes from and how its job differs from the run."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

import pipeline
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.config.saved_jobs import job_from_yaml, save_job
from pipeline.planner.plan_codec import write_plan
from pipeline.runtime.errors import TrainingError
from pipeline.runtime.logs import attempt, fields, get_logger, to_json
from pipeline.runtime.masking import mask
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState

# Locations of files, and settings of how the same numbers are computed: changing them changes no
# result.
NEUTRAL = ("name", "run_dir", "from_run", "world_size", "plugins", "paths.", "data.", "planner.", "hardware.", "logger.", "profile",
           "checkpoint.", "trainer.log_every_steps", "trainer.hooks", "trainer.metrics", "trainer.metrics_port", "trainer.lease_ttl_s", "trainer.grace_s",
           "trainer.startup_timeout_s", "trainer.hang_timeout_s", "trainer.save_timeout_s")  # fmt: skip
# Settings that only the first step of a run uses.
FIRST_STEP = ("warm_start", ".init.")
# Settings that change the trained weights. A finished run has no step left that could apply them.
TRAINS = ("optimizer.", "schedule.", "model.", "tables.", "parallel.", "warm_start", "trainer.precision",
          "trainer.loss.", "trainer.average.",
          "trainer.gradient_clip_", "comms.forward_precision", "comms.backward_precision",
          "data.synthetic_multi_hot")  # fmt: skip
MAX_NAMED = 8


def differences(job: TrainJob, config: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return key -> (value of the run, value of this job) for each key that can change a result.
    `config` is the config in a checkpoint's manifest. Raises ConfigError if the run's config needs
    a plugin that is not loaded."""
    before = dict(_leaves(asdict(job_from_yaml(TrainJob, yaml.safe_dump(config)))))
    now = dict(_leaves(asdict(job)))
    keys = [key for key in dict.fromkeys([*now, *before]) if _is(key, TRAINS) or not _is(key, NEUTRAL)]
    pairs = {key: (before.get(key), now.get(key)) for key in keys}
    return {
        key: (then, new)
        for key, (then, new) in pairs.items()
        if then != new and (then or new) is not None and (then or new) != []
    }


def describe_differences(found: dict[str, tuple[Any, Any]]) -> list[str]:
    """Describe the settings that later steps use, and the settings that are ignored after the first
    step."""
    ignored = {key: pair for key, pair in found.items() if _is(key, FIRST_STEP)}
    taken = {key: pair for key, pair in found.items() if key not in ignored}
    lines = []
    if taken:
        lines.append(f"continues with {_named(taken)}")
    if ignored:
        lines.append(
            f"ignores {_named(ignored)}: only the first step of a run uses these settings; use another run_dir to start a new run"
        )
    return lines


def check_finished(run_dir: str, step: int, found: dict[str, tuple[Any, Any]]) -> str:
    """Return a text about ignored settings, "" if nothing is ignored. No step is left to train
    after `step`. Raises TrainingError if the job sets values that would train other weights than
    the weights of the run."""
    if asked := {key: pair for key, pair in found.items() if _is(key, TRAINS)}:
        raise TrainingError(
            f"{run_dir} is trained to its last step, {step}, and no step is left for {_named(asked)}: nothing was changed. "
            "Choose another run_dir for another training, or more steps (trainer.epochs, trainer.max_steps) to continue with "
            "that; the run's own values show its results again"
        )
    return f"ignores {_named(found)}: no step is left to train" if found else ""


def _named(found: dict[str, tuple[Any, Any]]) -> str:
    texts = [f"{key}={now} (the run: {before})" for key, (before, now) in list(found.items())[:MAX_NAMED]]
    more = len(found) - MAX_NAMED
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def _is(key: str, patterns: tuple[str, ...]) -> bool:
    """Return True if a pattern matches the key. A pattern that ends in "." or "_" matches a prefix.
    A pattern that starts with "." matches anywhere. Any other pattern matches a complete key or a
    section."""
    return any(
        pattern in key
        if pattern.startswith(".")
        else key.startswith(pattern)
        if pattern.endswith((".", "_"))
        else key == pattern or key.startswith(f"{pattern}.")
        for pattern in patterns
    )


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield key, value
        return
    for name, inner in value.items():
        yield from _leaves(inner, f"{key}.{name}" if key else str(name))


STARTS = "starts.jsonl"
logger = get_logger("pipeline.train")


@register("hook", "record")
class RunRecord(Hook):
    """Writes config, plan and starts.jsonl just before the first batch is read. Before that nothing
    in the folder changes."""

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._manifest: dict[str, Any] | None = None  # of the step that was restored at the start

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        self._manifest = manifest

    def on_fit_start(self, state: TrainingState) -> None:
        """Log what differs from the earlier run. Raises TrainingError if the run is finished and
        the job would train other weights."""
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
    Credentials are masked."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "from_step": step,
        "attempt": attempt(),
        "command": mask(shlex.join(["python", *sys.orig_argv[1:]])),
        "host": socket.gethostname(),
        "world_size": world_size,
        "version": pipeline.__version__,
        "commit": commit_of_package(),
    }


def commit_of_package() -> str:
    """Return the commit of the pipeline's checkout, "" for an installed package."""
    root = Path(pipeline.__file__).resolve().parents[1]
    # git refuses the checkout of another user unless it is named; this process runs its code anyway
    return commit_of(root, "-c", f"safe.directory={root}") if (root / ".git").exists() else ""


def commit_of(folder: Path, *options: str) -> str:
    """Return the commit of the checkout that has the folder, with "-dirty" if files differ; "" if
    there is none."""
    command = ["git", "-C", str(folder), *options, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
