"""Configure which items a clicked row's item is compared with in training (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ConfigError, check_at_least, check_choice

KINDS = ("in_batch", "corpus", "mixed")


@dataclass
class HardNegativesConfig:
    """Add to each clicked row's negatives the `count` items with the highest scores for its user,
    among all items. The items' vectors are computed again every `every_steps` steps.
    """

    count: int = 0  # 0: none
    every_steps: int = 500

    def __post_init__(self) -> None:
        check_at_least("model.negatives.hard.count", self.count, 0)
        check_at_least("model.negatives.hard.every_steps", self.every_steps, 1)


@dataclass
class NegativesConfig:
    """Choose the negatives of a retrieval model.

    in_batch: the items of all rows of the global batch. corpus: `count` items of the training rows,
    sampled for each step with replacement and used for all its rows, with probability proportional
    to frequency ** power. mixed: both.
    """

    kind: str = "in_batch"
    count: int = 1000
    power: float = 0.0  # 0: uniform; 1: by frequency
    hard: HardNegativesConfig = field(default_factory=HardNegativesConfig)

    def __post_init__(self) -> None:
        check_choice("model.negatives.kind", self.kind, KINDS)
        check_at_least("model.negatives.count", self.count, 1)
        check_at_least("model.negatives.power", self.power, 0.0)
        if self.hard.count and self.kind == "in_batch":
            raise ConfigError(
                f"model.negatives.hard.count={self.hard.count} needs sampled items, which stand for all other items: "
                "set model.negatives.kind=mixed or corpus, or model.negatives.hard.count=0"
            )

    @property
    def num_sampled(self) -> int:
        """Return how many items of the corpus a global micro-batch has as additional rows."""
        return 0 if self.kind == "in_batch" else self.count

    def check_tables(self, item: str, tables: list[Table], log_q_correction: bool, shared: bool = False) -> None:
        """Raise ConfigError if items cannot be sampled, or the probability of a negative is unknown.
        shared: the item may share its table.
        """
        if self.num_sampled:
            num_items = corpus_size(corpus_of(item, tables, f"model.negatives.kind={self.kind}"))
            for key, count, most in (("count", self.count, num_items), ("hard.count", self.hard.count, num_items - 1)):
                if most < count:
                    raise ConfigError(
                        f"model.negatives.{key}={count}, but {item!r} has {num_items} items; "
                        f"set model.negatives.{key}={max(1, num_items // 2)} or less"
                    )
        if log_q_correction and self.kind != "corpus":
            corpus_of(item, tables, "model.log_q_correction", shared=shared)


def corpus_of(item: str, tables: list[Table], key: str, shared: bool = True) -> RowFrequencies:
    """Return how frequent the items are in the training rows.

    shared: the item may share its table with other features, such as a user's history. Raises
    ConfigError if the frequency of an item is unknown.
    """
    table = next(table for table in tables if item in table.feature_names)
    if table.frequencies is None or not table.frequencies.by_row or not (shared or len(table.feature_names) == 1):
        raise ConfigError(
            f"{key} needs the frequency of each item, and the data have none for {item!r}: "
            f"its ids must come from a vocabulary (ids.kind=vocabulary){'' if shared else ' and have a table of their own'}; "
            f"or set {'model.negatives.kind=in_batch' if shared else 'model.log_q_correction=false'}"
        )
    return table.frequencies


def corpus_size(frequencies: RowFrequencies) -> int:
    """Return the number of items. Their ids are 1, 2, ..., because 0 is the unknown item."""
    return frequencies.rows[-1] - 1
