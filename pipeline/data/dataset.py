"""Read and write dataset.json, which describes a prepared data set, without torch and pyarrow: jobs
are checked quickly.

dataset.json records what `prepare` wrote: the files of each split with rows, sizes and checksums,
and the features with cardinality, pooling factor and frequency curve.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Dict, List, Optional

import msgspec

from pipeline.config.columns import LabelConfig
from pipeline.runtime.errors import DataError, did_you_mean
from pipeline.runtime.shell_words import command
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.manifest import name_problem

FILE_NAME = "dataset.json"
FORMAT_VERSION = 1
# Fields of later releases. The file omits them if they are empty, so fingerprints of earlier data
# sets do not change.
ADDED_FIELDS = (
    "shared_rows",
    "group_column",
    "dense_columns",
    "labels",
    "weight_column",
    "negative_sampling",
    "transforms",
    "side_tables",
)
# column of the shards: int64, a 64-bit hash of the group's value, 0 if it is missing
GROUP_COLUMN = "__group__"


@dataclass(frozen=True)
class ShardFile:
    """One Parquet file.

    `path` is relative to the data set's folder; `row_groups` lists the number of rows of each row
    group, in order.
    """

    path: str
    num_rows: int
    size_bytes: int
    sha256: str
    row_groups: List[int]


@dataclass(frozen=True)
class Split:
    """One split. num_positives counts rows where the main label is not 0.

    weighted_rate: the share of positives, weighted as an evaluation weights the rows for the main
    label; None if all weights are 1.
    """

    files: List[ShardFile]
    num_rows: int
    num_positives: int
    weighted_rate: Optional[float] = None

    @property
    def label_rate(self) -> float:
        """Return the share of positives, weighted by sample weights if there are any; 0 if there are no rows."""
        if self.weighted_rate is not None:
            return self.weighted_rate
        return self.num_positives / self.num_rows if self.num_rows else 0.0


@dataclass(frozen=True)
class FrequencyCurve:
    """`shares[i]` of all training lookups are for the `ranks[i]` most frequent ids.

    Both lists ascend.
    """

    ranks: List[int]
    shares: List[float]


@dataclass(frozen=True)
class SequenceFeature:
    """A list whose order matters, oldest first. It has at most `max_length` ids: of a longer list
    the last ids or the first ids.

    beside: the sequence whose elements this list describes; both have equal lengths. shares: the
    feature whose ids this list uses.
    """

    max_length: int
    keep: str = "last"
    beside: Optional[str] = None
    shares: Optional[str] = None


@dataclass(frozen=True)
class SparseFeature:
    """A categorical feature.

    Ids are in [0, cardinality). Id 0 is for unknown and rare values; ids from 1 on are ordered by
    descending frequency.
    """

    name: str
    cardinality: int
    multi_hot: bool
    mean_pooling_factor: float
    frequency_curve: FrequencyCurve
    # relative path of the vocabulary's Parquet file; None if ids are hashes
    vocabulary: Optional[str] = None
    hash_size: Optional[int] = None
    hash_seed: int = 0
    num_distinct: int = 0  # distinct raw values in the training split, including rare ones
    # Ascending, for a number in buckets: value x is in bucket (boundaries <= x), and the vocabulary
    # has buckets as text.
    boundaries: Optional[List[float]] = None
    sequence: Optional[SequenceFeature] = None  # of a list (multi_hot) whose order counts
    # a list (multi_hot) whose ids have weights, in the shards' column weights_column()
    weighted: bool = False
    # The vocabulary's file; data/vocabulary_files.py checks it. None in data sets of earlier releases.
    vocabulary_bytes: Optional[int] = None
    vocabulary_sha256: Optional[str] = None


@dataclass(frozen=True)
class Label:
    """A label as in config.labels.LabelConfig. The weight of its loss is missing, because training chooses it."""

    name: str
    kind: str = "binary"
    num_buckets: Optional[int] = None
    mask: Optional[str] = None


@dataclass(frozen=True)
class SideTable:
    """Prepared columns that many rows have in common, stored once for each version of them.

    The shards have `index` (int32) instead of `columns`: the `version` of a row of the Parquet file
    `path`, whose versions are below num_versions. about: what `prepare` printed about the join.
    """

    index: str
    columns: List[str]
    path: str
    num_rows: int
    num_versions: int
    size_bytes: int
    sha256: str
    about: Dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Dataset:
    """The content of dataset.json.

    `label` is the main label. `labels` lists all labels if data.columns.labels declared them.
    """

    name: str
    label: str
    dense_features: List[str]
    sparse_features: List[SparseFeature]
    splits: Dict[str, Split]
    source_rows: int
    accepted_rows: int
    quarantined_rows: int
    dense_transform: str
    # path (its last part), size_bytes, digest, num_rows, num_quarantined
    sources: List[Dict[str, Any]] = field(default_factory=list)
    # the part of DataConfig that determines the files
    recipe: Dict[str, Any] = field(default_factory=dict)
    versions: Dict[str, str] = field(default_factory=dict)
    # split -> best possible AUC of the main label, split/label -> of other labels; for generated
    # data only
    bayes_auc: Dict[str, float] = field(default_factory=dict)
    # split -> number of its rows that equal a row of an earlier split in all columns; for splits
    # with given files
    shared_rows: Dict[str, int] = field(default_factory=dict)
    group_column: Optional[str] = None  # column of the source; shards store it as GROUP_COLUMN
    # Dense column -> kind of its transform, and learnt mean and std. Other columns use
    # dense_transform.
    dense_columns: Dict[str, Dict[str, Any]] = field(default_factory=dict)
    labels: List[Label] = field(default_factory=list)
    weight_column: Optional[str] = None
    # label and keep of data.negative_sampling, and dropped_rows
    negative_sampling: Dict[str, Any] = field(default_factory=dict)
    # column, kind and settings of computed columns, as data.transforms declares them
    transforms: List[Dict[str, Any]] = field(default_factory=list)
    side_tables: List[SideTable] = field(default_factory=list)  # of data.joins
    format_version: int = FORMAT_VERSION

    def best_auc(self, split: str, label: str) -> Optional[float]:
        """Return the best possible AUC of a label; None if the rows were not generated."""
        return self.bayes_auc.get(split if label == self.label else f"{split}/{label}")

    @property
    def weighted_features(self) -> List[str]:
        return [feature.name for feature in self.sparse_features if feature.weighted]

    @property
    def dense_of_source(self) -> List[str]:
        """Return the dense columns that prepare read from the source."""
        return list(self.recipe.get("columns", {}).get("dense", []))

    @property
    def sparse_feature_names(self) -> List[str]:
        return [feature.name for feature in self.sparse_features]

    @property
    def all_labels(self) -> List[Label]:
        """Return all labels, at least one. A single label without settings is binary."""
        return self.labels or [Label(self.label)]

    @property
    def label_columns(self) -> List[str]:
        """Return the columns of the shards that hold labels, and the column of sample weights if there is one."""
        return [label.name for label in self.all_labels] + ([self.weight_column] if self.weight_column else [])

    def sparse_feature(self, name: str) -> SparseFeature:
        """Return the feature of that name. Raises KeyError for an unknown name."""
        return {feature.name: feature for feature in self.sparse_features}[name]

    def with_features(self, dense: Sequence[str], sparse: Sequence[str]) -> "Dataset":
        """Return the same data with these features in this order.

        A trained model reads features by position. Raises DataError if the data set lacks a
        feature.
        """
        has = {*self.dense_features, *self.sparse_feature_names}
        if missing := [name for name in (*dense, *sparse) if name not in has]:
            raise DataError(
                f"data set {self.name!r} lacks {len(missing)} of the {len(dense) + len(sparse)} features that the model reads: "
                f"{', '.join(missing[:5])}; prepare it with the columns that the model was trained on"
            )
        return replace(self, dense_features=list(dense), sparse_features=[self.sparse_feature(each) for each in sparse])

    @property
    def without_side_columns(self) -> "Dataset":
        """Return the same data with the features that shards hold in each row."""
        once = {name for side in self.side_tables for name in side.columns}
        return replace(
            self,
            dense_features=[name for name in self.dense_features if name not in once],
            sparse_features=[each for each in self.sparse_features if each.name not in once],
        )

    def fingerprint(self) -> str:
        """Return the SHA-256 of the canonical JSON.

        Fingerprints are equal only if files, schema and statistics are equal.
        """
        return hashlib.sha256(self.to_json(indent=None).encode()).hexdigest()

    def schema_hash(self) -> str:
        """Return the SHA-256 of everything that a model depends on: names, kinds and cardinalities
        of columns, and transforms.
        """
        features = [
            [feature.name, feature.cardinality, feature.multi_hot]
            + ([asdict(feature.sequence)] if feature.sequence else [])
            + (["weighted"] if feature.weighted else [])
            for feature in self.sparse_features
        ]
        label: Any = [list(asdict(label).values()) for label in self.labels] or self.label
        schema: List[Any] = [label, self.dense_features, features, self.dense_transform]
        schema += [self.dense_columns] if self.dense_columns else []
        schema += [self.transforms] if self.transforms else []
        return hashlib.sha256(json.dumps(schema).encode()).hexdigest()

    def to_json(self, indent: Optional[int] = 1) -> str:
        values = {key: value for key, value in asdict(self).items() if value or key not in ADDED_FIELDS}
        for feature in values["sparse_features"]:
            for key in ("boundaries", "sequence", "vocabulary_bytes", "vocabulary_sha256"):
                if feature[key] is None:
                    del feature[key]
            if not feature["weighted"]:
                del feature["weighted"]
        for split in values["splits"].values():
            if split["weighted_rate"] is None:
                del split["weighted_rate"]
        return json.dumps(values, indent=indent, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Dataset":
        """Read dataset.json.

        Raises DataError if the format version is another one, or `prepare` did not write the file.
        """
        try:
            raw = json.loads(text)
            version = raw.get("format_version")
        except (ValueError, AttributeError, RecursionError) as error:
            raise _damaged(str(error)) from None
        if version != FORMAT_VERSION:
            raise DataError(
                f"{FILE_NAME} has format_version {str(version)[:100]}, this release reads {FORMAT_VERSION}: "
                "run `python -m pipeline prepare` again"
            )
        if unknown := sorted(raw.keys() - {each.name for each in fields(cls)}):
            raise _damaged(f"it has the key {unknown[0][:100]!r}")
        try:
            dataset = msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            raise _damaged(str(error)) from None
        if problem := dataset._names_problem():
            raise _damaged(problem)
        return dataset

    def _names_problem(self) -> str:
        """Return the name of a file that leads out of the data set's folder, as a problem; "" if there is none."""
        named = [(f"feature {each.name!r}", each.vocabulary) for each in self.sparse_features if each.vocabulary]
        named += [(f"side table {each.index!r}", each.path) for each in self.side_tables]
        named += [(f"split {name!r}", shard.path) for name, split in self.splits.items() for shard in split.files]
        return next(
            (f"{name[:100]!r} of {what[:100]} {text}" for what, name in named if (text := name_problem(name))), ""
        )


