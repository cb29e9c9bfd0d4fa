"""Generate users' histories and clicks on a target item, from a planted teacher: a TSV with a
header.

The logit is an effect of the target plus the effect of the dwell time of the last item in the
history that has the target's category (0 if there is none). The dwell times alone, or the
categories alone, do not tell which dwell time counts: a model needs the pairs at each position. The
true probability of every row is written to `<output>.teacher.parquet`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.data.generate.synthetic import fit_bias, sigmoid
from pipeline.extras.generate.kinds import HistoriesConfig
from pipeline.extras.generate.text import write_tsv

COLUMNS = ("label", "item_id", "category", "history", "history_category", "history_dwell")


@dataclass(frozen=True)
class Behaviour:
    """The items and dwell times of each row, as numbers from 0. targets is [rows]. items and dwells
    are [rows, max_length]; only the first `lengths` [rows] positions count.
    """

    targets: np.ndarray
    items: np.ndarray
    dwells: np.ndarray
    lengths: np.ndarray

    @property
    def present(self) -> np.ndarray:
        """Return [rows, max_length] bool: True if the position counts."""
        return np.arange(self.items.shape[1]) < self.lengths[:, None]


@dataclass(frozen=True)
class Interest:
    """The planted teacher: effects of dwell times [num_dwells] and targets [num_items], categories [num_items]."""

    categories: np.ndarray
    dwells: np.ndarray
    items: np.ndarray
    bias: float

    def logits(self, rows: Behaviour) -> np.ndarray:
        matches = rows.present & (self.categories[rows.items] == self.categories[rows.targets][:, None])
        last = rows.items.shape[1] - 1 - np.argmax(matches[:, ::-1], axis=1)
        dwell = self.dwells[rows.dwells[np.arange(len(last)), last]]
        return np.where(matches.any(axis=1), dwell, 0.0) + self.items[rows.targets] + self.bias

    def probabilities(self, rows: Behaviour) -> np.ndarray:
        return sigmoid(self.logits(rows))


def make_interest(config: HistoriesConfig) -> Interest:
    """Make the teacher. The rate of clicks is config.positive_rate."""
    random = np.random.default_rng([config.seed, 0])
    categories = np.arange(config.num_items) % config.num_categories
    effects = np.linspace(-1.0, 1.0, config.num_dwells) if config.num_dwells > 1 else np.ones(1)
    dwells = config.dwell_effect * random.permutation(effects) / max(float(effects.std()), 1e-9)
    items = config.item_effect * random.normal(0, 1, config.num_items)
    interest = Interest(categories, dwells, items, 0.0)
    rows = sample_behaviour(config, interest, np.random.default_rng([config.seed, 1]), 20_000)
    return Interest(categories, dwells, items, fit_bias(interest.logits(rows), config.positive_rate))


def sample_behaviour(
    config: HistoriesConfig, interest: Interest, random: np.random.Generator, num_rows: int
) -> Behaviour:
    """Sample histories whose categories differ, except for a share `repeats`. With probability
    `match_rate` the target has one of these categories.
    """
    count, length = config.num_categories, config.max_length
    order = np.argsort(random.random((num_rows, count)), axis=1)
    categories = order[:, :length].copy()
    lengths = random.integers(0, length + 1, num_rows)
    again = random.random((num_rows, length)) < config.repeats
    again[:, 0] = False
    earlier = (random.random((num_rows, length)) * np.arange(length)).astype(np.int64)
    # one after the other, because a repeated position may be repeated again
    for position in range(1, length):
        chosen = again[:, position]
        categories[chosen, position] = categories[chosen, earlier[chosen, position]]
    picked = (random.random(num_rows) * np.maximum(lengths, 1)).astype(np.int64)
    has_match = (random.random(num_rows) < config.match_rate) & (lengths > 0)
    target = np.where(has_match, categories[np.arange(num_rows), picked], order[:, length])
    return Behaviour(
        _item_of(config, random, target),
        _item_of(config, random, categories),
        random.integers(0, config.num_dwells, (num_rows, length)),
        lengths,
    )


def _item_of(config: HistoriesConfig, random: np.random.Generator, categories: np.ndarray) -> np.ndarray:
    """Sample one item of each given category, uniformly. The category of item i is i % num_categories."""
    held = (config.num_items - categories - 1) // config.num_categories + 1
    return categories + config.num_categories * (random.random(categories.shape) * held).astype(np.int64)


def sample_rows(
    config: HistoriesConfig, interest: Interest, random: np.random.Generator, num_rows: int
) -> tuple[list[Any], np.ndarray]:
    """Return the columns, and the true probability of each row."""
    rows = sample_behaviour(config, interest, random, num_rows)
    truth = interest.probabilities(rows)
    clicks = (random.random(num_rows) < truth).astype(np.int8)
    lists = (rows.items, interest.categories[rows.items], rows.dwells)
    texts = [_joined(each, rows.lengths) for each in lists]
    return [clicks, rows.targets, interest.categories[rows.targets], *texts], truth


def _joined(values: np.ndarray, lengths: np.ndarray) -> list[str]:
    texts = values.astype(str)
    return ["|".join(row[:length]) for row, length in zip(texts.tolist(), lengths.tolist(), strict=True)]


def write_source(config: HistoriesConfig, output: str, threads: int | None = None) -> None:
    """Write `output` (TSV), and the true probabilities next to it. Equal configs give equal bytes."""
    interest = make_interest(config)
    write_tsv(
        config, lambda random, num_rows: sample_rows(config, interest, random, num_rows), COLUMNS, output, threads
    )
