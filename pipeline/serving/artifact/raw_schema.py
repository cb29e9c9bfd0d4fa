"""Describe the raw rows of an artifact: their columns, and the transform of each column."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.columns import KEEPS, MAX_LENGTH, MAX_VECTOR, ColumnsConfig, vector_features
from pipeline.config.data import DENSE_TRANSFORMS
from pipeline.config.transforms import LIST, NUMBER, TEXT, TransformConfig, make_transform, raw_inputs, restore
from pipeline.data.dataset import Dataset, SequenceFeature, SparseFeature, vocabulary_of
from pipeline.data.read.row_groups import row_group_reader
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.storage import storage

ROW_ZERO = "row_zero_share"  # of a feature's lookups, in Manifest.lookups
DENSE, SPARSE, MULTI_HOT, VECTOR = "dense", "sparse", "multi_hot", "vector"


@dataclass(frozen=True)
class RawFeature:
    """A categorical column. `hash_size` None: its values are in the vocabulary. `bag_size` > 1: ids
    are sampled from a one-hot id (data.multi_hot). With `boundaries` the column has numbers, and
    the vocabulary has the numbers of their buckets.
    """

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
    """The columns of raw rows and their transforms. `features` are in the order of the batch's keys."""

    dense: list[str]
    features: list[RawFeature]
    dense_transform: str
    list_separator: str
    dense_columns: dict[str, dict[str, Any]] = field(default_factory=dict)  # of columns with a transform of their own
    null_values: list[str] = field(default_factory=list)
    transforms: list[dict[str, Any]] = field(
        default_factory=list
    )  # of columns that are made, as config.transforms says
    vectors: dict[str, int] = field(default_factory=dict)  # columns whose numbers are in `dense`: their width

    @property
    def columns(self) -> dict[str, str]:
        """Return raw column -> dense, sparse, multi_hot or vector. A number that is put into a bucket is a dense column."""
        if not self.transforms and not self.vectors:
            return self.model_columns
        made = self.derived
        of_vectors = {each for name, width in self.vectors.items() for each in vector_features(name, width)}
        kinds = {name: kind for name, kind in self.model_columns.items() if name not in made and name not in of_vectors}
        for name, kind in raw_inputs(made).items():
            if name in of_vectors:
                continue
            kinds.setdefault(name, DENSE if kind == NUMBER else SPARSE)
        kinds |= dict.fromkeys(self.vectors, VECTOR)
        return dict(sorted(kinds.items(), key=lambda item: (DENSE, SPARSE, MULTI_HOT, VECTOR).index(item[1])))

    @property
    def types(self) -> pa.Schema:
        """Return the raw columns with the types that rows to score have."""
        kinds = {
            DENSE: pa.float64(),
            SPARSE: pa.string(),
            MULTI_HOT: pa.list_(pa.string()),
            VECTOR: pa.list_(pa.float64()),
        }
        return pa.schema([(name, kinds[kind]) for name, kind in self.columns.items()])

    @property
    def model_columns(self) -> dict[str, str]:
        """Return the same as columns, for the columns that become features, including outputs of transforms."""
        kinds = dict.fromkeys([*self.dense, *self.in_buckets], DENSE)
        categories = [feature for feature in self.features if feature.boundaries is None]
        return kinds | {feature.name: MULTI_HOT if feature.multi_hot else SPARSE for feature in categories}

    @property
    def derived(self) -> dict[str, TransformConfig]:
        """Return the transforms. Raises ConfigError if a transform does not exist."""
        return restore(self.transforms)

    def of_features(self, names: Collection[str], dense: Collection[str] | None = None) -> RawSchema:
        """Return the schema for these features and dense columns (None: all dense columns), with
        the transforms that they need.
        """
        features = [feature for feature in self.features if feature.name in names]
        dense = [name for name in self.dense if dense is None or name in dense]
        dense_columns = {name: about for name, about in self.dense_columns.items() if name in dense}
        wanted = {*dense, *(feature.name for feature in features)}
        kept: list[dict[str, Any]] = []
        for each in reversed(self.transforms):
            if each["column"] in wanted:
                wanted |= set(make_transform(each["column"], {"kind": each["kind"], **each["settings"]}).inputs)
                kept.insert(0, each)
        vectors = {name: width for name, width in self.vectors.items() if wanted & {*vector_features(name, width)}}
        return replace(
            self, features=features, dense=dense, dense_columns=dense_columns, transforms=kept, vectors=vectors
        )

    @property
    def in_buckets(self) -> dict[str, list[float]]:
        """Return numeric column -> boundaries of its buckets, for columns that are looked up by bucket."""
        return {each.name: each.boundaries for each in self.features if each.boundaries is not None}


