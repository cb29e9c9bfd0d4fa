"""Handle SIGTERM, with which Slurm and Kubernetes announce the end, as a request that the run obeys where it can save.

Where nothing can be lost yet (start-up) the process ends at once, with the code for `run it again`. Inside
`deferred()` the handler only notes the wish: all ranks agree on it at a step edge. A second SIGTERM changes nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from pipeline.runtime.process.exit_codes import REQUEUE

_wanted = False
_arrived_at: float | None = None  # time.monotonic(); before `_wanted` where the main thread is busy outside Python
_num_deferring = 0
_on_request: list[Callable[[], None]] = []


class Preempted(SystemExit):
    """Ends the process with the requeue code; raised where no step has to be saved first."""

    def __init__(self) -> None:
        super().__init__(REQUEUE)


def listen() -> None:
    """Take SIGTERM over. Raises ConfigError outside the main thread, as signal.signal does."""
    signal.signal(signal.SIGTERM, _handle)


def wanted() -> bool:
    return _wanted


def seconds_since_arrival() -> float:
    """0.0 as long as no SIGTERM has arrived."""
    return 0.0 if _arrived_at is None else time.monotonic() - _arrived_at


def note_arrival() -> None:
    """The grace runs from here; any thread may say so."""
    global _arrived_at
    _arrived_at = time.monotonic() if _arrived_at is None else _arrived_at


def request() -> None:
    """Ask as a signal does; a second time changes nothing."""
    global _wanted
    note_arrival()
    if not _wanted:
        _wanted = True
        for call in _on_request:
            call()


def withdraw() -> None:
    """Forget the wish: for a process that outlives its run."""
    global _wanted, _arrived_at
    _wanted, _arrived_at = False, None


def when_requested(call: Callable[[], None]) -> None:
    """`call` runs inside the signal handler, on the main thread: it must be short and take no lock."""
    _on_request.append(call)


def _handle(signum: int, frame: FrameType | None) -> None:
    is_first = not wanted()
    request()
    if is_first and not _num_deferring:
        raise Preempted


@contextmanager
def deferred() -> Iterator[None]:
    """While it lasts SIGTERM is only noted. A process that does not listen() forgets it afterwards."""
    global _num_deferring
    on_main = threading.current_thread() is threading.main_thread()  # only there can handlers be set
    before = signal.signal(signal.SIGTERM, _handle) if on_main else None
    _num_deferring += 1
    try:
        yield
    finally:
        _num_deferring -= 1
        if on_main and before is not _handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
            withdraw()
