"""Generate clicks of users on items from planted vectors of both: a TSV with a header.

Users and items follow power laws. A click's logit is the dot product of the user's and the item's
vector plus a bias of each. A third of a vector's variance comes from its group or genre. Sums of
effects of single features cannot represent the logit, but matrix factorization can. The true
probability of every row is written to `<output>.teacher.parquet`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeline.data.generate.synthetic import ROWS_PER_CHUNK, fit_bias, power_law, sigmoid
from pipeline.extras.generate.kinds import UserItemConfig
from pipeline.extras.generate.text import write_tsv

COLUMNS = ("click", "user_id", "user_group", "item_id", "item_genre")
GROUP_SHARE = 1 / 3  # of a vector's variance


@dataclass(frozen=True)
class Taste:
    """Planted vectors [users or items, latent_dim]. groups, genres and biases have one value per vector."""

    users: np.ndarray
    items: np.ndarray
    user_groups: np.ndarray
    item_genres: np.ndarray
    user_biases: np.ndarray
    item_biases: np.ndarray
    gain: float = 1.0
    bias: float = 0.0

    def scores(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        dots = np.einsum("rd,rd->r", self.users[users], self.items[items])
        return dots + self.user_biases[users] + self.item_biases[items]

    def probabilities(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        return sigmoid(self.gain * self.scores(users, items) + self.bias)


def make_taste(config: UserItemConfig) -> Taste:
    """Make the teacher.

    The logits have standard deviation config.teacher_scale. The mean probability is
    config.positive_rate.
    """
    random = np.random.default_rng([config.seed, 0])
    users, user_groups = _vectors(random, config.num_users, config.num_groups, config.latent_dim)
    items, item_genres = _vectors(random, config.num_items, config.num_genres, config.latent_dim)
    taste = Taste(
        users,
        items,
        user_groups,
        item_genres,
        random.normal(0, 0.3 * config.latent_dim**0.5, config.num_users),
        random.normal(0, 0.3 * config.latent_dim**0.5, config.num_items),
    )
    score = taste.scores(*sample_pairs(config, np.random.default_rng([config.seed, 1]), ROWS_PER_CHUNK))
    gain = config.teacher_scale / float(score.std())
    return replace(taste, gain=gain, bias=fit_bias(gain * score, config.positive_rate))


def _vectors(random: np.random.Generator, count: int, num_groups: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return vectors [count, dim], and the group of each vector [count]."""
    groups = random.integers(0, num_groups, count)
    centres = random.normal(0, GROUP_SHARE**0.5, (num_groups, dim))
    return centres[groups] + random.normal(0, (1 - GROUP_SHARE) ** 0.5, (count, dim)), groups


def sample_pairs(config: UserItemConfig, random: np.random.Generator, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Sample users and items of `num_rows` rows independently. Numbers start at 0."""
    users = power_law(random.random(num_rows), config.num_users, config.user_exponent) - 1
    return users, power_law(random.random(num_rows), config.num_items, config.item_exponent) - 1


def sample_rows(
    config: UserItemConfig, taste: Taste, random: np.random.Generator, num_rows: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the columns, and the true probability of each row."""
    users, items = sample_pairs(config, random, num_rows)
    probabilities = taste.probabilities(users, items)
    clicks = (random.random(len(users)) < probabilities).astype(np.int8)
    return [clicks, users, taste.user_groups[users], items, taste.item_genres[items]], probabilities


def write_source(config: UserItemConfig, output: str, threads: int | None = None) -> None:
    """Write `output` (TSV), and the true probabilities next to it. Equal configs give equal bytes."""
    taste = make_taste(config)
    write_tsv(config, lambda random, num_rows: sample_rows(config, taste, random, num_rows), COLUMNS, output, threads)
