"""Turn how a table's lookups fall on its ids into how they fall on the rows of its parts (stdlib only)."""

from __future__ import annotations

from bisect import bisect_right

from pipeline.embeddings.compression.partitions import Digit, Given, Hashed, Partition
from pipeline.embeddings.row_frequencies import RowFrequencies

POINTS = 64  # of a part's curve, at most
TERMS = 4096  # of the ids that share a row, at most so many are added up one by one


def share_of_first(frequencies: RowFrequencies, num_ids: float) -> float:
    """Of a table's lookups, those of its `num_ids` most frequent ids."""
    rows, shares = frequencies.rows, frequencies.shares
    after = bisect_right(rows, num_ids)
    if after == 0:
        return 0.0
    if after == len(rows):
        return shares[-1]
    left, right = rows[after - 1], rows[after]
    return shares[after - 1] + (shares[after] - shares[after - 1]) * (num_ids - left) / (right - left)


def frequencies_of_part(
    frequencies: RowFrequencies | None, partition: Partition, num_ids: int
) -> RowFrequencies | None:
    """Of the rows of a part, None where nothing is known of the table or of how its ids are assigned."""
    if frequencies is None or isinstance(partition, Given):
        return None
    points = _points(partition.num_classes)
    if isinstance(partition, Hashed) or not frequencies.by_row:
        # The hottest ids lie in rows of their own, mostly; the others are even over all rows.
        shares = [
            first + (1 - first) * row / partition.num_classes
            for row in points
            for first in [share_of_first(frequencies, row)]
        ]
        return RowFrequencies(points, shares, by_row=False)
    return RowFrequencies(points, [_share_of_digits(frequencies, partition, row, num_ids) for row in points])


def frequencies_of_block(frequencies: RowFrequencies | None, first: int, end: int) -> RowFrequencies | None:
    """Of the ids first .. end - 1, which are rows of a table of their own."""
    if frequencies is None or not frequencies.by_row:
        return None
    before, all_ = share_of_first(frequencies, first), share_of_first(frequencies, end)
    if all_ <= before:
        return None
    points = _points(end - first)
    return RowFrequencies(
        points, [(share_of_first(frequencies, first + row) - before) / (all_ - before) for row in points]
    )


def share_of_block(frequencies: RowFrequencies | None, first: int, end: int, num_ids: int) -> float:
    """Of a table's lookups, those of ids first .. end - 1; even over ids where nothing is known, or ids are hashed."""
    if frequencies is None or not frequencies.by_row:
        return (end - first) / num_ids
    return share_of_first(frequencies, end) - share_of_first(frequencies, first)


def _share_of_digits(frequencies: RowFrequencies, digit: Digit, row: int, num_ids: int) -> float:
    """Lookups of the ids whose class is below `row`: a run of row * stride ids in every stride * num_classes."""
    period = digit.stride * digit.num_classes
    runs = min(-(-num_ids // period), TERMS)
    share = sum(
        share_of_first(frequencies, begin + row * digit.stride) - share_of_first(frequencies, begin)
        for begin in range(0, runs * period, period)
    )
    rest = 1 - share_of_first(frequencies, runs * period)  # ids so rare that they are as good as even
    return min(1.0, share + rest * row / digit.num_classes)


def _points(num_rows: int) -> list[int]:
    """0, 1, 2, 4, ... and num_rows, with steps between where there is room."""
    points, row = {0, num_rows}, 1.0
    factor = max(1.2, num_rows ** (1 / (POINTS - 2))) if num_rows > 1 else 2.0
    while row < num_rows:
        points.add(int(row))
        row = max(row + 1, row * factor)
    return sorted(points)
