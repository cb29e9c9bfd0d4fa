"""Schema of a generated data set whose bags have weights: data.tags (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_within


@dataclass
class TagsConfig:
    """Generated items with weighted tags, for `python -m pipeline generate`: a TSV with a header.

    A click goes by the sum of the effects of the row's tags, each times its weight, and by the item. A row has from none to
    max_tags different tags, of weights of mean 1 from an exponential distribution; `plain_rate` of them have no weight, and count
    1. `tag_effect`, `item_effect`: standard deviations of the effect of one tag and of one item on the logit.
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
            check_at_least(f"tags.{name}", getattr(self, name), 1)
        check_within("tags.plain_rate", self.plain_rate, 0.0, 1.0)
        check_above("tags.tag_effect", self.tag_effect, 0.0)
        check_at_least("tags.item_effect", self.item_effect, 0.0)
        check_within("tags.positive_rate", self.positive_rate, 0.001, 0.999)
        if self.max_tags > self.num_tags:
            raise ConfigError(
                f"tags.max_tags={self.max_tags} different tags of a row are more than tags.num_tags={self.num_tags}"
            )
