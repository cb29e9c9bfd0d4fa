"""A tick that is killed right before its change of files number N, or counts its changes:

python -m tests.retraining.kill_worker N FILE WORD ...     N 0: it is not killed, and writes the count to FILE
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.retraining.tick import retrain
from tests.support.kills import before_each_change_of_files


def run(number: int, file: str, words: list[str]) -> None:
    numbers, reached = itertools.count(1), 0

    def operation() -> None:
        nonlocal reached
        reached = next(numbers)
        if reached == number:
            os.kill(os.getpid(), signal.SIGKILL)

    before_each_change_of_files(operation)
    retrain(load_config(RetrainJob, words))
    Path(file).write_text(str(reached))


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
