"""Run trainings as processes of their own, some at a time, and end with them when this process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.runtime.process.processes import end_with_parent
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.lease import held_by

POLL_S = 0.2
GRACE_S = 35.0  # for trainings that are asked to save and end


@dataclass
class Training:
    """`words` after the command of a training; `log` takes what it prints."""

    run_dir: str
    words: list[str]
    log: str
    ttl_s: float = 120.0
    process: subprocess.Popen[bytes] | None = None
    attempts: int = 0


class Pool:
    """`launch`: the words before a training's own; None: this Python's `-m pipeline.train`."""

    def __init__(self, parallel: int, launch: Sequence[str] | None) -> None:
        self._parallel, self._launch = parallel, list(launch or [sys.executable, "-m", "pipeline.train"])
        self._running: list[Training] = []

    @property
    def has_room(self) -> bool:
        return len(self._running) < self._parallel

    def start(self, training: Training) -> None:
        """Waits while what an earlier sweep started still saves into the run folder."""
        while held_by(training.run_dir, training.ttl_s):
            time.sleep(POLL_S)
        storage.make_folder(training.run_dir)
        training.attempts += 1
        with open(training.log, "ab") as log:
            training.process = subprocess.Popen(
                [*self._launch, *training.words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", self._threads())},
                preexec_fn=end_with_parent,
            )
        self._running.append(training)

    def _threads(self) -> str:
        return str(max(1, len(os.sched_getaffinity(0)) // self._parallel))

    def wait(self) -> Training:
        """The next training that has ended. There must be one that runs."""
        assert self._running
        while True:
            for training in self._running:
                if training.process is not None and training.process.poll() is not None:
                    self._running.remove(training)
                    return training
            time.sleep(POLL_S)

    def close(self) -> None:
        """Ask all to save and end; those that do not in time are killed."""
        processes = [training.process for training in self._running if training.process is not None]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()
