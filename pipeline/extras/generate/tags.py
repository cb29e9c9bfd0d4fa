"""Generate items with weighted tags, `tag:weight`, and clicks on them, from a planted teacher: a
TSV with a header.

The logit is an effect of the item plus the sum of the effects of the row's tags, each times its
weight. A model that ignores the weights knows at most half of that sum. The true probability of
every row is written to `<output>.teacher.parquet`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.data.generate.synthetic import fit_bias, sigmoid
from pipeline.extras.generate.kinds import TagsConfig
from pipeline.extras.generate.text import write_tsv

COLUMNS = ("label", "item_id", "tags")
PLACES = 3  # decimals of a weight


@dataclass(frozen=True)
class TaggedRows:
    """Items and tags as numbers from 0. items is [rows]. tags and weights are [rows, max_tags];
    only the first `lengths` [rows] positions count.
    """

    items: np.ndarray
    tags: np.ndarray
    weights: np.ndarray
    is_plain: np.ndarray  # [rows, max_tags] bool: the weight is 1 and is not written
    lengths: np.ndarray


@dataclass(frozen=True)
class TagEffects:
    """The planted teacher: effects of tags [num_tags] and items [num_items]."""

    tags: np.ndarray
    items: np.ndarray
    bias: float

    def logits(self, rows: TaggedRows) -> np.ndarray:
        present = np.arange(rows.tags.shape[1]) < rows.lengths[:, None]
        return (self.tags[rows.tags] * rows.weights * present).sum(axis=1) + self.items[rows.items] + self.bias


def make_effects(config: TagsConfig) -> TagEffects:
    """Make the teacher. The rate of clicks is config.positive_rate."""
    random = np.random.default_rng([config.seed, 0])
    tags = config.tag_effect * random.normal(0, 1, config.num_tags)
    effects = TagEffects(tags, config.item_effect * random.normal(0, 1, config.num_items), 0.0)
    rows = sample_tags(config, np.random.default_rng([config.seed, 1]), 20_000)
    return TagEffects(effects.tags, effects.items, fit_bias(effects.logits(rows), config.positive_rate))


def sample_tags(config: TagsConfig, random: np.random.Generator, num_rows: int) -> TaggedRows:
    shape = (num_rows, config.max_tags)
    tags = np.argsort(random.random((num_rows, config.num_tags)), axis=1)[:, : config.max_tags]
    is_plain = random.random(shape) < config.plain_rate
    weights = np.where(is_plain, 1.0, np.round(random.exponential(1.0, shape), PLACES))
    lengths = random.integers(0, config.max_tags + 1, num_rows)
    return TaggedRows(random.integers(0, config.num_items, num_rows), tags, weights, is_plain, lengths)


def sample_rows(
    config: TagsConfig, effects: TagEffects, random: np.random.Generator, num_rows: int
) -> tuple[list[Any], np.ndarray]:
    """Return the columns, and the true probability of each row."""
    rows = sample_tags(config, random, num_rows)
    truth = sigmoid(effects.logits(rows))
    labels = (random.random(num_rows) < truth).astype(np.int8)
    return [labels, rows.items, _texts(rows)], truth


def _texts(rows: TaggedRows) -> list[str]:
    columns = (rows.tags, rows.weights, rows.is_plain)
    texts = []
    for length, tags, weights, plain in zip(rows.lengths.tolist(), *(each.tolist() for each in columns), strict=True):
        elements = [
            f"t{tag}" if is_plain else f"t{tag}:{weight:.{PLACES}f}"
            for tag, weight, is_plain in zip(tags, weights, plain, strict=True)
        ]
        texts.append("|".join(elements[:length]))
    return texts


def write_source(config: TagsConfig, output: str, threads: int | None = None) -> None:
    """Write `output` (TSV), and the true probabilities next to it. Equal configs give equal bytes."""
    effects = make_effects(config)
    write_tsv(config, lambda random, num_rows: sample_rows(config, effects, random, num_rows), COLUMNS, output, threads)
