"""Run at most one save in a thread while training continues. wait() raises its failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future


class InFlight:
    """A thread that the interpreter waits for at exit, so that a started save is committed."""

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        self.step, self.started = step, time.monotonic()
        self._future: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"save-{step}")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # wait() raises it again on the training thread
            self._future.set_exception(error)
        else:
            self._future.set_result(None)

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        """Wait for the end of the work, and raise its exception."""
        self._thread.join()
        self._future.result()
