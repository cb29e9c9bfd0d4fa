"""Show answered requests to observers, which log, count or compare them, without delaying an answer.

A file registers settings, whose `make` returns the observer (`serve observers.<name>.<setting>=...`):

    @register("observer", "count_clients")
    @dataclass
    class CountClients:
        def make(self, metrics: ServerMetrics) -> Observer: ...

The event loop asks whether an observer wants a request, and appends it to a bounded queue. A thread
for each observer hands the requests over. What does not fit into the queue is dropped and counted, and an observer that raises
loses these requests, which are counted too: no answer is late or fails because of an observer.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.runtime.logs import get_logger
from pipeline.serving.http.batching import Asked, Scores, ServerMetrics

if TYPE_CHECKING:
    from pipeline.serving.http.switching import ServedModel

REQUEST_ID = "X-Request-ID"
ID = re.compile(r"[!-~]{1,128}")
QUEUED_ROWS = 1 << 16  # of requests that an observer has not taken yet
TAKE_S = 0.05  # between two calls of take()
CLOSE_S = 10.0  # an observer may take so long at the end
logger = get_logger(__name__)


@dataclass(frozen=True)
class Answered:
    """A request that was answered with scores. request_id: of the header X-Request-ID, or made here
    and sent back. at: seconds since 1970. rows: raw rows as they were parsed. scored: scores, the
    version (artifact, + and the delta), and what the rows were encoded as. model: what scored them;
    another thread may read its manifest and columns, and may not call its scorer.
    """

    request_id: str
    at: float
    rows: Asked
    scored: Scores
    model: ServedModel


class Observer(Protocol):
    """Gets answered requests."""

    def wants(self, answered: Answered) -> object:
        """Return True for a request that take() shall get, or what take() shall get instead of the
        request. Runs on the event loop: it must not wait.
        """
        ...

    def take(self, answered: Sequence[Any]) -> None:
        """Take requests in their order, at least every TAKE_S seconds, also if there are none. Runs
        on a thread of this observer.
        """
        ...

    def close(self) -> None:
        """End. Runs on the same thread, after the last take()."""
        ...


class ObserverSettings(Protocol):
    """The settings of a registered observer, a dataclass."""

    def make(self, metrics: ServerMetrics) -> Observer: ...


def id_of(given: str | None) -> str:
    """Return the request's id: the given one if it has 1 to 128 visible ASCII characters, otherwise a new one."""
    if given and ID.fullmatch(given):
        return given
    return (
        f"{random.getrandbits(128):032x}"  # uuid4 reads from the kernel, and lets go of the interpreter's lock for it
    )


class Observers:
    """The observers of one server. show() runs on the event loop."""

    def __init__(self, observers: Mapping[str, Observer], metrics: ServerMetrics) -> None:
        self._watched = [_Watched(name, observer, metrics) for name, observer in observers.items()]

    def __bool__(self) -> bool:
        return bool(self._watched)

    def show(self, answered: Answered) -> None:
        for each in self._watched:
            each.show(answered)

    def close(self) -> None:
        """Let each observer take what waits, and end it. Waits at most CLOSE_S for each."""
        for each in self._watched:
            each.close()


class _Watched:
    """One observer with its queue and its thread."""

    def __init__(self, name: str, observer: Observer, metrics: ServerMetrics) -> None:
        self._name, self._observer = name, observer
        self._drops = metrics.observer_drops.labels(name)
        self._failures = metrics.observer_failures.labels(name)
        self._waiting: deque[tuple[Any, int]] = deque()  # what take() gets, and rows
        self._shown_rows = self._taken_rows = 0  # each is written by one thread
        self._end = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._run, name=f"observer-{name}", daemon=True)
        self._thread.start()

    def show(self, answered: Answered) -> None:
        try:
            if not (wanted := self._observer.wants(answered)):
                return
        except Exception as error:
            self._fail(error, 1)
            return
        num_rows = max(1, answered.rows.num_rows)
        if self._shown_rows - self._taken_rows + num_rows > QUEUED_ROWS:
            self._drops.inc()
            return
        self._shown_rows += num_rows
        self._waiting.append((answered if wanted is True else wanted, num_rows))

    def _run(self) -> None:
        while not self._end.wait(TAKE_S):
            self._take()
        self._take()
        try:
            self._observer.close()
        except Exception as error:
            self._fail(error, 0)

    def _take(self) -> None:
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        try:
            self._observer.take([each for each, _ in taken])
        except Exception as error:
            self._fail(error, len(taken))
        self._taken_rows += sum(num_rows for _, num_rows in taken)

    def _fail(self, error: Exception, num_requests: int) -> None:
        self._failures.inc(num_requests)
        said = f"{type(error).__name__}: {error}"
        if said != self._said:
            logger.warning("the observer %s failed, requests are answered as before: %s", self._name, said)
        self._said = said

    def close(self) -> None:
        until = time.monotonic() + CLOSE_S
        self._end.set()
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("the observer %s has not ended within %.0f s", self._name, CLOSE_S)
