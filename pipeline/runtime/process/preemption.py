"""Handle SIGTERM, with which Slurm and Kubernetes announce the end, as a request to save and stop.

During start-up nothing can be lost, so the process ends at once with the code for "run it again".
Inside `deferred()` the handler only stores the request, and all ranks agree on it between two
steps. A second SIGTERM changes nothing. While a training runs, Ctrl-C is such a request too; a
second Ctrl-C ends the process at once.
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
# time.monotonic(); earlier than `_wanted` if the main thread is busy outside Python
_arrived_at: float | None = None
_num_deferring = 0
_on_request: list[Callable[[], None]] = []


class Preempted(SystemExit):
    """End the process with the requeue code. Raised if no step has to be saved first."""

    def __init__(self) -> None:
        super().__init__(REQUEUE)


def listen() -> None:
    """Handle SIGTERM. Raises ConfigError outside the main thread, because signal.signal does."""
    signal.signal(signal.SIGTERM, _handle)


def wanted() -> bool:
    return _wanted


def interrupted() -> bool:
    """Return True if the request came from Ctrl-C, inside deferred(interrupts=True)."""
    return _interrupted


def seconds_since_arrival() -> float:
    """Return the seconds since the first SIGTERM; 0.0 if none has arrived."""
    return 0.0 if _arrived_at is None else time.monotonic() - _arrived_at


def note_arrival() -> None:
    """Start the grace period. Any thread may call this."""
    global _arrived_at
    _arrived_at = time.monotonic() if _arrived_at is None else _arrived_at


def request() -> None:
    """Request a stop as a signal does. A second call changes nothing."""
    global _wanted
    note_arrival()
    if not _wanted:
        _wanted = True
        for call in _on_request:
            call()


def withdraw() -> None:
    """Remove the request, for a process that outlives its run."""
    global _wanted, _arrived_at, _interrupted
    _wanted, _arrived_at, _interrupted = False, None, False


def when_requested(call: Callable[[], None]) -> None:
    """Run `call` in the signal handler, on the main thread. It must be short and take no lock."""
    _on_request.append(call)


def _handle(signum: int, frame: FrameType | None) -> None:
    is_first = not wanted()
    request()
    if is_first and not _num_deferring:
        raise Preempted


def _handle_interrupt(signum: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C. There is no grace period, because nothing kills the process soon."""
    global _wanted, _interrupted
    if _interrupted:
        raise KeyboardInterrupt
    _wanted = _interrupted = True
    os.write(2, b"\ninterrupted: the run saves the next step and ends; press Ctrl-C again to end it at once\n")


@contextmanager
def deferred(interrupts: bool = False) -> Iterator[None]:
    """Only store a SIGTERM, and with `interrupts` the first Ctrl-C.

    A process that does not listen() drops both requests afterwards.
    """
    global _num_deferring
    # only the main thread can set handlers
    on_main = threading.current_thread() is threading.main_thread()
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
