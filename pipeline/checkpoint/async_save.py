"""Run a save in a thread while training goes on: one at most, whose failure wait() raises."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future


class InFlight:
    """A thread that the interpreter waits for when it exits, so that a save that has begun is committed."""

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        self.step, self.started = step, time.monotonic()
        self._future: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"save-{step}")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised anew by wait(), on the thread that trains
            self._future.set_exception(error)
        else:
            self._future.set_result(None)

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        """Raises what the work raised."""
        self._thread.join()
        self._future.result()
