"""Say what an artifact's raw rows are, and what becomes of their columns (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.data.dataset import SequenceFeature

DENSE, SPARSE, MULTI_HOT = "dense", "sparse", "multi_hot"


@dataclass(frozen=True)
class RawFeature:
    """A categorical column. `hash_size` None: its values are in the vocabulary. `bag_size` > 1: ids that are drawn from
    a one-hot id (data.multi_hot). With `boundaries` the column holds numbers, and the vocabulary those of their buckets."""

    name: str
    cardinality: int
    multi_hot: bool
    bag_size: int = 1
    hash_size: int | None = None
    hash_seed: int = 0
    boundaries: list[float] | None = None
    sequence: SequenceFeature | None = None  # of a list (multi_hot) that is cut, and may have to be as long as another


@dataclass(frozen=True)
class RawSchema:
    """What raw rows are and become; `features` are in the order of the batch's keys."""

    dense: list[str]
    features: list[RawFeature]
    dense_transform: str
    list_separator: str
    dense_columns: dict[str, dict[str, Any]] = field(default_factory=dict)  # of columns with a transform of their own
    null_values: list[str] = field(default_factory=list)

    @property
    def columns(self) -> dict[str, str]:
        """Column -> dense, sparse or multi_hot; a number that is put into buckets is a dense column of raw rows."""
        kinds = dict.fromkeys([*self.dense, *self.in_buckets], DENSE)
        categories = [feature for feature in self.features if feature.boundaries is None]
        return kinds | {feature.name: MULTI_HOT if feature.multi_hot else SPARSE for feature in categories}

    @property
    def in_buckets(self) -> dict[str, list[float]]:
        """Numeric column that is looked up by its bucket -> boundaries of its buckets."""
        return {each.name: each.boundaries for each in self.features if each.boundaries is not None}
