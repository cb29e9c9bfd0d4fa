"""The command line: one thin file a verb, and what composes its job."""

from __future__ import annotations

import sys
from types import TracebackType


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C while modules are imported, before a verb can handle it: a line. The interpreter ends as by the signal."""
    if issubclass(kind, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _end_quietly
