"""Compute the position of each row of an evaluation batch in the files of its split.

A row's position is its number in the order of the files. It does not depend on seed, batch size,
number of streams or number of ranks, so results of two models can be paired by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pipeline.data.read.streams import EpochOrder, row_permutation

PADDING = -1  # the position of a padding row


def batch_positions(
    order: EpochOrder, streams: Sequence[int], rows_per_stream: int, num_steps: int
) -> Iterator[NDArray[np.int64]]:
    """Yield positions [len(streams) * rows_per_stream] for each step, in the same order as the
    batches that a reader makes of these streams.
    """
    firsts = [0, *accumulate(order.row_group_sizes)]
    readers = [_Stream(order, stream, firsts) for stream in streams]
    for _ in range(num_steps):
        yield np.concatenate([reader.take(rows_per_stream) for reader in readers])


class _Stream:
    """The positions of the rows of one stream. At most one row group's positions are in memory."""

    def __init__(self, order: EpochOrder, stream: int, firsts: Sequence[int]) -> None:
        self._order, self._firsts = order, firsts
        self._segments = order.segments(stream)
        self._rows = np.zeros(0, np.int64)

    def take(self, num_rows: int) -> NDArray[np.int64]:
        """Return the next [num_rows] positions, PADDING after the end of the stream."""
        taken = np.full(num_rows, PADDING, np.int64)
        filled = 0
        while filled < num_rows:
            if not len(self._rows):
                segment = next(self._segments, None)
                if segment is None:
                    break
                group, size = segment.row_group, self._order.row_group_sizes[segment.row_group]
                rows = np.arange(segment.start, segment.stop)
                if self._order.shuffled:
                    rows = row_permutation(self._order.seed, self._order.epoch, group, size)[rows]
                self._rows = rows + self._firsts[group]
            count = min(num_rows - filled, len(self._rows))
            taken[filled : filled + count] = self._rows[:count]
            self._rows, filled = self._rows[count:], filled + count
        return taken
