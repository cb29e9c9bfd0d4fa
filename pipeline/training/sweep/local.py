"""Run trainings of a sweep as processes of this machine, which end with the sweep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from pipeline.runtime.process.exit_codes import USER_ERROR
from pipeline.runtime.process.processes import end_with_parent
from pipeline.training.sweep.pool import Training

GRACE_S = 35.0  # for trainings that are asked to save and end


class LocalProcesses:
    """`launch`: the words before a training's own; None: this Python's `-m pipeline train`. Each gets its share of the cores."""

    poll_s = 0.2

    def __init__(self, parallel: int, launch: Sequence[str] | None) -> None:
        self._launch = list(launch or [sys.executable, "-m", "pipeline", "train"])
        threads = str(max(1, len(os.sched_getaffinity(0)) // parallel))
        self._environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # by run folder

    def take_up(self, training: Training) -> bool:
        return False  # those of a sweep that was killed have ended with it

    def start(self, training: Training) -> None:
        with open(training.log, "ab") as log:
            self._processes[training.run_dir] = subprocess.Popen(
                [*self._launch, *training.words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                preexec_fn=end_with_parent,
            )

    def update(self, training: Training) -> None:
        code = self._processes[training.run_dir].poll()
        if code is not None:
            training.ended, training.is_mistake = f"exit code {code}", code == USER_ERROR

    def close(self, running: Sequence[Training]) -> None:
        """Ask all to save and end; those that do not in time are killed."""
        processes = [self._processes[training.run_dir] for training in running]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
