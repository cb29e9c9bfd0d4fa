"""Handle SIGTERM, with which Slurm and Kubernetes announce the end, as a request that the run obeys where it can save.

Where nothing can be lost yet (start-up) the process ends at once, with the code for `run it again`. Inside
`deferred()` the handler only notes the wish: all ranks agree on it at a step edge. A second SIGTERM changes nothing.
Ctrl-C is such a request too while a training is stepping; a second one ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from pipeline.runtime.process.exit_codes import REQUEUE

_wanted = False
_interrupted = False
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


def interrupted() -> bool:
    """Whether Ctrl-C was the request, inside deferred(interrupts=True)."""
    return _interrupted


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
    global _wanted, _arrived_at, _interrupted
    _wanted, _arrived_at, _interrupted = False, None, False


def when_requested(call: Callable[[], None]) -> None:
    """`call` runs inside the signal handler, on the main thread: it must be short and take no lock."""
    _on_request.append(call)


def _handle(signum: int, frame: FrameType | None) -> None:
    is_first = not wanted()
    request()
    if is_first and not _num_deferring:
        raise Preempted


def _handle_interrupt(signum: int, frame: FrameType | None) -> None:
    """No grace runs: nobody kills the process soon."""
    global _wanted, _interrupted
    if _interrupted:
        raise KeyboardInterrupt
    _wanted = _interrupted = True
    os.write(2, b"\ninterrupted: the next step is saved, then the run ends; Ctrl-C again ends it at once\n")


@contextmanager
def deferred(interrupts: bool = False) -> Iterator[None]:
    """While it lasts SIGTERM is only noted, and with `interrupts` the first Ctrl-C. A process that does not listen() forgets
    both afterwards."""
    global _num_deferring
    on_main = threading.current_thread() is threading.main_thread()  # only there can handlers be set
    before = signal.signal(signal.SIGTERM, _handle) if on_main else None
    takes_interrupts = on_main and interrupts and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if takes_interrupts:
        signal.signal(signal.SIGINT, _handle_interrupt)
    _num_deferring += 1
    try:
        yield
    finally:
        _num_deferring -= 1
        if takes_interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if on_main and before is not _handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
            withdraw()
