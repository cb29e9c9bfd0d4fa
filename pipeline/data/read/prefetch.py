"""Read an iterator a few items ahead of its consumer, in a background thread."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
JOIN_TIMEOUT_S = 30.0


class _Buffer(Generic[Item]):
    """The state that consumer and thread share.

    It has no reference to the Prefetcher, so the thread stops when the Prefetcher is garbage
    collected.
    """

    def __init__(self, depth: int, on_stop: Callable[[], None]) -> None:
        self.depth, self.on_stop = depth, on_stop
        self.items: deque[Item] = deque()
        self.error: BaseException | None = None
        self.ended = False
        self.stopped = False
        self.changed = threading.Condition()

    def fill(self, source: Generator[Item, None, None]) -> None:
        """Run in the thread until the source ends or fails, or the consumer stops the thread."""
        try:
            for item in source:
                with self.changed:
                    self.changed.wait_for(lambda: self.stopped or len(self.items) < self.depth)
                    if self.stopped:
                        break
                    self.items.append(item)
                    self.changed.notify_all()
        except BaseException as error:  # the consumer raises it
            self.error = error
        finally:
            source.close()
            with self.changed:
                self.ended = True
                self.changed.notify_all()

    def stop(self, thread: threading.Thread) -> None:
        with self.changed:
            self.stopped = True
            self.items.clear()
            self.changed.notify_all()
        self.on_stop()
        if thread is not threading.current_thread():  # the garbage collector may run on any thread
            thread.join(JOIN_TIMEOUT_S)


class Prefetcher(Iterator[Item]):
    """Yields items of `source` in order. An exception in the thread is raised after the items
    before it, and by every later next().

    The thread ends with the source, at close(), when this object is garbage collected, and at
    interpreter exit. `waited` is called with the seconds that a next() had to wait. `on_stop` is
    called when no more items are needed, because the source may be waiting for something.
    """

    def __init__(
        self,
        source: Generator[Item, None, None],
        depth: int,
        name: str,
        waited: Callable[[float], None],
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._buffer: _Buffer[Item] = _Buffer(depth, on_stop)
        self._waited = waited
        thread = threading.Thread(target=self._buffer.fill, args=(source,), name=name, daemon=True)
        thread.start()
        self._stop = weakref.finalize(self, self._buffer.stop, thread)

    def __next__(self) -> Item:
        buffer = self._buffer
        with buffer.changed:
            if not buffer.items and not buffer.ended:
                began = time.perf_counter()
                buffer.changed.wait_for(lambda: buffer.items or buffer.ended)
                self._waited(time.perf_counter() - began)
            if buffer.items:
                item = buffer.items.popleft()
                buffer.changed.notify_all()
                return item
        if buffer.error is not None and not buffer.stopped:
            raise buffer.error
        raise StopIteration

    def close(self) -> None:
        """Stop the thread and drop the items read ahead. Later next() calls raise StopIteration."""
        self._stop()