def schema_of(
    dataset: Dataset,
    keys: list[str],
    columns: ColumnsConfig,
    multi_hot: dict[str, int],
    new_values: Mapping[str, list[str]] | None = None,
) -> RawSchema:
    """Describe the raw rows of a model that reads the features `keys`.

    multi_hot: feature -> largest number of ids per row. new_values: vocabulary -> values that a
    stream has added to it.
    """
    features = [
        RawFeature(
            feature.name,
            feature.cardinality + len((new_values or {}).get(vocabulary_of(feature), ())),
            feature.multi_hot,
            multi_hot.get(feature.name, 1),
            feature.hash_size,
            feature.hash_seed,
            feature.boundaries,
            _sequence(feature, keys),
            feature.weighted,
        )
        for feature in map(dataset.sparse_feature, keys)
    ]
    schema = RawSchema(
        list(dataset.dense_features),
        features,
        dataset.dense_transform,
        columns.list_separator,
        dataset.dense_columns,
        list(columns.null_values),
        list(dataset.transforms),
        dict(columns.vectors),
    )
    return schema.of_features(keys)


def _sequence(feature: SparseFeature, keys: list[str]) -> SequenceFeature | None:
    """Return the feature's sequence. The sequence that it describes is left out if the model does not read it."""
    sequence = feature.sequence
    if sequence is None or sequence.beside is None or sequence.beside in keys:
        return sequence
    return replace(sequence, beside=None)


