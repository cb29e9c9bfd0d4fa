"""Define export: pruning of rows, and limits of the difference from the trained model (stdlib
only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config.registry import find
from pipeline.config.splits import SPLITS
from pipeline.runtime.errors import ConfigError, check_at_least, check_choice, check_given, check_within

PRECISIONS = ("fp32", "fp16", "int8", "int4", "int2")  # of tables, from the largest to the smallest
AUTO = "auto"
DENSE_PRECISIONS = ("fp32", "bf16", "int8")
PRUNINGS = ("none", "untrained", "frequency")


@dataclass
class PruningConfig:
    """Which rows of a table the artifact leaves out. The unknown row (0) replaces each of them.

    untrained: rows whose optimizer state is at most `state_at_most` (0: never trained). With
    `fraction` also the least trained rows, up to that share of all tables' rows. frequency: the
    rarest `fraction` of all tables' rows; or in each table the rows after the most frequent rows
    that cover `keep_lookups` of its training lookups. Tables of hashed ids are not pruned, because
    their ids are not sorted by frequency.
    """

    kind: str = "none"
    fraction: float | None = None
    state_at_most: float = 0.0
    keep_lookups: float | None = None

    def __post_init__(self) -> None:
        check_choice("pruning.kind", self.kind, PRUNINGS)
        check_at_least("pruning.state_at_most", self.state_at_most, 0.0)
        for name in ("fraction", "keep_lookups"):
            if getattr(self, name) is not None:
                check_within(f"pruning.{name}", getattr(self, name), 0.0, 1.0)
        given = [name for name in ("fraction", "keep_lookups") if getattr(self, name) is not None]
        if self.kind == "frequency" and len(given) != 1:
            raise ConfigError(
                "pruning.kind=frequency needs one of pruning.fraction and pruning.keep_lookups, each in [0, 1]"
            )
        if self.kind != "frequency" and self.keep_lookups is not None:
            raise ConfigError(f"pruning.keep_lookups needs pruning.kind=frequency, not {self.kind}")
        if self.kind == "none" and given:
            raise ConfigError(
                f"pruning.{given[0]} prunes nothing under pruning.kind=none; choose untrained or frequency"
            )
        if self.kind != "untrained" and self.state_at_most:
            raise ConfigError(f"pruning.state_at_most needs pruning.kind=untrained, not {self.kind}")


@dataclass
class ParityConfig:
    """How the artifact is compared with the trained model: the rows, and the allowed differences.

    Uses the first `max_rows` rows of each split. An artifact that exceeds a limit on any split is
    refused.
    """

    splits: list[str] = field(default_factory=lambda: list(SPLITS))
    max_rows: int = 100_000
    max_ne_increase: float = 0.001
    max_auc_decrease: float = 0.001
    # for any single row; the certificate states the mean and the maximum
    max_score_difference: float = 0.25

    def __post_init__(self) -> None:
        for split in self.splits:
            check_choice("parity.splits", split, SPLITS)
        if "validation" not in self.splits:
            raise ConfigError(f"parity.splits={self.splits} must contain validation, which the certificate describes")
        check_at_least("parity.max_rows", self.max_rows, 1)
        check_at_least("parity.max_ne_increase", self.max_ne_increase, 0.0)
        check_at_least("parity.max_auc_decrease", self.max_auc_decrease, 0.0)
        check_within("parity.max_score_difference", self.max_score_difference, 0.0, 1.0)


@dataclass
class RetrievalConfig:
    """How the artifact of a two-tower model finds items. Other models do not use it.

    index: `auto` compares with every item (exact) below 100,000 items and uses hnsw above. hnsw and
    flat need faiss. catalogue: raw rows of the items to find; None means every item of the data
    set, with the other item features of its last training row. neighbours, build_search and search
    are settings of hnsw: links per item, and candidates while building and searching.
    min_index_recall compares the index with exact search, max_recall_decrease compares the artifact
    with the trained model, both for validation users. If either limit fails, nothing is written.
    """

    index: str = AUTO
    catalogue: str | None = None
    neighbours: int = 32
    build_search: int = 100
    search: int = 256
    max_recall_decrease: float = 0.01
    min_index_recall: float = 0.95

    def __post_init__(self) -> None:
        if self.index != AUTO:
            find("index", self.index, "retrieval.index")
        if self.catalogue is not None:
            check_given("retrieval.catalogue", self.catalogue)
        check_within("retrieval.neighbours", self.neighbours, 2, 512)
        check_at_least("retrieval.build_search", self.build_search, 1)
        check_at_least("retrieval.search", self.search, 1)
        check_within("retrieval.max_recall_decrease", self.max_recall_decrease, 0.0, 1.0)
        check_within("retrieval.min_index_recall", self.min_index_recall, 0.0, 1.0)


TOWERS = ("user", "item")


@dataclass
class RetrieveConfig:
    """What predict writes for a two-tower's artifact: the `k` best items per user row, or `vectors`
    of the `tower`."""

    k: int = 100
    vectors: bool = False
    tower: str = "user"

    def __post_init__(self) -> None:
        check_at_least("retrieve.k", self.k, 1)
        check_choice("retrieve.tower", self.tower, TOWERS)
        if self.tower == "item" and not self.vectors:
            raise ConfigError("retrieve.tower=item gives vectors, not best items: set retrieve.vectors=true")


def check_precisions(precision: str, tables: dict[str, str]) -> None:
    """Raise ConfigError for an unknown precision. `tables` has the precisions of single tables."""
    check_choice("precision", precision, (*PRECISIONS, AUTO))
    for name, value in tables.items():
        check_choice(f"tables.{name}", value, PRECISIONS)