def _damaged(problem: str) -> DataError:
    return DataError(f"{FILE_NAME} is damaged ({problem}): run `python -m pipeline prepare` again")


def vocabulary_of(feature: SparseFeature) -> str:
    """Return the feature whose vocabulary the ids belong to: the feature itself, or the one that a
    sequence shares ids with."""
    return (feature.sequence and feature.sequence.shares) or feature.name


def weights_column(feature: str) -> str:
    """Return the name of the column of weights in shards: list<float32>, one number per id of the feature."""
    return f"__weights__{feature}"


def listed_labels(labels: Mapping[str, LabelConfig]) -> List[Label]:
    """Return the labels of data.columns.labels in the form that a data set stores."""
    return [Label(name, label.kind, label.num_buckets, label.mask) for name, label in labels.items()]


def load_dataset(folder: str) -> Dataset:
    """Return the data set in a folder. Raises DataError if `prepare` has not finished."""
    path = storage.join(folder, FILE_NAME)
    if not storage.is_file(path):
        raise DataError(
            f"there is no {FILE_NAME} in {folder!r}: prepare it first with "
            f"`{command('prepare')} data=<name> source=<file, folder or glob>`, or set data.path"
        )
    try:
        text = storage.read_text(path)
    except UnicodeDecodeError as error:
        raise _damaged(str(error)) from None
    return Dataset.from_json(text)


