"""Run one training of a sweep: as a process of this machine, or as a job that TorchX submits.

A process ends with the sweep. A job outlives it: its handle is in <run_dir>.job, and the same
command follows it again.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.runtime.errors import ConfigError, did_you_mean
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.exit_codes import USER_ERROR
from pipeline.runtime.process.processes import end_with_parent
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.lease import held_by

if TYPE_CHECKING:
    from torchx.runner import Runner

COMPONENT = "pipeline.train"
MAX_NAME = 40  # characters that schedulers allow for a job's name, without the trial's part
LEASE_POLL_S = 0.2
GRACE_S = 35.0  # for a training that is asked to save and end
SILENT_S = 600.0  # a scheduler that does not answer for this long ends the sweep
logger = get_logger("pipeline.sweep")


@dataclass(frozen=True)
class Training:
    """A training. `words` are its overrides; its output goes to `log`."""

    run_dir: str
    words: list[str]
    lease_ttl_s: float = 120.0

    @property
    def log(self) -> str:
        return f"{self.run_dir}.log"

    async def until_free(self) -> None:
        """Wait while an earlier start of the same training still saves into the run folder."""
        while held_by(self.run_dir, self.lease_ttl_s):
            await asyncio.sleep(LEASE_POLL_S)
        storage.make_folder(self.run_dir)


@dataclass(frozen=True)
class Ended:
    """How a training ended. is_mistake: it ended by an error that a restart would not fix."""

    reason: str
    is_mistake: bool = False


class LocalProcesses:
    """Runs trainings as processes that share the cores. launch: the words before the overrides."""

    poll_s = 0.2

    def __init__(self, parallel: int, launch: Sequence[str] | None) -> None:
        self._launch = list(launch or [sys.executable, "-m", "pipeline", "train"])
        threads = str(max(1, len(os.sched_getaffinity(0)) // parallel))
        self._environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}

    async def run(self, training: Training) -> Ended:
        await training.until_free()
        with open(training.log, "ab") as log:
            process = subprocess.Popen(
                [*self._launch, *training.words], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self._environment, preexec_fn=end_with_parent,
            )  # fmt: skip
        try:
            while process.poll() is None:
                await asyncio.sleep(self.poll_s)
        except asyncio.CancelledError:
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            while process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(self.poll_s)
            process.kill()
            raise
        return Ended(f"exit code {process.returncode}", process.returncode == USER_ERROR)


class SchedulerJobs:
    """Runs trainings as jobs. settings: as for `torchx run -cfg`. job_args: before `--`, such as [-j, 1x8]."""

    poll_s = 2.0

    def __init__(
        self, scheduler: str, settings: Mapping[str, Any], job_args: Sequence[str], name: str, runner: Runner | None = None
    ) -> None:  # fmt: skip
        """Raises ConfigError if TorchX does not have the scheduler, or the scheduler does not have a setting."""
        from torchx.runner import get_runner

        self._runner = runner or get_runner()
        known = list(self._runner.scheduler_backends())
        if scheduler not in known:
            hint = did_you_mean(scheduler, known)
            raise ConfigError(
                f"sweep.scheduler={scheduler} is not a scheduler of TorchX, which are {', '.join(known)}{hint}"
            )
        self._options = {name: option.opt_type for name, option in self._runner.scheduler_run_opts(scheduler)}
        for key in settings:
            if key not in self._options:
                raise ConfigError(
                    f"sweep.scheduler_args.{key}: unknown option of {scheduler}{did_you_mean(key, self._options)}; "
                    f"known are {', '.join(self._options)}"
                )
        self._settings = {key: str(value) if self._options[key] is str else value for key, value in settings.items()}
        self._scheduler, self._job_args = scheduler, list(job_args)
        self._name = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:MAX_NAME]

    async def run(self, training: Training) -> Ended:
        """Raise LaunchError if the scheduler refuses the job."""
        if not (handle := self._earlier(training)):
            await training.until_free()
            handle = self._submit(training)
        answered = time.monotonic()
        try:
            while True:
                try:
                    status = self._runner.status(handle)
                except Exception as error:
                    if time.monotonic() - answered > SILENT_S:
                        raise
                    logger.warning("the state of %s is unknown: %s", handle, " ".join(str(error).split())[:200])
                else:
                    answered = time.monotonic()
                    if status is None or status.is_terminal():
                        return Ended(f"{handle} {'is no longer known' if status is None else status.state.name}")
                await asyncio.sleep(self.poll_s)
        except asyncio.CancelledError:
            logger.info("%s keeps running; the same command follows it again", handle)
            raise

    def _earlier(self, training: Training) -> str:
        """Return the handle of an earlier sweep's job that still runs or waits, or ""."""
        path = f"{training.run_dir}.job"
        handle = storage.read_text(path).strip() if storage.is_file(path) else ""
        status = self._runner.status(handle) if handle else None
        if status is None or status.is_terminal():
            return ""
        logger.info("%s is still trained by %s", training.run_dir, handle)
        return handle

    def _submit(self, training: Training) -> str:
        name = f"{self._name}-{training.run_dir.rpartition('/')[2].replace('_', '-')}"
        own = [] if "--name" in self._job_args else ["--name", name]
        settings = dict(self._settings)
        if "output" in self._options:
            settings.setdefault("output", training.log)
        handle = self._runner.run_component(
            COMPONENT, [*own, *self._job_args, "--", *training.words], self._scheduler, settings
        )
        storage.publish_text(f"{training.run_dir}.job", f"{handle}\n")
        logger.info("%s is %s", training.run_dir, handle)
        return str(handle)