def lookups_of(dataset: Dataset, data_path: str, multi_hot: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Return the number of lookups of each feature with a vocabulary, and their distribution over
    the ids.

    The cache of tables on an SSD reads this. row_zero_share is the share of unknown and missing
    values in the validation rows (scoring.predictor).
    """
    shares = _row_zero_shares(dataset, data_path)
    return {
        feature.name: {
            **({ROW_ZERO: shares[feature.name]} if feature.name in shares else {}),
            "per_row": float(multi_hot.get(feature.name, feature.mean_pooling_factor)),
            "ranks": feature.frequency_curve.ranks,
            "shares": feature.frequency_curve.shares,
        }
        for feature in dataset.sparse_features
        if feature.hash_size is None  # hashed ids are in no order of frequency
    }


def _row_zero_shares(dataset: Dataset, data_path: str) -> dict[str, float]:
    """Return the share of row 0 in each feature's lookups, measured on the first row groups of validation."""
    names = [feature.name for feature in dataset.sparse_features if feature.hash_size is None]
    files = dataset.splits["validation"].files
    if not names or not files:
        return {}
    read = row_group_reader(data_path, dataset)
    zeros, totals = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    with storage.open_file(storage.join(data_path, files[0].path), "rb") as raw, pq.ParquetFile(raw) as file:
        for number in range(min(file.num_row_groups, 8)):
            table = read(file, number, names)
            for name in names:
                column = table[name].combine_chunks()
                ids = np.asarray(column.flatten() if pa.types.is_list(column.type) else column)
                zeros[name], totals[name] = zeros[name] + int((ids == 0).sum()), totals[name] + len(ids)
    return {name: round(zeros[name] / totals[name], 6) for name in names if totals[name]}


KINDS = {NUMBER: DENSE, TEXT: SPARSE, LIST: MULTI_HOT}
MAX_IDS = 1 << 40
MAX_BAG = 10_000  # ids that are drawn from one


def schema_problem(schema: RawSchema, lookups: Mapping[str, Mapping[str, Any]]) -> str:
    """Return "" or why the schema is invalid for an artifact."""
    names = [*schema.dense, *(feature.name for feature in schema.features)]
    if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        return "two columns have one name"
    if schema.dense_transform not in DENSE_TRANSFORMS:
        return f"dense columns are transformed by {schema.dense_transform!r}"
    for feature in schema.features:
        if problem := _feature_problem(feature):
            return problem
    leaders = {each.name for each in schema.features if each.sequence is not None and each.sequence.beside is None}
    for feature in schema.features:
        if feature.sequence is not None and feature.sequence.beside not in (None, *leaders):
            return f"feature {feature.name!r} stands beside {feature.sequence.beside!r}, which is no sequence"
    for name, about in schema.dense_columns.items():
        numbers = [about.get("mean", 0.0), about.get("std", 1.0)]
        if (
            name not in schema.dense
            or about.get("kind") not in DENSE_TRANSFORMS
            or not _are_finite(numbers)
            or numbers[1] <= 0
        ):
            return f"dense column {name!r} is transformed by {about}"
    try:
        made, kinds = schema.derived, schema.model_columns
    except ConfigError as error:
        return f"its transforms are none of this release or of a plugin that is here: {error}"
    if wrong := [name for name, each in made.items() if name in kinds and kinds[name] != KINDS[each.output]]:
        return f"column {wrong[0]!r} is made as another kind than it is read as"
    if not all(_is_whole(width, 1, MAX_VECTOR) for width in schema.vectors.values()):
        return f"vectors have the widths {schema.vectors}"
    for name, curve in lookups.items():
        if not _are_lookups(curve):
            return f"the lookups of {name!r} are no curve"
    return ""


def _feature_problem(feature: RawFeature) -> str:
    if not _is_whole(feature.cardinality, 1, MAX_IDS):
        return f"feature {feature.name!r} has {feature.cardinality} ids"
    if not _is_whole(feature.bag_size, 1, MAX_BAG):
        return f"feature {feature.name!r} has bags of {feature.bag_size}"
    if feature.hash_size is not None and not _is_whole(feature.hash_size, 2, feature.cardinality):
        return f"feature {feature.name!r} is hashed to {feature.hash_size} of {feature.cardinality} ids"
    if not _is_whole(feature.hash_seed, -(2**63), 2**64):
        return f"feature {feature.name!r} has the hash seed {feature.hash_seed}"
    if feature.sequence is not None and not (
        feature.multi_hot and _is_whole(feature.sequence.max_length, 1, MAX_LENGTH) and feature.sequence.keep in KEEPS
    ):
        return f"feature {feature.name!r} is the sequence {feature.sequence}"
    if feature.weighted not in (False, True) or (feature.weighted and (not feature.multi_hot or feature.sequence)):
        return f"feature {feature.name!r} has weights and no bags"
    ends = feature.boundaries
    if ends is not None and (not _are_finite(ends) or any(end <= begin for begin, end in itertools.pairwise(ends))):
        return f"feature {feature.name!r} has buckets that are not in order"
    return ""


def _are_lookups(about: Mapping[str, Any]) -> bool:
    ranks, shares = about.get("ranks", []), about.get("shares", [])
    return (
        _are_finite([about.get("per_row", 0.0), about.get("row_zero_share", 0.0), *shares])
        and about.get("per_row", 0.0) >= 0.0
        and len(ranks) == len(shares)
        and all(_is_whole(rank, 0, MAX_IDS) for rank in ranks)
        and all(before < after for before, after in itertools.pairwise(ranks))
        and all(0.0 <= share <= 1.0 + 1e-6 for share in shares)
    )


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _are_finite(values: Sequence[object]) -> bool:
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) for value in values
    )
