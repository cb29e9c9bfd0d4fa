"""Define the input of a retriever: raw rows of users, how many items to find for each, and which
items are allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pipeline.serving.scoring.scorer import ColumnLists, concat_rows


@dataclass(frozen=True)
class Wish:
    """Constraints on the items. `allowed`: return only these items; None: all. `excluded`: do not
    return these items. Items are given as raw values; unknown items are ignored.
    """

    k: int
    allowed: tuple[str, ...] | None = None
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Queries:
    """Rows of users, and their `wishes`: a list of (number of rows, constraints of these rows) that
    covers all rows in order.
    """

    rows: ColumnLists
    wishes: Sequence[tuple[int, Wish]]

    @property
    def num_rows(self) -> int:
        return self.rows.num_rows

    def slice(self, begin: int, length: int) -> Queries:
        rows, wishes, first = self.rows.slice(begin, length), [], 0
        for count, wish in self.wishes:
            shared = min(first + count, begin + rows.num_rows) - max(first, begin)
            if shared > 0:
                wishes.append((shared, wish))
            first += count
        return Queries(rows, wishes)

    @staticmethod
    def concat_requests(parts: Sequence[Queries]) -> Queries:
        """Join the queries of several requests to one artifact."""
        rows = concat_rows([part.rows for part in parts])
        assert isinstance(rows, ColumnLists)
        return Queries(rows, list(chain.from_iterable(part.wishes for part in parts)))


@dataclass(frozen=True)
class Found:
    """The items found for one user, best first: `positions` [n] in the artifact's list of items,
    and `scores` [n] float32; n <= k.
    """

    positions: NDArray[np.int64]
    scores: NDArray[np.float32]
