"""Write what a command answers to stdout, for a reader that may leave early (stdlib only)."""

from __future__ import annotations

import os
import sys


def write_out(text: str) -> None:
    """Lines to stdout; that their reader has seen enough (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes as it ends
