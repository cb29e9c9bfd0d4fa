"""Compute which rows each stream reads at a step. The result depends only on seed and epoch; no
file is read.

The row groups of a split, in a seeded order, form one long order of N rows. It is cut into C
streams whose lengths differ by at most one row. A global batch of B rows takes B/C rows of each
stream, in the order of the streams. Rank r owns the streams [r*C/W, (r+1)*C/W). So ranks 0..W-1
together hold the same rows in the same order for every W that divides C, and (epoch, step) is the
complete position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ORDER_TAG, ROWS_TAG = 1, 2  # the two kinds of permutation have different keys
NUM_ROUNDS = 5


class Segment(NamedTuple):
    """Rows [start, stop) of a row group, numbered in the row group's shuffled order."""

    row_group: int
    start: int
    stop: int


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64: a bijection of 64-bit words, so distinct words stay distinct."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def keyed_permutation(size: int, *key: int) -> NDArray[np.int64]:
    """Return a permutation of range(size) that depends only on the key.

    numpy's Generator is not used, because its stream may change with a release, and a run resumed
    with another numpy must still read every row once. Multiply, add and xor-shift are bijections of
    k-bit words; words >= size are left out. Five rounds are random enough (see tests). np.argsort
    of hashes takes seven times as long.
    """
    state: NDArray[np.uint64] = np.zeros(1, np.uint64)
    for word in key:
        state = mix(state ^ np.uint64(word % 2**64))
    round_keys = mix(state + np.arange(2 * NUM_ROUNDS).astype(np.uint64)).astype(np.uint32).reshape(NUM_ROUNDS, 2)
    bits = max(1, (size - 1).bit_length())
    words = np.arange(2**bits, dtype=np.uint32)
    for factor, offset in round_keys:
        words *= factor | np.uint32(1)
        words += offset
        words &= np.uint32(2**bits - 1)
        words ^= words >> np.uint32((bits + 1) // 2)
    return words[words < size].astype(np.int64)


@lru_cache(maxsize=4)
def row_permutation(seed: int, epoch: int, row_group: int, num_rows: int) -> NDArray[np.int64]:
    """Return the order in which the rows of a row group are read, equal for all streams.

    The array is read-only.
    """
    permutation = keyed_permutation(num_rows, ROWS_TAG, seed, epoch, row_group)
    permutation.flags.writeable = False
    return permutation


def with_groups_together(permutation: NDArray[np.int64], groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the permutation of a row group's rows with the rows of each group next to each other,
    where the group's first row was. `groups` is in file order; rows of group 0 belong to no group."""
    permuted = groups[permutation]
    _, first, group = np.unique(permuted, return_index=True, return_inverse=True)
    places = np.where(permuted == 0, np.arange(len(permuted)), first[group])
    return permutation[np.argsort(places, kind="stable")]


def num_steps(num_rows: int, global_batch_size: int, num_streams: int, drop_last: bool) -> int:
    """Return the number of steps of an epoch, which is equal for all ranks and epochs.

    With drop_last, fewer than global_batch_size rows are left out. Without it, the last step has
    the remaining rows.
    """
    rows_of_a_step = global_batch_size // num_streams
    shortest, longest = num_rows // num_streams, -(-num_rows // num_streams)
    return shortest // rows_of_a_step if drop_last else -(-longest // rows_of_a_step)


@dataclass(frozen=True)
class EpochOrder:
    """The order of one epoch's rows.

    shuffled: row groups are in a seeded permutation; stream c owns the rows [c*N//C, (c+1)*N//C) of
    it. not shuffled: the file order is cut into rounds. A round has one range for each of the C
    streams, each as long as the longest row group. The remaining rows are divided evenly. A step
    then holds C pieces from one round (C row groups) of the file order, and rounds follow the file
    order.
    """

    row_group_sizes: Sequence[int]
    num_streams: int
    seed: int
    epoch: int
    shuffled: bool

    def segments(self, stream: int, skip_rows: int = 0) -> Iterator[Segment]:
        """Yield the stream's segments in order. The first `skip_rows` rows of the stream are skipped."""
        order = self._row_group_order()
        ends = np.cumsum(np.asarray(self.row_group_sizes, dtype=np.int64)[order])
        for start, stop in self._stretches(stream):
            start, skip_rows = start + skip_rows, max(0, skip_rows - (stop - start))
            position = int(np.searchsorted(ends, start, side="right"))
            while start < stop:
                row_group = int(order[position])
                begins = int(ends[position]) - self.row_group_sizes[row_group]
                until = min(stop, int(ends[position]))
                if until > start:
                    yield Segment(row_group, start - begins, until - begins)
                start, position = until, position + 1

    def _row_group_order(self) -> NDArray[np.int64]:
        if not self.shuffled:
            return np.arange(len(self.row_group_sizes))
        return keyed_permutation(len(self.row_group_sizes), ORDER_TAG, self.seed, self.epoch)

    def _stretches(self, stream: int) -> Iterator[tuple[int, int]]:
        num_rows, streams = sum(self.row_group_sizes), self.num_streams
        round_start = 0
        if not self.shuffled:
            stretch = max(self.row_group_sizes)
            while num_rows - round_start >= stretch * streams:
                start = round_start + stream * stretch
                yield start, start + stretch
                round_start += stretch * streams
        remaining = num_rows - round_start
        yield round_start + stream * remaining // streams, round_start + (stream + 1) * remaining // streams
