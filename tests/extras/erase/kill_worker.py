"""Erase, and end this process by SIGKILL at the n-th rename:  python -m tests.extras.erase.kill_worker N KEY=VALUE ..."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from pipeline.cli.command_line import load_config
from pipeline.extras.erase.config import EraseJob
from pipeline.extras.erase.run import erase

if __name__ == "__main__":
    left, rename = int(sys.argv[1]), os.rename

    def rename_or_die(*words: Any, **options: Any) -> None:
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*words, **options)

    os.rename = rename_or_die  # type: ignore[assignment]
    erase(load_config(EraseJob, sys.argv[2:]))
