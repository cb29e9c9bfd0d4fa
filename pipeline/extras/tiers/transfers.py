"""Read and write spans of many files at once, between the files and one buffer of the process.

Linux's native asynchronous I/O (io_submit) takes all spans of a step in one call. If a sandbox
forbids it, threads read and write one span each.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pipeline.extras.tiers.kernels import transfer as transfer_kernels
from pipeline.runtime.logs import get_logger

BUFFER_BYTES = 16 << 20
PIECE_BYTES = 8 << 20
# spans; the system's limit for all processes is 65,536 by default (fs.aio-max-nr), and counts these
# twice
AT_ONCE = 512
THREADS = 16
logger = get_logger(__name__)
Array = np.ndarray[Any, Any]


@dataclass
class Piece:
    """Hold spans of a file that are adjacent in the buffer and have at most PIECE_BYTES.

    use: called with the numbers after a read, or before a write to fill them. is_read: spans to
    write that also contain other records and are therefore read first. check: raises an error for
    an errno other than 0.
    """

    file: int
    offsets: Array
    sizes: Array
    use: Callable[[Array], None]
    check: Callable[[int], None]
    is_read: Array | None = None

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())


class Transfers:
    """Transfer pieces, for one thread at a time."""

    def __init__(self, asynchronous: bool = True) -> None:
        self._lock = threading.RLock()
        self._memory = mmap.mmap(-1, BUFFER_BYTES)  # begins at a page, as O_DIRECT requires
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._numbers = np.frombuffer(self._memory, np.float32)
        self._context = _context(AT_ONCE) if asynchronous else 0
        self._requests = np.zeros((AT_ONCE, transfer_kernels.REQUEST_NUMBERS), np.int64)
        self._pointers = np.zeros(AT_ONCE, np.int64)
        self._events = np.zeros((AT_ONCE, transfer_kernels.EVENT_NUMBERS), np.int64)
        self._threads = None if self._context else ThreadPoolExecutor(THREADS, thread_name_prefix="tier-io")

    def read(self, pieces: Sequence[Piece]) -> None:
        """Read the pieces. Raises the error of a piece's check."""
        with self._lock:
            for group in _groups(pieces):
                self._move(group, is_write=False)
                for piece, numbers in self._with_numbers(group):
                    piece.use(numbers)

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write the pieces. Raises the error of a piece's check."""
        with self._lock:
            for group in _groups(pieces):
                self._move(group, is_write=False, only_read=True)
                for piece, numbers in self._with_numbers(group):
                    piece.use(numbers)
                self._move(group, is_write=True)

    def _with_numbers(self, group: Sequence[Piece]) -> Iterator[tuple[Piece, Array]]:
        begin = 0
        for piece in group:
            end = begin + piece.num_bytes
            yield piece, self._numbers[begin // 4 : end // 4]
            begin = end

    def _move(self, group: Sequence[Piece], is_write: bool, only_read: bool = False) -> None:
        sizes = np.concatenate([piece.sizes for piece in group])
        offsets = np.concatenate([piece.offsets for piece in group])
        owners = np.repeat(np.arange(len(group)), [len(piece.sizes) for piece in group])
        files = np.array([piece.file for piece in group])[owners]
        addresses = self._bytes.ctypes.data + np.concatenate([[0], sizes.cumsum()[:-1]])
        if only_read:
            kept = np.concatenate([piece.is_read for piece in group])
            files, offsets, sizes, addresses = files[kept], offsets[kept], sizes[kept], addresses[kept]
            owners = owners[kept]
        span, error = self._first_failure(is_write, files, offsets, sizes, addresses)
        if error:
            group[owners[span]].check(error)

    def _first_failure(
        self, is_write: bool, files: Array, offsets: Array, sizes: Array, addresses: Array
    ) -> tuple[int, int]:
        """Return the first failed span and its errno; the errno is 0 if no span failed."""
        if not len(files):
            return 0, 0
        if self._threads is None:
            span, error = transfer_kernels.move_together(
                self._context, is_write, files, offsets, sizes, addresses, self._requests, self._pointers, self._events
            )
            return int(span), int(error)
        bounds = np.linspace(0, len(files), min(THREADS, len(files)) + 1).astype(np.int64)
        spans = (files, offsets, sizes, addresses)
        moves = [
            self._threads.submit(transfer_kernels.move_each, is_write, *spans, begin, end)
            for begin, end in itertools.pairwise(bounds)
        ]
        ended = [(int(span), int(error)) for span, error in [move.result() for move in moves]]
        return next((each for each in ended if each[1]), (0, 0))


def transfers() -> Transfers:
    """Return this process's transfers. A forked process has separate ones."""
    return _transfers_of(os.getpid())


@cache
def _transfers_of(process: int) -> Transfers:
    return Transfers()


def _context(at_once: int) -> int:
    """Return the context of io_setup, or 0 if the system forbids it."""
    if not transfer_kernels.HAS_REQUESTS:
        return 0
    context = ctypes.c_ulong(0)
    failed = ctypes.CDLL(None, use_errno=True).syscall(transfer_kernels.SETUP, at_once, ctypes.byref(context))
    if failed:
        why = os.strerror(ctypes.get_errno())
        logger.info("tiers use %d threads to read, because the system does not allow io_setup: %s", THREADS, why)
        return 0
    return context.value


def _groups(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield groups of pieces; a group has as many pieces as fit in the buffer."""
    group: list[Piece] = []
    held = 0
    for piece in pieces:
        if group and held + piece.num_bytes > BUFFER_BYTES:
            yield group
            group, held = [], 0
        group.append(piece)
        held += piece.num_bytes
    if group:
        yield group
