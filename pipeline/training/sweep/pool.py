"""Run trainings, some at a time: as processes of this machine, or as jobs of a scheduler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.config.sweep import SweepConfig
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.lease import held_by

LEASE_POLL_S = 0.2


@dataclass
class Training:
    """`words` after the command of a training; `log` takes what it prints. ended: how it ended, in words; empty while it runs."""

    run_dir: str
    words: list[str]
    log: str
    ttl_s: float = 120.0
    attempts: int = 0
    ended: str = ""
    is_mistake: bool = False  # it ended by an error that another start would not change


class Launcher(Protocol):
    """Starts trainings and sees how they end."""

    poll_s: float

    def take_up(self, training: Training) -> bool:
        """Whether an earlier sweep started this training and it still runs or waits, so that it need not be started."""

    def start(self, training: Training) -> None: ...

    def update(self, training: Training) -> None:
        """Set `ended` of one that has ended since."""

    def close(self, running: Sequence[Training]) -> None:
        """The sweep ends while these run."""


def launcher_of(config: SweepConfig, name: str) -> Launcher:
    """`name`: of the sweep, with which its jobs' names begin. Raises ConfigError for a scheduler that TorchX does not have."""
    if config.scheduler is None:
        from pipeline.training.sweep.local import LocalProcesses

        return LocalProcesses(config.parallel, config.launch)
    from pipeline.training.sweep.jobs import SchedulerJobs

    return SchedulerJobs(config.scheduler, config.scheduler_args, config.job_args, name)


class Pool:
    def __init__(self, parallel: int, launcher: Launcher) -> None:
        self._parallel, self._launcher = parallel, launcher
        self._running: list[Training] = []

    @property
    def has_room(self) -> bool:
        return len(self._running) < self._parallel

    def start(self, training: Training) -> None:
        """Waits while what an earlier sweep started still saves into the run folder."""
        training.attempts, training.ended, training.is_mistake = training.attempts + 1, "", False
        if not self.take_up(training):
            while held_by(training.run_dir, training.ttl_s):
                time.sleep(LEASE_POLL_S)
            storage.make_folder(training.run_dir)
            self._launcher.start(training)
            self._running.append(training)

    def take_up(self, training: Training) -> bool:
        """Whether an earlier sweep's job trains this already; it is then among those that run."""
        is_there = self._launcher.take_up(training)
        if is_there:
            self._running.append(training)
        return is_there

    def wait(self) -> Training:
        """The next training that has ended. There must be one that runs."""
        assert self._running
        while True:
            for training in self._running:
                self._launcher.update(training)
                if training.ended:
                    self._running.remove(training)
                    return training
            time.sleep(self._launcher.poll_s)

    def close(self) -> None:
        self._launcher.close(self._running)
        self._running.clear()
