"""Generate impressions with clicks, and conversions after clicks, from a planted teacher: a TSV
with a header.

The logit of a click is the sum of an effect of the user, one of the item, and one of each pair of
the user's group and the item's category. The logit of a conversion after a click is such a sum too.
It is correlated with the click's logit by `dependence`: users who click more also convert more, so
clicked rows differ from all rows. The true probabilities of a click, and of a conversion after a
click, are written to `<output>.teacher.parquet`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.data.generate.synthetic import ROWS_PER_CHUNK, fit_bias, power_law, sigmoid
from pipeline.extras.generate.kinds import ConversionsConfig
from pipeline.extras.generate.text import write_tsv

LABELS = ("click", "conversion")
FEATURES = ("user_id", "user_group", "item_id", "item_category")


@dataclass(frozen=True)
class Impressions:
    """The user, group, item and category of each row, as numbers from 0; [rows] each."""

    users: np.ndarray
    groups: np.ndarray
    items: np.ndarray
    categories: np.ndarray


@dataclass(frozen=True)
class Effects:
    """Effects on one logit: users [num_users], items [num_items], pairs [num_groups,
    num_categories]. `scale` and `bias` are applied to the sum.
    """

    users: np.ndarray
    items: np.ndarray
    pairs: np.ndarray
    scale: float = 1.0
    bias: float = 0.0

    def logits(self, rows: Impressions) -> np.ndarray:
        sums = self.users[rows.users] + self.items[rows.items] + self.pairs[rows.groups, rows.categories]
        return self.scale * sums + self.bias


@dataclass(frozen=True)
class Funnel:
    """The planted teacher of clicks and conversions."""

    user_groups: np.ndarray
    item_categories: np.ndarray
    click: Effects
    conversion: Effects

    def sample(self, config: ConversionsConfig, random: np.random.Generator, num_rows: int) -> Impressions:
        users = power_law(random.random(num_rows), config.num_users, config.user_exponent) - 1
        items = power_law(random.random(num_rows), config.num_items, config.item_exponent) - 1
        return Impressions(users, self.user_groups[users], items, self.item_categories[items])

    def probabilities(self, rows: Impressions) -> np.ndarray:
        """Return [rows, 2]: the probability of a click, and the probability of a conversion after a click."""
        return np.stack([sigmoid(self.click.logits(rows)), sigmoid(self.conversion.logits(rows))], axis=1)


def make_funnel(config: ConversionsConfig) -> Funnel:
    """Make the teacher.

    Both logits have standard deviation config.teacher_scale; the mean rates are those in the
    config.
    """
    random = np.random.default_rng([config.seed, 0])
    groups = random.integers(0, config.num_groups, config.num_users)
    categories = random.integers(0, config.num_categories, config.num_items)
    click, other = _effects(config, random), _effects(config, random)
    own, shared = (1.0 - config.dependence**2) ** 0.5, config.dependence
    mixed = (
        shared * of_click + own * of_other for of_click, of_other in zip(_parts(click), _parts(other), strict=True)
    )
    funnel = Funnel(groups, categories, click, Effects(*mixed))
    rows = funnel.sample(config, np.random.default_rng([config.seed, 1]), ROWS_PER_CHUNK)
    fitted = [
        _fitted(effects, rows, config.teacher_scale, rate)
        for effects, rate in ((funnel.click, config.click_rate), (funnel.conversion, config.conversion_rate))
    ]
    return Funnel(groups, categories, *fitted)


def _effects(config: ConversionsConfig, random: np.random.Generator) -> Effects:
    return Effects(
        random.normal(0, 0.7, config.num_users),
        random.normal(0, 1.0, config.num_items),
        random.normal(0, 0.7, (config.num_groups, config.num_categories)),
    )


def _parts(effects: Effects) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return effects.users, effects.items, effects.pairs


def _fitted(effects: Effects, rows: Impressions, scale: float, rate: float) -> Effects:
    logits = effects.logits(rows)
    factor = scale / float(logits.std())
    return Effects(*_parts(effects), factor, fit_bias(factor * logits, rate))


def sample_labels(random: np.random.Generator, probabilities: np.ndarray) -> np.ndarray:
    """Return [rows, 2] int8: clicks, and conversions of clicked rows."""
    drawn = (random.random(probabilities.shape) < probabilities).astype(np.int8)
    drawn[:, 1] *= drawn[:, 0]
    return drawn


def sample_rows(
    config: ConversionsConfig, funnel: Funnel, random: np.random.Generator, num_rows: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the columns, and the true probabilities [rows, 2]."""
    rows = funnel.sample(config, random, num_rows)
    probabilities = funnel.probabilities(rows)
    labels = sample_labels(random, probabilities)
    return [labels[:, 0], labels[:, 1], rows.users, rows.groups, rows.items, rows.categories], probabilities


def write_source(config: ConversionsConfig, output: str, threads: int | None = None) -> None:
    """Write `output` (TSV), and the true probabilities next to it. Equal configs give equal bytes."""
    funnel = make_funnel(config)
    write_tsv(
        config,
        lambda random, num_rows: sample_rows(config, funnel, random, num_rows),
        (*LABELS, *FEATURES),
        output,
        threads,
        LABELS,
    )
