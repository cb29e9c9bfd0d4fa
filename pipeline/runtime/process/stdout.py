"""Write the answer of a command to stdout, whose reader may close it early (stdlib only)."""

from __future__ import annotations

import os
import sys

from pipeline.runtime.masking import printable


def write_out(text: str) -> None:
    """Print lines to stdout with control characters escaped. A reader that leaves early (`| head`) is not an error."""
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        # for Python's last writes when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
