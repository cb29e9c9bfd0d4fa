"""Schemas of how values become ids: vocabularies, hashes, buckets of numbers, vocabularies to begin with (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from pipeline.runtime.errors import ConfigError, check_at_least, check_choice, check_given, check_within

ID_KINDS = ("vocabulary", "hash")
BUCKET_KINDS = ("quantile", "log2", "given")


@dataclass
class IdsConfig:
    """How a categorical value becomes a row number.

    vocabulary: by descending frequency from 1; 0 is the unknown or rare id: seen in the training rows fewer than
    `min_frequency` times, or too rare for the table's `max_size` rows (row 0 included).
    hash: seeded hash into rows 1 to hash_size - 1; 0 is the missing id.
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
                "ids.kind=hash counts nothing: ids.min_frequency and ids.max_size go with ids.kind=vocabulary"
            )
        if self.kind == "vocabulary" and self.hash_size is not None:
            raise ConfigError(
                f"ids.hash_size={self.hash_size} goes with ids.kind=hash; a vocabulary is cut by ids.max_size"
            )


@dataclass
class BucketsConfig:
    """A number as a categorical feature with an embedding: its id is that of the bucket that its value lies in.

    quantile: `num_buckets` buckets at most, of as many training rows each as ties allow. log2: one for each whole number up
    to 2, above it one for each whole value of ln(x)^2, as on Criteo's counts (Juan et al. 2016, and FuxiCTR). given: those whose first
    values are `boundaries`, and one below them. A missing value
    has id 0. The boundaries are in dataset.json; ids go by descending frequency.
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
    """Vocabularies to begin with: those of the data set in `path` (dataset.json and vocabulary/, no shards needed).

    frozen: ids are exactly its ids, a value that it lacks is unknown. Else a value's count is its count in these rows plus
    `count_decay` times what it was, and ids go by descending count as ever, so values keep no ids (warm_start follows them).
    """

    path: str = "???"
    frozen: bool = False
    count_decay: float = 1.0

    def __post_init__(self) -> None:
        check_given("vocabularies.path", self.path)
        check_within("vocabularies.count_decay", self.count_decay, 0.0, 1.0)
