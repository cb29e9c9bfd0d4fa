"""Say which columns a prediction writes: scores, vectors, or the best items of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from pipeline.serving.scoring.scorer import Scorer, score_columns


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


def output_of(scorer: Scorer) -> Output:
    """Scores, unless the scorer says otherwise by an `output` of its own."""
    own: Any = getattr(scorer, "output", None)
    return own if own is not None else ScoreOutput(score_columns(scorer.tasks))
