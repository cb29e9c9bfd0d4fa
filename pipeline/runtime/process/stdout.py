"""Write what a command answers to stdout, for a reader that may leave early (stdlib only)."""

from __future__ import annotations

import os
import sys

from pipeline.runtime.masking import printable


def write_out(text: str) -> None:
    """Print lines to stdout with control characters escaped. A reader that leaves early (`| head`) is not an error."""
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes as it ends
