"""Learn mean and standard deviation of dense columns from the training rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pipeline.data.prepare.base_vocabulary import BaseVocabulary
from pipeline.data.prepare.encode import STANDARDIZE, Features
from pipeline.data.prepare.splits import BlockRows, Boundaries, read_block, split_of_block
from pipeline.data.raw.dense_transforms import Transform, transform_of

CHUNK_ROWS = 65_536


@dataclass(frozen=True)
class Moments:
    """The count, the mean and `squares` (the sum of squared distances from the mean) of values."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        if not len(values):
            return cls()
        mean = float(values.mean())
        return cls(len(values), mean, float(((values - mean) ** 2).sum()))

    def merge(self, other: Moments) -> Moments:
        """Merge two sets of moments (Chan, Golub and LeVeque 1983)."""
        if not other.count:
            return self
        delta, total = other.mean - self.mean, self.count + other.count
        squares = self.squares + other.squares + delta**2 * self.count * other.count / total
        return Moments(total, self.mean + delta * other.count / total, squares)


def base_transforms(features: Features, base: BaseVocabulary | None) -> dict[str, Transform]:
    """Return the transforms of standardized columns that the base data set has. They are kept."""
    if base is None:
        return {}
    about = base.dataset
    known = {
        name: transform_of(name, about.dense_transform, about.dense_columns)
        for name in names_to_learn(features)
        if name in about.dense_features
    }
    return {name: transform for name, transform in known.items() if transform.kind == STANDARDIZE}


def names_to_learn(features: Features) -> list[str]:
    return [name for name in features.dense if features.kind_of(name) == STANDARDIZE]


def moments_of(name: str, blocks: list[BlockRows], boundaries: Boundaries) -> Moments:
    """Return the moments of the training values in the blocks of one file.

    Moments are added up over chunks of CHUNK_ROWS values, so the result does not depend on the
    sizes of blocks.
    """
    moments = Moments()
    waiting = np.zeros(0)
    for block in blocks:
        if not block.per_split[0]:
            continue
        batch = read_block(block.file, block.index, [name, *boundaries.columns])
        values = batch[name].to_numpy()[split_of_block(block, boundaries, batch) == 0]
        waiting = np.concatenate([waiting, values[~np.isnan(values)]])
        while len(waiting) >= CHUNK_ROWS:
            moments = moments.merge(Moments.of(waiting[:CHUNK_ROWS]))
            waiting = waiting[CHUNK_ROWS:]
    return moments.merge(Moments.of(waiting.copy()))


def transform_from(moments_of_files: Iterable[Moments]) -> Transform:
    """Return the transform.

    Files are merged in source order, so the result is reproducible. A constant column gets std 1.
    """
    total = Moments()
    for moments in moments_of_files:
        total = total.merge(moments)
    std = math.sqrt(total.squares / total.count) if total.count else 0.0
    return Transform(STANDARDIZE, total.mean, std if std > 0 else 1.0)
