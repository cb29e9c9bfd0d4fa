"""Learn mean and standard deviation of dense columns from the training rows."""

from __future__ import annotations

import math

import numpy as np

from pipeline.data.prepare.base_vocabulary import BaseVocabulary
from pipeline.data.prepare.encode import STANDARDIZE, Features
from pipeline.data.prepare.splits import BlockRows, Boundaries, read_block, split_of_block
from pipeline.data.raw.transforms import Transform, transform_of


def learn_transforms(
    features: Features, blocks: list[BlockRows], boundaries: Boundaries, base: BaseVocabulary | None
) -> dict[str, Transform]:
    """Of the columns that are standardized. Those of a base data set keep its numbers."""
    names = [name for name in features.dense if features.kind_of(name) == STANDARDIZE]
    if base is not None:
        known = {name: transform_of(name, base.dataset.dense_transform, base.dataset.dense_columns) for name in names}
        kept = {name: transform for name, transform in known.items() if transform.kind == STANDARDIZE}
        names = [name for name in names if name not in kept]
    else:
        kept = {}
    return kept | {name: _learn(name, blocks, boundaries) for name in names}


def _learn(name: str, blocks: list[BlockRows], boundaries: Boundaries) -> Transform:
    """Blocks are merged in source order (Chan, Golub and LeVeque 1983): the same numbers each time. A constant has std 1."""
    count, mean, squares = 0, 0.0, 0.0
    for block in blocks:
        if not block.per_split[0]:
            continue
        batch = read_block(block.file, block.index, [name, *boundaries.columns])
        values = batch[name].to_numpy()[split_of_block(block, boundaries, batch) == 0]
        values = values[~np.isnan(values)]
        if not len(values):
            continue
        center = float(values.mean())
        delta, total = center - mean, count + len(values)
        squares += float(((values - center) ** 2).sum()) + delta**2 * count * len(values) / total
        mean, count = mean + delta * len(values) / total, total
    std = math.sqrt(squares / count) if count else 0.0
    return Transform(STANDARDIZE, mean, std if std > 0 else 1.0)
