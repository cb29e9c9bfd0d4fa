"""Define the settings of each generator (torch-free): data.generator={kind: histories, num_rows: 1000}."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.generated import GeneratorConfig
from pipeline.config.registry import register
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_within


@register("generator", "user_item")
@dataclass
class UserItemConfig(GeneratorConfig):
    """Settings of a generated data set of users' clicks on items: a TSV with a header.

    The probability of a user or an item is proportional to rank^-exponent. Logits are dot products
    of planted vectors of `latent_dim`, with standard deviation `teacher_scale`.
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
            check_at_least(f"data.generator.{name}", getattr(self, name), 1)
        check_at_least("data.generator.user_exponent", self.user_exponent, 0.0)
        check_at_least("data.generator.item_exponent", self.item_exponent, 0.0)
        check_above("data.generator.teacher_scale", self.teacher_scale, 0.0)
        check_within("data.generator.positive_rate", self.positive_rate, 0.001, 0.999)

    def write_source(self, output: str, threads: int | None = None) -> None:
        from pipeline.extras.generate import user_item

        user_item.write_source(self, output, threads)


@register("generator", "conversions")
@dataclass
class ConversionsConfig(GeneratorConfig):
    """Settings of a generated data set of clicks and of conversions after clicks: a TSV with a
    header.

    click_rate: the mean over impressions. conversion_rate: the mean probability of a conversion
    after a click, over all impressions. dependence: the correlation of both logits, which have
    standard deviation `teacher_scale`.
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
            check_at_least(f"data.generator.{name}", getattr(self, name), 1)
        check_at_least("data.generator.user_exponent", self.user_exponent, 0.0)
        check_at_least("data.generator.item_exponent", self.item_exponent, 0.0)
        check_within("data.generator.click_rate", self.click_rate, 0.001, 0.999)
        check_within("data.generator.conversion_rate", self.conversion_rate, 0.001, 0.999)
        check_within("data.generator.dependence", self.dependence, -1.0, 1.0)
        check_above("data.generator.teacher_scale", self.teacher_scale, 0.0)

    def write_source(self, output: str, threads: int | None = None) -> None:
        from pipeline.extras.generate import conversions

        conversions.write_source(self, output, threads)


@register("generator", "histories")
@dataclass
class HistoriesConfig(GeneratorConfig):
    """Settings of a generated data set of users' histories: a TSV with a header.

    A click depends on the target and on the dwell time of the last item in the history with the
    target's category. Lengths are uniform from 0 to max_length. match_rate: the share of targets
    whose category is in the history, if it is not empty. repeats: the share of positions that
    repeat an earlier category; with 0 at most one item matches, and the order does not matter.
    dwell_effect, item_effect: standard deviations of both effects on the logit.
    """

    num_rows: int = 200_000
    num_items: int = 500
    num_categories: int = 30
    num_dwells: int = 8
    max_length: int = 20
    repeats: float = 0.0
    match_rate: float = 0.8
    dwell_effect: float = 2.0
    item_effect: float = 0.5
    positive_rate: float = 0.4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_items", "num_categories", "num_dwells", "max_length"):
            check_at_least(f"data.generator.{name}", getattr(self, name), 1)
        for name in ("repeats", "match_rate"):
            check_within(f"data.generator.{name}", getattr(self, name), 0.0, 1.0)
        check_above("data.generator.dwell_effect", self.dwell_effect, 0.0)
        check_at_least("data.generator.item_effect", self.item_effect, 0.0)
        check_within("data.generator.positive_rate", self.positive_rate, 0.001, 0.999)
        if self.max_length >= self.num_categories or self.num_categories > self.num_items:
            raise ConfigError(
                f"data.generator.max_length={self.max_length} needs one more category than that, "
                "and an item for each category: "
                f"data.generator.num_categories={self.num_categories}, num_items={self.num_items}"
            )

    def write_source(self, output: str, threads: int | None = None) -> None:
        from pipeline.extras.generate import histories

        histories.write_source(self, output, threads)


@register("generator", "tags")
@dataclass
class TagsConfig(GeneratorConfig):
    """Settings of generated items with weighted tags: a TSV with a header.

    A click depends on the item and on the sum of the effects of the row's tags, each times its
    weight. A row has 0 to max_tags different tags. Weights are exponential with mean 1. A share
    `plain_rate` of the tags has no weight, and counts as weight 1. tag_effect, item_effect:
    standard deviations of the effect of one tag and of one item on the logit.
    """

    num_rows: int = 200_000
    num_items: int = 200
    num_tags: int = 100
    max_tags: int = 8
    plain_rate: float = 0.1
    tag_effect: float = 1.0
    item_effect: float = 0.5
    positive_rate: float = 0.4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_items", "num_tags", "max_tags"):
            check_at_least(f"data.generator.{name}", getattr(self, name), 1)
        check_within("data.generator.plain_rate", self.plain_rate, 0.0, 1.0)
        check_above("data.generator.tag_effect", self.tag_effect, 0.0)
        check_at_least("data.generator.item_effect", self.item_effect, 0.0)
        check_within("data.generator.positive_rate", self.positive_rate, 0.001, 0.999)
        if self.max_tags > self.num_tags:
            raise ConfigError(
                f"data.generator.max_tags={self.max_tags} different tags in a row are more than "
                f"tags.num_tags={self.num_tags}"
            )

    def write_source(self, output: str, threads: int | None = None) -> None:
        from pipeline.extras.generate import tags

        tags.write_source(self, output, threads)
