"""Look up the digits of an id: their frequencies, the ids of a bag one by one, and sums of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.embeddings.compression.kind import Bags
from pipeline.embeddings.row_frequencies import RowFrequencies, hashed_frequencies, points_of, share_of_first
from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torchrec.sparse.jagged_tensor import JaggedTensor

TERMS = 4096  # maximum number of ids of one row that are added up one by one


def digit_frequencies(
    frequencies: RowFrequencies | None, num_rows: int, stride: int, num_ids: int
) -> RowFrequencies | None:
    """Estimate the frequencies of a part's rows, where an id has row id // stride % num_rows.
    Return None if ids' frequencies are unknown.
    """
    if frequencies is None or not frequencies.by_row:
        return hashed_frequencies(frequencies, num_rows)
    points = points_of(num_rows)
    return RowFrequencies(points, [_share_of_digits(frequencies, num_rows, stride, row, num_ids) for row in points])


def _share_of_digits(frequencies: RowFrequencies, num_rows: int, stride: int, row: int, num_ids: int) -> float:
    """Return the share of ids whose digit is below `row`: these are row * stride ids of every stride * num_rows."""
    period = stride * num_rows
    runs = min(-(-num_ids // period), TERMS)
    share = sum(
        share_of_first(frequencies, begin + row * stride) - share_of_first(frequencies, begin)
        for begin in range(0, runs * period, period)
    )
    # these ids are so rare that they count as even
    remaining = 1 - share_of_first(frequencies, runs * period)
    return min(1.0, share + remaining * row / num_rows)


def by_slot(bags: Bags, slots: list[int], what: str) -> Iterator[tuple[int, Bags]]:
    """Yield the first id of all bags, then the second id, and so on. Bags with fewer ids are then
    empty.

    Raises:
        ConfigError: a bag has more ids than there are slots.
    """
    if (longest := int(bags.lengths.max(initial=0))) > len(slots):
        raise ConfigError(
            f"{what} has a list of {longest} ids, and compression.max_ids_per_bag={len(slots)}; raise it, or use "
            "operation=add or concatenate, which pool first"
        )
    import numpy as np

    from pipeline.embeddings.id_splitter import at

    begins = np.cumsum(bags.lengths, dtype=np.int64) - bags.lengths
    for slot in slots:
        present = bags.lengths > slot
        positions = begins[present] + slot
        yield slot, Bags(bags.ids[positions], present.astype(np.int32), at(bags.weights, positions))


def pool_rows(rows: torch.Tensor, bags: JaggedTensor) -> torch.Tensor:
    """Sum the rows [ids, D] of each bag in `bags`, and return [batch, D]. Rows are multiplied by
    the ids' weights, if any.
    """
    lengths, weights = bags.lengths(), bags.weights_or_none()
    if weights is not None:
        rows = rows * weights.unsqueeze(1)
    import torch

    samples = torch.repeat_interleave(torch.arange(len(lengths), device=rows.device), lengths, output_size=len(rows))
    return rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, samples, rows)
