"""Schemas of generated data sets with a planted teacher (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_within


@dataclass
class SyntheticConfig:
    """A generated data set with a planted teacher, for `python -m pipeline generate`: Criteo's format, or tsv with a header.

    Ids have probability ~ rank^-zipf_exponent among the feature's `cardinalities` (26 in Criteo's format, which has 13
    dense features; else as many as data.columns names). The teacher's logits have standard deviation `teacher_scale`; `num_interactions` pairs of the smallest features interact.
    """

    num_rows: int = 1_000_000
    cardinalities: list[int] = field(
        default_factory=lambda: [
            3, 4, 6, 8, 10, 12, 15, 18, 20, 25, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 800, 1000, 2000, 5000, 10000, 20000
        ]
    )  # fmt: skip
    zipf_exponent: float = 1.2
    id_effect_decay: float = 0.25  # effects of ids ~ rank^-this; 0: a rare id says as much as a hot one
    num_dense: int = 13
    num_interactions: int = 5
    teacher_scale: float = 2.0
    positive_rate: float = 0.25
    seed: int = 0
    # A series of windows: rows of their own, sampled from a teacher that turns by `drift` radians a window, with a share
    # `churn` of the values of large features replaced by new ones in each.
    window: int = 0
    drift: float = 0.0
    churn: float = 0.0

    def __post_init__(self) -> None:
        check_at_least("synthetic.num_rows", self.num_rows, 1)
        check_at_least("synthetic.window", self.window, 0)
        check_within("synthetic.drift", self.drift, 0.0, 1.6)
        check_within("synthetic.churn", self.churn, 0.0, 1.0)
        check_at_least("synthetic.num_dense", self.num_dense, 1)
        check_above("synthetic.zipf_exponent", self.zipf_exponent, 0.0)
        check_at_least("synthetic.id_effect_decay", self.id_effect_decay, 0.0)
        check_above("synthetic.teacher_scale", self.teacher_scale, 0.0)
        check_within("synthetic.positive_rate", self.positive_rate, 0.001, 0.999)
        check_within("synthetic.num_interactions", self.num_interactions, 0, len(self.cardinalities) // 2)
        if min(self.cardinalities, default=0) < 1:
            raise ConfigError(
                f"synthetic.cardinalities has {len(self.cardinalities)} values, the least "
                f"{min(self.cardinalities, default=0)}; name features of at least 1 id each"
            )


@dataclass
class UserItemConfig:
    """A generated data set of users' clicks on items, for `python -m pipeline generate`: a TSV with a header.

    Users and items have probability ~ rank^-exponent. Logits are dot products of planted vectors of `latent_dim` and have
    standard deviation `teacher_scale`.
    """

    num_rows: int = 1_000_000
    num_users: int = 3000
    num_items: int = 1500
    num_groups: int = 12
    num_genres: int = 20
    latent_dim: int = 6
    user_exponent: float = 0.5
    item_exponent: float = 0.7
    teacher_scale: float = 2.0
    positive_rate: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_users", "num_items", "num_groups", "num_genres", "latent_dim"):
            check_at_least(f"user_item.{name}", getattr(self, name), 1)
        check_at_least("user_item.user_exponent", self.user_exponent, 0.0)
        check_at_least("user_item.item_exponent", self.item_exponent, 0.0)
        check_above("user_item.teacher_scale", self.teacher_scale, 0.0)
        check_within("user_item.positive_rate", self.positive_rate, 0.001, 0.999)


@dataclass
class ConversionsConfig:
    """A generated data set of clicks and of conversions that follow on them, for `python -m pipeline generate`: a TSV with a header.

    click_rate is the mean over impressions, conversion_rate that of the probability to convert after a click, whether there is
    one or not. dependence: the correlation of both logits, which have standard deviation `teacher_scale`.
    """

    num_rows: int = 1_000_000
    num_users: int = 2000
    num_items: int = 1000
    num_groups: int = 8
    num_categories: int = 10
    user_exponent: float = 0.3
    item_exponent: float = 0.5
    click_rate: float = 0.2
    conversion_rate: float = 0.2
    dependence: float = 0.5
    teacher_scale: float = 1.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_users", "num_items", "num_groups", "num_categories"):
            check_at_least(f"conversions.{name}", getattr(self, name), 1)
        check_at_least("conversions.user_exponent", self.user_exponent, 0.0)
        check_at_least("conversions.item_exponent", self.item_exponent, 0.0)
        check_within("conversions.click_rate", self.click_rate, 0.001, 0.999)
        check_within("conversions.conversion_rate", self.conversion_rate, 0.001, 0.999)
        check_within("conversions.dependence", self.dependence, -1.0, 1.0)
        check_above("conversions.teacher_scale", self.teacher_scale, 0.0)
