"""Say what an artifact's raw rows are, and what becomes of their columns (stdlib only)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config.transforms import NUMBER, TransformConfig, make_transform, raw_inputs, restore
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
    weighted: bool = False  # of a list (multi_hot) of id:weight


@dataclass(frozen=True)
class RawSchema:
    """What raw rows are and become; `features` are in the order of the batch's keys."""

    dense: list[str]
    features: list[RawFeature]
    dense_transform: str
    list_separator: str
    dense_columns: dict[str, dict[str, Any]] = field(default_factory=dict)  # of columns with a transform of their own
    null_values: list[str] = field(default_factory=list)
    transforms: list[dict[str, Any]] = field(
        default_factory=list
    )  # of columns that are made, as config.transforms says

    @property
    def columns(self) -> dict[str, str]:
        """Column of raw rows -> dense, sparse or multi_hot; a number that is put into buckets is a dense one."""
        if not self.transforms:
            return self.model_columns
        made = self.derived
        kinds = {name: kind for name, kind in self.model_columns.items() if name not in made}
        for name, kind in raw_inputs(made).items():
            kinds.setdefault(name, DENSE if kind == NUMBER else SPARSE)
        return dict(sorted(kinds.items(), key=lambda item: (DENSE, SPARSE, MULTI_HOT).index(item[1])))

    @property
    def model_columns(self) -> dict[str, str]:
        """As columns, of those that become features, wherever they come from."""
        kinds = dict.fromkeys([*self.dense, *self.in_buckets], DENSE)
        categories = [feature for feature in self.features if feature.boundaries is None]
        return kinds | {feature.name: MULTI_HOT if feature.multi_hot else SPARSE for feature in categories}

    @property
    def derived(self) -> dict[str, TransformConfig]:
        """Raises ConfigError for transforms that there are none of."""
        return restore(self.transforms)

    def of_features(self, names: Collection[str], *, with_dense: bool = True) -> RawSchema:
        """Of these features alone, with the transforms that they and the dense columns need."""
        features = [feature for feature in self.features if feature.name in names]
        dense, dense_columns = (self.dense, self.dense_columns) if with_dense else ([], {})
        wanted = {*dense, *(feature.name for feature in features)}
        kept: list[dict[str, Any]] = []
        for each in reversed(self.transforms):
            if each["column"] in wanted:
                wanted |= set(make_transform(each["column"], {"kind": each["kind"], **each["settings"]}).inputs)
                kept.insert(0, each)
        return replace(self, features=features, dense=dense, dense_columns=dense_columns, transforms=kept)

    @property
    def in_buckets(self) -> dict[str, list[float]]:
        """Numeric column that is looked up by its bucket -> boundaries of its buckets."""
        return {each.name: each.boundaries for each in self.features if each.boundaries is not None}
