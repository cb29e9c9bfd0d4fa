"""Define how values become ids: vocabularies, hashes, buckets of numbers, earlier vocabularies
(stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from pipeline.runtime.errors import ConfigError, check_at_least, check_choice, check_given, check_within

ID_KINDS = ("vocabulary", "hash")
BUCKET_KINDS = ("quantile", "log2", "given")


@dataclass
class IdsConfig:
    """How a categorical value becomes a row number.

    vocabulary: ids start at 1, in order of descending frequency. Id 0 means unknown or rare: seen fewer than
    `min_frequency` times in the training rows, or beyond the table's `max_size` rows (including row 0).
    hash: a seeded hash into rows 1 to hash_size - 1. Id 0 means missing.
    """

    kind: str = "vocabulary"
    min_frequency: int = 1
    max_size: int | None = None
    hash_size: int | None = None
    hash_seed: int = 0

    def __post_init__(self) -> None:
        check_choice("ids.kind", self.kind, ID_KINDS)
        check_at_least("ids.min_frequency", self.min_frequency, 1)
        check_at_least("ids.max_size", self.max_size, 1, allow_none=True)
        check_at_least("ids.hash_size", self.hash_size, 2, allow_none=True)
        if self.kind == "hash" and self.hash_size is None:
            raise ConfigError("ids.kind=hash needs ids.hash_size=<rows>")
        if self.kind == "hash" and (self.min_frequency, self.max_size) != (1, None):
            raise ConfigError(
                "ids.kind=hash does not count values: ids.min_frequency and ids.max_size need ids.kind=vocabulary"
            )
        if self.kind == "vocabulary" and self.hash_size is not None:
            raise ConfigError(f"ids.hash_size={self.hash_size} needs ids.kind=hash; ids.max_size limits a vocabulary")


@dataclass
class BucketsConfig:
    """A number as a categorical feature with an embedding: its id is the id of its bucket.

    quantile: at most `num_buckets` buckets with equally many training rows, as far as ties allow.
    log2: one bucket for each whole number up to 2, above that one for each whole value of ln(x)^2,
    as for Criteo's counts (Juan et al. 2016, and FuxiCTR). given: buckets start at `boundaries`,
    and one is below them. A missing value has id 0. dataset.json stores the boundaries. Ids are
    sorted by descending frequency.
    """

    kind: str = "quantile"
    num_buckets: int = 100
    boundaries: list[float] | None = None

    def __post_init__(self) -> None:
        check_choice("buckets.kind", self.kind, BUCKET_KINDS)
        if (self.kind == "given") != (self.boundaries is not None):
            raise ConfigError("buckets.kind=given and buckets.boundaries=[...] go together")
        if self.boundaries is not None and any(b <= a for a, b in pairwise(self.boundaries)):
            raise ConfigError(f"buckets.boundaries={self.boundaries} must ascend")
        check_at_least("buckets.num_buckets", self.num_buckets, 2)


@dataclass
class BaseVocabularyConfig:
    """Start from the vocabularies of the data set in `path` (dataset.json and vocabulary/; shards
    are not needed).

    frozen: ids are exactly the ids of that data set, and other values are unknown. Otherwise a
    value's count is its count in these rows plus `count_decay` times its earlier count, and ids are
    sorted by descending count. Ids of values then change; warm_start moves the rows with them.
    """

    path: str = "???"
    frozen: bool = False
    count_decay: float = 1.0

    def __post_init__(self) -> None:
        check_given("vocabularies.path", self.path)
        check_within("vocabularies.count_decay", self.count_decay, 0.0, 1.0)
