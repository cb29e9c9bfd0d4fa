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
    """Constraints. `allowed`: only these items; None: all. `excluded`: none of these.

    Raw values; unknown items are ignored.
    """

    k: int
    allowed: tuple[str, ...] | None = None
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Queries:
    """Rows of users, and their `wishes`: (number of rows, their constraints) one after the other,
    for all rows.
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
    """The result of one user, best first: `positions` among the artifact's items [n], `scores` [n]
    float32; n <= k.
    """

    positions: NDArray[np.int64]
    scores: NDArray[np.float32]
