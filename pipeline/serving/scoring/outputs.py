"""Say which columns a prediction writes: scores, vectors, or the best items of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from pipeline.serving.scoring.scorer import Scorer, score_columns

if TYPE_CHECKING:
    from pipeline.serving.retrieval.items import Items
    from pipeline.serving.retrieval.queries import Found


class Output(Protocol):
    """Of one scorer: `fields` are the columns that it gives."""

    fields: list[pa.Field]

    def empty(self, num_rows: int) -> np.ndarray:
        """What rows without a score have in the place of one."""

    def arrays(self, scores: np.ndarray, without: np.ndarray) -> Sequence[pa.Array]:
        """By `fields`, of scores as the scorer gives them; null where `without`, bool [num_rows]."""


class ScoreOutput:
    """One number a row, or one for each label."""

    def __init__(self, names: Sequence[str]) -> None:
        self.fields = [pa.field(name, pa.float32()) for name in names]

    def empty(self, num_rows: int) -> np.ndarray:
        return np.full((num_rows, len(self.fields)), np.nan, np.float32)

    def arrays(self, scores: np.ndarray, without: np.ndarray) -> Sequence[pa.Array]:
        return [pa.array(scores[:, number], mask=without) for number in range(len(self.fields))]


class VectorOutput:
    """A vector of `dim` a row."""

    def __init__(self, dim: int) -> None:
        self.dim, self.fields = dim, [pa.field("vector", pa.list_(pa.float32()))]

    def empty(self, num_rows: int) -> np.ndarray:
        return np.full((num_rows, self.dim), np.nan, np.float32)

    def arrays(self, scores: np.ndarray, without: np.ndarray) -> Sequence[pa.Array]:
        ends = np.arange(len(scores) + 1, dtype=np.int32) * self.dim
        offsets = pa.array(ends, mask=np.append(without, False))
        return [pa.ListArray.from_arrays(offsets, pa.array(scores.reshape(-1)))]


class ItemsOutput:
    """The best items of a row, and their scores."""

    def __init__(self, items: Items) -> None:
        self._items = items
        self.fields = [pa.field("items", pa.list_(pa.string())), pa.field("scores", pa.list_(pa.float32()))]

    def empty(self, num_rows: int) -> np.ndarray:
        return np.full(num_rows, None, object)

    def arrays(self, scores: np.ndarray, without: np.ndarray) -> Sequence[pa.Array]:
        found: list[Found | None] = list(scores)
        lengths = [0 if each is None else len(each.positions) for each in found]
        ends = np.cumsum([0, *lengths]).astype(np.int32)
        offsets = pa.array(ends, mask=np.append(without, False))
        positions = np.concatenate([np.zeros(0, np.int64), *(each.positions for each in found if each is not None)])
        numbers = np.concatenate([np.zeros(0, np.float32), *(each.scores for each in found if each is not None)])
        texts = self._items.values_at(positions).cast(pa.string())
        return [pa.ListArray.from_arrays(offsets, texts), pa.ListArray.from_arrays(offsets, pa.array(numbers))]


def output_of(scorer: Scorer) -> Output:
    """Scores, unless the scorer says otherwise by an `output` of its own."""
    own: Any = getattr(scorer, "output", None)
    return own if own is not None else ScoreOutput(score_columns(scorer.tasks))
