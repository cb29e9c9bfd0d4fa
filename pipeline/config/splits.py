"""Define which rows are used for training, validation and test (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.runtime.errors import ConfigError, check_choice, check_within

SPLITS = ("train", "validation", "test")
SPLIT_KINDS = ("row_range", "time", "date", "random", "user", "files", "given")


@dataclass
class SplitConfig:
    """Which rows are used for training, validation and test. No row is in two splits.

    row_range: the last `validation_fraction` + `test_fraction` of the rows, in source order. time:
    the same fractions by the timestamp column; rows with equal timestamps stay together. date: by
    the timestamp column, validation from `validation_from` on and test from `test_from` on (written
    as in the column). random: about the same fractions, each row by a hash of its number and
    `seed`. user: by a hash of the value of data.group_column and `seed`, so that all rows of one
    value are in one split. files: the last source file (1TB: day 23) is cut in halves, validation
    then test. given: `train`, `validation` and `test` name their files as `source` does, or a range
    of names (day_{0..22}). An omitted split has no rows. Rows that are equal in every column that
    is read are counted across splits. If they are more than `max_shared_fraction` of a split's
    rows, the split is refused.
    """

    kind: str = "row_range"
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    train: str | None = None
    validation: str | None = None
    test: str | None = None
    max_shared_fraction: float = 0.5
    seed: int = 0
    validation_from: str | None = None
    test_from: str | None = None

    def __post_init__(self) -> None:
        check_choice("split.kind", self.kind, SPLIT_KINDS)
        check_within("split.max_shared_fraction", self.max_shared_fraction, 0.0, 1.0)
        if self.kind != "given" and (named := [name for name in SPLITS if getattr(self, name) is not None]):
            raise ConfigError(
                f"split.{named[0]}={getattr(self, named[0])!r} names an existing split, but split.kind={self.kind} cuts one "
                "from `source`: set split.kind=given, or leave it out"
            )
        check_within("split.seed", self.seed, 0, 2**63 - 1)
        if self.kind == "date" and self.validation_from is None:
            raise ConfigError(
                "split.kind=date needs split.validation_from=<time>, and split.test_from=<time> for a test split"
            )
        if self.kind != "date" and (self.validation_from is not None or self.test_from is not None):
            raise ConfigError(
                f"split.validation_from={self.validation_from} and split.test_from={self.test_from} need split.kind=date, "
                f"not {self.kind}"
            )
        check_within("split.validation_fraction", self.validation_fraction, 0.0, 0.9)
        check_within("split.test_fraction", self.test_fraction, 0.0, 0.9)
        if self.validation_fraction + self.test_fraction >= 1.0:
            raise ConfigError(
                f"split fractions add up to {self.validation_fraction + self.test_fraction:g}: nothing is left to train on"
            )