def check_split(dataset: Dataset, split: str, least_rows: int) -> None:
    """Raise DataError unless the split exists and has at least `least_rows` rows."""
    if split not in dataset.splits:
        raise DataError(
            f"data set {dataset.name!r} has no split {split!r}, it has {', '.join(dataset.splits)}"
            f"{did_you_mean(split, dataset.splits)}"
        )
    num_rows = dataset.splits[split].num_rows
    if num_rows == 0 and split != "train":
        raise DataError(
            f"split {split!r} of data set {dataset.name!r} has 0 rows: "
            f"prepare it again with data.split.{split}_fraction above 0, or data.split.{split} of data.split.kind=given"
        )
    if num_rows < least_rows:
        raise DataError(
            f"split {split!r} of data set {dataset.name!r} has {num_rows} rows, fewer than one global batch of "
            f"{least_rows}: use a smaller global batch size, or prepare more rows"
        )


def check_group(dataset: Dataset, group_column: str | None) -> None:
    """Raise DataError if a job's data.group_column differs from the data set's."""
    if group_column is not None and group_column != dataset.group_column:
        held = "none" if dataset.group_column is None else repr(dataset.group_column)
        raise DataError(
            f"data.group_column={group_column!r}, but data set {dataset.name!r} was prepared with {held}: prepare it again with "
            "it, in another data.path, or leave it out"
        )


def check_multi_hot(dataset: Dataset, multi_hot: dict[str, int]) -> None:
    """Raise DataError for a number of ids below 1, and for a feature that is unknown or already holds lists."""
    features = {feature.name: feature for feature in dataset.sparse_features}
    for name, size in multi_hot.items():
        if name not in features:
            raise DataError(
                f"data.synthetic_multi_hot names {name!r}, which is not a sparse feature{did_you_mean(name, features)}"
            )
        if size < 1:
            raise DataError(f"data.synthetic_multi_hot.{name}={size} must be at least 1")
        if features[name].multi_hot:
            raise DataError(f"data.synthetic_multi_hot.{name}={size}, but {name!r} already holds lists: leave it out")
