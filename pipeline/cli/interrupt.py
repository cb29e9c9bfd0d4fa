"""Print one line for Ctrl-C during imports, before a verb can handle it. Importing this module sets the hook."""

from __future__ import annotations

import sys
from types import TracebackType


def end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print one line for Ctrl-C. The exit status stays that of the signal."""
    if issubclass(kind, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = end_quietly
