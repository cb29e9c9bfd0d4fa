"""Schemas of export: which rows are pruned, and how far scores may lie from the trained model's (stdlib only)."""

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
    """Which rows of a table the artifact leaves out; the unknown row (0) stands in for each of them.

    untrained: rows whose optimizer state is `state_at_most` or less (0: never trained); with `fraction`, the least
    trained rows besides, up to that share of all tables' rows.
    frequency: the rarest `fraction` of all tables' rows, or of each table those behind the most frequent ones that
    `keep_lookups` of its training lookups fall on. Hashed ids are in no order of frequency: their tables stay whole.
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
                "pruning.kind=frequency wants one of pruning.fraction and pruning.keep_lookups, each in [0, 1]"
            )
        if self.kind != "frequency" and self.keep_lookups is not None:
            raise ConfigError(f"pruning.keep_lookups goes with pruning.kind=frequency, not {self.kind}")
        if self.kind == "none" and given:
            raise ConfigError(
                f"pruning.{given[0]} prunes nothing under pruning.kind=none; choose untrained or frequency"
            )
        if self.kind != "untrained" and self.state_at_most:
            raise ConfigError(f"pruning.state_at_most goes with pruning.kind=untrained, not {self.kind}")


@dataclass
class ParityConfig:
    """How the artifact is compared with the trained model: on which rows, and what is too far.

    `max_rows` of each split, in the order of the files. A limit that is passed on any split refuses the artifact.
    """

    splits: list[str] = field(default_factory=lambda: list(SPLITS))
    max_rows: int = 100_000
    max_ne_increase: float = 0.001
    max_auc_decrease: float = 0.001
    max_score_difference: float = 0.25  # of any one row; the certificate has the mean and the largest

    def __post_init__(self) -> None:
        for split in self.splits:
            check_choice("parity.splits", split, SPLITS)
        if "validation" not in self.splits:
            raise ConfigError(f"parity.splits={self.splits} must hold validation: the certificate is about it")
        check_at_least("parity.max_rows", self.max_rows, 1)
        check_at_least("parity.max_ne_increase", self.max_ne_increase, 0.0)
        check_at_least("parity.max_auc_decrease", self.max_auc_decrease, 0.0)
        check_within("parity.max_score_difference", self.max_score_difference, 0.0, 1.0)


@dataclass
class RetrievalConfig:
    """How the items of a two-tower are found in its artifact. Other models have no use for it.

    index: `auto` compares with every item below 100,000 of them (exact) and takes hnsw above; hnsw and flat need faiss.
    catalogue: raw rows of the items that are to be found; None: every item of the data set, its other item features as
    its last training row has them.
    neighbours, build_search, search: of hnsw, how many links an item has, and how many candidates are kept while it is
    built and searched. min_index_recall is of the index beside exact search, max_recall_decrease of the artifact beside
    the trained model, both of validation users; past either nothing is written.
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
    """What predict writes with a two-tower's artifact: for each row of users the `k` best items, or `vectors` of the `tower`."""

    k: int = 100
    vectors: bool = False
    tower: str = "user"

    def __post_init__(self) -> None:
        check_at_least("retrieve.k", self.k, 1)
        check_choice("retrieve.tower", self.tower, TOWERS)
        if self.tower == "item" and not self.vectors:
            raise ConfigError("retrieve.tower=item gives vectors and no best items: set retrieve.vectors=true")


def check_precisions(precision: str, tables: dict[str, str]) -> None:
    """Raise ConfigError for a precision that there is none of; `tables` is what single tables have instead."""
    check_choice("precision", precision, (*PRECISIONS, AUTO))
    for name, value in tables.items():
        check_choice(f"tables.{name}", value, PRECISIONS)
