"""The arithmetic of streams: every row once, balanced, and the same whatever the numpy release."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.data import check_batch_geometry
from pipeline.data.read.streams import EpochOrder, keyed_permutation, num_steps
from pipeline.runtime.errors import ConfigError
from tests.support.examples import examples
from tests.support.messages import names

orders = st.builds(
    EpochOrder,
    row_group_sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    num_streams=st.integers(1, 8),
    seed=st.integers(-(2**40), 2**40),
    epoch=st.integers(0, 3),
    shuffled=st.booleans(),
)


def rows_of(order: EpochOrder, stream: int, skip_rows: int = 0) -> list[tuple[int, int]]:
    segments = order.segments(stream, skip_rows)
    return [(group, row) for group, start, stop in segments for row in range(start, stop)]


@given(orders)
@examples(100)
def test_streams_share_out_every_row_once_and_evenly(order: EpochOrder) -> None:
    streams = [rows_of(order, stream) for stream in range(order.num_streams)]
    every_row = [(group, row) for group, size in enumerate(order.row_group_sizes) for row in range(size)]
    assert sorted(row for rows in streams for row in rows) == every_row
    lengths = [len(rows) for rows in streams]
    assert min(lengths) == len(every_row) // order.num_streams
    assert max(lengths) - min(lengths) <= 1


@given(orders, st.integers(0, 40), st.integers(0, 7))
@examples(100)
def test_a_stream_can_be_entered_at_any_row(order: EpochOrder, skip_rows: int, stream: int) -> None:
    stream %= order.num_streams
    assert rows_of(order, stream, skip_rows) == rows_of(order, stream)[skip_rows:]


def test_without_shuffle_streams_follow_the_file_order_round_by_round() -> None:
    order = EpochOrder([4, 4, 4, 3, 1, 4, 2], num_streams=2, seed=0, epoch=0, shuffled=False)
    starts = np.cumsum([0, *order.row_group_sizes])
    streams = [[int(starts[group]) + row for group, row in rows_of(order, stream)] for stream in range(2)]
    assert streams == [[0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18], [4, 5, 6, 7, 12, 13, 14, 15, 19, 20, 21]]


def test_permutations_are_pinned_since_a_resumed_job_must_read_each_row_once() -> None:
    assert keyed_permutation(10, 1, 2, 3).tolist() == [7, 2, 1, 6, 8, 0, 5, 4, 9, 3]
    assert keyed_permutation(3, 0).tolist() == [1, 2, 0]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9, 1000])
def test_a_permutation_holds_every_number_once(size: int) -> None:
    assert sorted(keyed_permutation(size, 5, 6)) == list(range(size))


def test_permutations_of_other_keys_are_independent_and_uniform() -> None:
    size, bins = 4096, 16
    places = np.arange(size)
    cells = np.zeros((bins, bins))
    correlations = []
    for key in range(200):
        permutation = keyed_permutation(size, 2, key)
        cells += np.histogram2d(places, permutation, bins=bins)[0]
        correlations.append(np.corrcoef(permutation, keyed_permutation(size, 2, key + 1))[0, 1])
    expected = 200 * size / bins**2
    # chi-square with 225 degrees of freedom: mean 225, standard deviation 21
    assert ((cells - expected) ** 2 / expected).sum() < 225 + 5 * 21
    assert abs(np.mean(correlations)) < 5 / np.sqrt(200 * size)
    assert np.max(np.abs(correlations)) < 5 / np.sqrt(size)


def test_steps_drop_less_than_one_global_batch_or_none() -> None:
    for num_rows in range(1, 200):
        dropping, padding = num_steps(num_rows, 24, 8, True), num_steps(num_rows, 24, 8, False)
        assert 0 <= num_rows - dropping * 24 < 24
        assert 0 <= padding * 24 - num_rows < 24


def test_streams_that_ranks_cannot_share_are_refused_with_the_nearest_choices() -> None:
    with pytest.raises(ConfigError, match=names("16 15 18")):
        check_batch_geometry(4096, 16, 3)


def test_a_batch_that_streams_cannot_share_is_refused_with_the_nearest_choices() -> None:
    with pytest.raises(ConfigError, match=names("1000 num_streams=16 992 1008 num_streams=20")):
        check_batch_geometry(1000, 16, 4)
