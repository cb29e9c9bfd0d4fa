"""Change a teacher for a later time window: its effects rotate, and values of large features are
replaced.

An effect rotates from its first sample towards a second by the angle window * drift, so its spread
does not change, and windows far apart differ more. A rank among a feature's values (its popularity)
belongs to one value for about 1/churn windows. Then a new value with a new effect replaces it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.config.generated import SyntheticConfig

CHURNING_FROM = 300  # cardinality: weekdays do not change, items do
MAX_PLACES = 1 << 16


def rotated_effects(config: SyntheticConfig, effects: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Return [feature][effect row] of window config.window, computed from `effects`, which are of window 0."""
    return [_turned(config, feature, each) for feature, each in enumerate(effects)]


def rotated_vectors(config: SyntheticConfig, vectors: dict[int, NDArray[np.float64]]) -> dict[int, NDArray[np.float64]]:
    """Return vectors [effect row, dim] of window config.window for the features that interact."""
    return {feature: _turned(config, feature, each) for feature, each in vectors.items()}


def renewed(config: SyntheticConfig, feature: int, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the values with these ranks in window config.window. Ranks 1.. are by popularity; 0 stays 0."""
    size = config.cardinalities[feature]
    if not config.window or not _churns(config, feature):
        return ranks
    generations = _generations(config, feature)
    return np.where(ranks > 0, ranks + size * generations[ranks - 1], 0)


def _turned(config: SyntheticConfig, feature: int, effects: NDArray[np.float64]) -> NDArray[np.float64]:
    angle = config.window * config.drift
    spread = np.sqrt(np.mean(np.square(effects), axis=None))
    other = np.random.default_rng([config.seed, 3, feature, effects.ndim]).normal(0, 1, effects.shape)
    decay = np.arange(1, len(effects) + 1) ** -0.25 if effects.ndim == 1 else np.ones(len(effects))[:, None]
    other *= decay * spread / np.sqrt(np.mean(np.square(other * decay)))
    rotated = np.cos(angle) * effects + np.sin(angle) * other
    if not _churns(config, feature):
        return rotated
    generations = _generations(config, feature)
    for generation in range(1, int(generations.max(initial=0)) + 1):
        random = np.random.default_rng([config.seed, 4, feature, effects.ndim, generation])
        fresh = random.permutation(effects)
        rows = 1 + np.flatnonzero(generations == generation)
        rotated[rows] = fresh[rows]
    return rotated


def _churns(config: SyntheticConfig, feature: int) -> bool:
    return config.churn > 0.0 and CHURNING_FROM <= config.cardinalities[feature] <= MAX_PLACES


def _generations(config: SyntheticConfig, feature: int) -> NDArray[np.int64]:
    """Return [cardinality]: how often the value of each rank has been replaced up to
    config.window."""
    phase = np.random.default_rng([config.seed, 5, feature]).random(config.cardinalities[feature])
    return np.floor(phase + config.churn * config.window).astype(np.int64)
