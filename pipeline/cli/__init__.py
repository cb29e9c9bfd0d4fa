"""The command line: one thin file per verb, and the code that composes its job."""

from __future__ import annotations

import sys
from types import TracebackType


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Handle Ctrl-C during imports, before a verb can handle it: print one line. The exit status
    stays that of the signal."""
    if issubclass(kind, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _end_quietly
