"""Run trainings of a sweep as jobs of a scheduler (Slurm, Kubernetes, ...), submitted and followed through TorchX.

A job's handle lies beside its run folder, in <run_dir>.job. Jobs outlive a sweep that is killed or interrupted: the same command
takes them up again. A job that its scheduler requeues is still the same job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.runtime.errors import ConfigError, did_you_mean
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage
from pipeline.training.sweep.pool import Training

if TYPE_CHECKING:
    from torchx.runner import Runner
    from torchx.specs import AppStatus

COMPONENT = "pipeline.train"
NAME_ROOM = 40  # characters that schedulers leave for a job's name, less the trial's
SILENT_S = 600.0  # a scheduler that cannot be asked for so long ends the sweep
logger = get_logger("pipeline.sweep")


class SchedulerJobs:
    """settings: what `torchx run -cfg` takes. job_args: of the component, before its `--`: [-j, 1x8]."""

    poll_s = 2.0

    def __init__(
        self, scheduler: str, settings: Mapping[str, Any], job_args: Sequence[str], name: str, runner: Runner | None = None
    ) -> None:  # fmt: skip
        """Raises ConfigError for a scheduler, or a setting of it, that TorchX does not have."""
        from torchx.runner import get_runner

        self._runner = runner or get_runner()
        known = list(self._runner.scheduler_backends())
        if scheduler not in known:
            raise ConfigError(
                f"sweep.scheduler={scheduler} is none of TorchX's, which are {', '.join(known)}{did_you_mean(scheduler, known)}"
            )
        self._options = self._runner.scheduler_run_opts(scheduler)
        self._scheduler = scheduler
        self._settings = self._typed(settings)
        self._job_args, self._name = list(job_args), re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:NAME_ROOM]
        self._handles: dict[str, str] = {}  # by run folder
        self._answered = time.monotonic()

    def _typed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """As the scheduler's options want them: texts, but for numbers and truths."""
        known, typed = {name: option.opt_type for name, option in self._options}, {}
        for name, value in settings.items():
            if name not in known:
                raise ConfigError(
                    f"sweep.scheduler_args.{name}: {self._scheduler} has no such option{did_you_mean(name, known)}; it has "
                    f"{', '.join(known)}"
                )
            typed[name] = str(value) if known[name] is str else value
        return typed

    def take_up(self, training: Training) -> bool:
        path = f"{training.run_dir}.job"
        if training.run_dir in self._handles or not storage.is_file(path):
            return False
        handle = storage.read_text(path).strip()
        status = self._runner.status(handle)
        if status is None or status.is_terminal():
            return False
        self._handles[training.run_dir] = handle
        logger.info("%s goes on as %s", training.run_dir, handle)
        return True

    def start(self, training: Training) -> None:
        """Raises LaunchError where the scheduler refuses the job; a job that does not compose ends the process with its line."""
        name = f"{self._name}-{training.run_dir.rpartition('/')[2].replace('_', '-')}"
        own = [] if "--name" in self._job_args else ["--name", name]
        settings = dict(self._settings)
        if any(option == "output" for option, _ in self._options):
            settings.setdefault("output", training.log)
        handle = self._runner.run_component(
            COMPONENT, [*own, *self._job_args, "--", *training.words], self._scheduler, settings
        )
        storage.publish_text(f"{training.run_dir}.job", f"{handle}\n")
        self._handles[training.run_dir] = str(handle)
        logger.info("%s is %s", training.run_dir, handle)

    def update(self, training: Training) -> None:
        """A scheduler that does not answer is asked again, for SILENT_S."""
        handle = self._handles[training.run_dir]
        try:
            status = self._runner.status(handle)
        except Exception as error:
            if time.monotonic() - self._answered > SILENT_S:
                raise
            logger.warning("%s cannot be asked for: %s", handle, " ".join(str(error).split())[:200])
            return
        self._answered = time.monotonic()
        if status is None or status.is_terminal():
            training.ended = f"{handle} {_name_of(status)}"
            del self._handles[training.run_dir]

    def close(self, running: Sequence[Training]) -> None:
        if running:
            handles = ", ".join(self._handles[training.run_dir] for training in running)
            logger.info("%d trainings run on as jobs, and the same command takes them up: %s", len(running), handles)
        self._runner.close()


def _name_of(status: AppStatus | None) -> str:
    return "is not known any more" if status is None else str(status.state.name)
