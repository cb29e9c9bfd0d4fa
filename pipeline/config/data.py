"""Define the schema of a data set: raw rows, ids, splits, and how shards are read (stdlib only)."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, TypeVar

from pipeline.config.columns import ColumnsConfig, LabelConfig, NegativeSamplingConfig
from pipeline.config.generated import GeneratorConfig, SyntheticConfig
from pipeline.config.registry import find, from_extra, read_settings
from pipeline.config.tables import is_pattern, matches
from pipeline.config.transforms import NUMBER, TransformConfig, make_transforms, raw_inputs
from pipeline.runtime.errors import ConfigError, check_at_least, check_choice, check_given, check_within, did_you_mean

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


SHUFFLES = ("row_groups", "groups", "none")
BAD_ROW_POLICIES = ("stop", "quarantine")
VERIFICATIONS = ("size", "checksum")


@dataclass
class ReaderConfig:
    """How shards become batches. `num_streams` fixes the order of rows for every world size that
    divides it.

    shuffle: row_groups permutes row groups and the rows within each, differently in every epoch;
    groups keeps the rows of a row group with one value of data.group_column next to each other in
    training; none follows the file order in rounds of `num_streams` row groups. decode_threads: 1 decodes on
    the prefetch thread; more read one row group ahead for every stream and hide the latency of
    storage. keep_mib: a split whose decoded columns fit this size stays in each rank's memory; 0
    keeps none. on_bad_rows: stop names the first bad row and ends the run on all ranks. quarantine
    gives bad rows weight 0, so steps and batches do not change, and lists them in <run>/quarantine,
    up to max_bad_fraction. verify: check the size of every shard at the start, or also its SHA-256
    (ranks share the work).
    """

    num_streams: int = 16
    shuffle: str = "row_groups"
    prefetch_batches: int = 8
    decode_threads: int = 1
    keep_mib: int = 128
    on_bad_rows: str = "stop"
    max_bad_fraction: float = 0.001
    verify: str = "size"

    def __post_init__(self) -> None:
        check_choice("reader.shuffle", self.shuffle, SHUFFLES)
        check_choice("reader.on_bad_rows", self.on_bad_rows, BAD_ROW_POLICIES)
        check_within("reader.max_bad_fraction", self.max_bad_fraction, 0.0, 1.0)
        check_choice("reader.verify", self.verify, VERIFICATIONS)
        check_at_least("reader.num_streams", self.num_streams, 1)
        check_at_least("reader.prefetch_batches", self.prefetch_batches, 1)
        check_at_least("reader.decode_threads", self.decode_threads, 1)
        check_at_least("reader.keep_mib", self.keep_mib, 0)


def check_batch_geometry(global_batch_size: int, num_streams: int, world_size: int) -> None:
    """Raise ConfigError unless all ranks have equally many streams and each stream has equally many
    rows per batch."""
    if num_streams % world_size:
        ranks = [n for n in range(1, num_streams + 1) if num_streams % n == 0]
        raise ConfigError(
            f"data.reader.num_streams={num_streams} cannot be divided evenly among {world_size} ranks: run on "
            f"{_either(ranks)} ranks, or set data.reader.num_streams={_either(_multiples_near(num_streams, world_size))} "
            "(another number of streams changes the order of rows)"
        )
    if global_batch_size % num_streams:
        streams = [n for n in range(world_size, global_batch_size + 1, world_size) if global_batch_size % n == 0]
        nearest = min(streams, key=lambda n: (abs(n - num_streams), n), default=None)
        raise ConfigError(
            f"a global batch of {global_batch_size} rows cannot be divided evenly among data.reader.num_streams={num_streams}: "
            f"use a global batch size of {_either(_multiples_near(global_batch_size, num_streams))}"
            + (f", or data.reader.num_streams={nearest}" if nearest else "")
        )


def _multiples_near(value: int, factor: int) -> list[int]:
    below = value // factor * factor
    return [n for n in (below, below + factor) if n]


def _either(choices: list[int]) -> str:
    *others, last = [str(choice) for choice in choices]
    return f"{', '.join(others)} or {last}" if others else last


DENSE_TRANSFORMS = ("log1p", "signed_log1p", "standardize", "none")
TEXT_FORMATS = ("csv", "tsv")  # formats that use data.delimiter and data.header
QUOTES = ("doubled", "backslash")
SUCCESS_FILES = ("required", "reported", "ignored")
Value = TypeVar("Value")


def checked_delimiter(key: str, value: str | None) -> str | None:
    """Return the delimiter of cells; \\t is a tab. Raises ConfigError for text that cannot be one."""
    value = "\t" if value == "\\t" else value
    if value is not None and (not value or set(value) & set('"\r\n') or not value.isascii()):
        raise ConfigError(f"{key}={value!r} cannot separate cells: give text such as ; or :: or \\t for a tab")
    return value


def check_encoding(key: str, value: str) -> None:
    """Raise ConfigError unless Python can decode text in that encoding."""
    try:
        if codecs.lookup(value)._is_text_encoding:
            return
    except LookupError:
        pass
    raise ConfigError(
        f"{key}={value!r} is not a known encoding: give one such as utf-8, utf-16, latin-1, cp1252 or gbk"
    )


@dataclass
class DataConfig:
    """One data set: its raw format, how it is prepared into `path`, and how it is read from there."""

    name: str = "???"
    path: str = "${paths.data}/${.name}"
    format: str = "criteo_tsv"
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    # The column whose equal values form a group for gauc, ndcg_at_<k> and hit_rate_at_<k>. No model
    # reads it.
    group_column: str | None = None
    dense_transform: str = "log1p"
    ids: IdsConfig = field(default_factory=IdsConfig)
    feature_ids: dict[str, IdsConfig] = field(default_factory=dict)
    # of dense columns, which then are categorical features
    buckets: dict[str, BucketsConfig] = field(default_factory=dict)
    split: SplitConfig = field(default_factory=SplitConfig)
    negative_sampling: NegativeSamplingConfig | None = None  # of the training rows
    rows_per_shard: int = 1_000_000
    rows_per_row_group: int = 16_384
    max_quarantined_fraction: float = 0.001
    # Multi-hot ids sampled while reading from one-hot ids, as MLPerf DLRMv2 does; feature name ->
    # ids per sample.
    synthetic_multi_hot: dict[str, int] = field(default_factory=dict)
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    synthetic: SyntheticConfig | None = None
    delimiter: str | None = None  # of csv (a comma) and tsv (a tab)
    encoding: str = "utf-8"  # of text files
    quotes: str = "doubled"  # a quote inside a quoted cell of csv: "" or, as Spark writes it, \"
    # the columns of csv and tsv files that have no header line
    header: list[str] = field(default_factory=list)
    # exceptions from dense_transform by column
    dense_transforms: dict[str, str] = field(default_factory=dict)
    # new column -> kind and settings of its transform
    transforms: dict[str, Any] = field(default_factory=dict)
    # Of tables whose columns are added to each row by a key and the row's time (extras/joins).
    joins: list[Any] = field(default_factory=list)
    # if a folder of Spark or Hive has no _SUCCESS: required, reported or ignored
    success_file: str = "reported"
    # Of a registered generator: its `kind` and settings. Empty: `synthetic` is generated, or
    # nothing.
    generator: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_given("data.name", self.name)
        check_given("data.path", self.path)
        check_choice("data.success_file", self.success_file, SUCCESS_FILES)
        fixed = find("format", self.format, "data.format").columns
        check_choice("data.dense_transform", self.dense_transform, DENSE_TRANSFORMS)
        check_at_least("data.rows_per_shard", self.rows_per_shard, 1)
        check_at_least("data.rows_per_row_group", self.rows_per_row_group, 1)
        check_within("data.max_quarantined_fraction", self.max_quarantined_fraction, 0.0, 1.0)
        if fixed is not None and self.columns != ColumnsConfig():
            raise ConfigError(
                f"data.format={self.format} fixes its columns: drop data.columns, or name another data.format"
            )
        if self.format not in TEXT_FORMATS and (self.delimiter is not None or self.header):
            raise ConfigError(
                f"data.delimiter and data.header describe text with named columns: data.format={self.format} is not text, use csv or tsv"
            )
        self.delimiter = checked_delimiter("data.delimiter", self.delimiter)
        check_encoding("data.encoding", self.encoding)
        check_choice("data.quotes", self.quotes, QUOTES)
        made = make_transforms(self.transforms)
        self._check_transforms(made, self.columns if fixed is None else fixed)
        features = self.columns.sparse + self.columns.lists or [f"cat_{index}" for index in range(26)]
        features = features + [name for name, each in made.items() if each.output != NUMBER]
        self.feature_ids = self._expand(self.feature_ids, "data.feature_ids", features)
        self.synthetic_multi_hot = self._expand(self.synthetic_multi_hot, "data.synthetic_multi_hot", features)
        dense = (self.columns if fixed is None else fixed).dense
        dense = dense + [name for name, each in made.items() if each.output == NUMBER]
        self.buckets = self._expand(self.buckets, "data.buckets", dense)
        self.dense_transforms = self._expand(self.dense_transforms, "data.dense_transforms", dense)
        self._learn_transforms(made)
        for key, names in (("buckets", self.buckets), ("dense_transforms", self.dense_transforms)):
            if unknown := [
                name for name in names if not any(name == each or fnmatchcase(name, each) for each in dense)
            ]:
                raise ConfigError(
                    f"data.{key} names {unknown[0]!r}, not a dense column{did_you_mean(unknown[0], dense)}"
                )
        for name, kind in self.dense_transforms.items():
            check_choice(f"data.dense_transforms.{name}", kind, DENSE_TRANSFORMS)
        if self.synthetic is not None:
            self._check_synthetic(self.synthetic)
        if self.generator:
            self.read_generator()
        self._check_negative_sampling()
        if self.split.kind in ("time", "date") and not self.columns.timestamp:
            raise ConfigError(
                f"data.split.kind={self.split.kind} needs data.columns.timestamp=<column>, and data.format=csv, tsv or parquet"
            )
        if self.split.kind == "user" and self.group_column is None:
            raise ConfigError("data.split.kind=user needs data.group_column=<the column of users>")
        if self.reader.shuffle == "groups" and self.group_column is None:
            raise ConfigError("data.reader.shuffle=groups needs data.group_column=<column>")
        if self.joins:
            self.joins = from_extra("check_joins", "data.joins")(self)

    @property
    def joined_columns(self) -> list[str]:
        """Return the columns that come from the tables of `joins` instead of the source."""
        return [name for join in self.joins for name in join["columns"]]

    def read_generator(self) -> GeneratorConfig:
        """Return `generator` as the dataclass of its kind. Raises ConfigError for unknown keys and
        wrong types."""
        if "kind" not in self.generator:
            raise ConfigError("data.generator needs a kind: data.generator={kind: histories, num_rows: 1000}")
        settings = {name: value for name, value in self.generator.items() if name != "kind"}
        kind = str(self.generator["kind"])
        chosen: type[GeneratorConfig] = find("generator", kind, "data.generator.kind")
        return read_settings(chosen, settings, "data.generator", f"kind={kind}")

    def _check_transforms(self, made: Mapping[str, TransformConfig], columns: ColumnsConfig) -> None:
        raw_inputs(made)
        taken = [
            *columns.all_labels,
            *columns.dense,
            *columns.sparse,
            *columns.raw_lists,
            *columns.vector_features,
            columns.weight,
            self.group_column,
        ]
        if twice := [name for name in made if name in taken or name == columns.timestamp or not name]:
            raise ConfigError(f"data.transforms.{twice[0]} makes a column that already exists: give it another name")
        for column, each in made.items():
            for name, kind in each.inputs.items():
                if name in columns.raw_lists or (name in columns.dense and kind != NUMBER):
                    what = "lists" if name in columns.raw_lists else "numbers"
                    raise ConfigError(
                        f"data.transforms.{column} reads {name!r} as {kind}, but data.columns has it as {what}: use another column, or a "
                        f"kind that reads {what}"
                    )
                if name in columns.sparse and kind == NUMBER:
                    raise ConfigError(
                        f"data.transforms.{column} reads {name!r} as a number, but data.columns.sparse has it as a category: leave it out "
                        "of data.columns.sparse, or transform another column"
                    )
                if name in columns.all_labels or name == columns.weight:
                    raise ConfigError(
                        f"data.transforms.{column} reads {name!r}, a label or a weight, which rows to be scored do not have: use another column"
                    )

    def _learn_transforms(self, made: Mapping[str, TransformConfig]) -> None:
        """Add default settings of buckets and standardization for the columns that transforms make."""
        for name, each in made.items():
            if each.boundaries is not None:
                self.buckets.setdefault(name, BucketsConfig("given", boundaries=each.boundaries))
            elif each.num_buckets is not None:
                self.buckets.setdefault(name, BucketsConfig("quantile", each.num_buckets))
            elif each.output == NUMBER:
                self.dense_transforms.setdefault(name, "standardize" if each.is_standardized else "none")

    def _check_negative_sampling(self) -> None:
        if self.negative_sampling is None:
            return
        name, labels = self.negative_sampling.label, self.columns.all_labels
        if find("format", self.format, "data.format").columns is not None:
            labels = {"label": LabelConfig()}
        if name not in labels or labels[name].kind != "binary" or labels[name].mask is not None:
            raise ConfigError(
                f"data.negative_sampling.label={name!r} is not a binary label that all rows have{did_you_mean(name, labels)}; "
                f"the labels are {', '.join(labels)}"
            )

    def _expand(self, values: dict[str, Value], key: str, features: list[str]) -> dict[str, Value]:
        """Replace patterns such as cat_* by an entry for every feature that fits. A feature's own
        entry has priority."""
        found: dict[str, Value] = {}
        givers: dict[str, str] = {}
        for pattern in filter(is_pattern, values):
            for feature in matches(pattern, features, key):
                if feature in found and feature not in values and found[feature] != values[pattern]:
                    raise ConfigError(
                        f"{feature!r} fits {key}.{givers[feature]} and {key}.{pattern}, which differ; set {key}.{feature}"
                    )
                found[feature], givers[feature] = values[pattern], pattern
        return {**found, **{name: value for name, value in values.items() if not is_pattern(name)}}

    def _check_synthetic(self, synthetic: SyntheticConfig) -> None:
        sampled = (synthetic.num_dense, len(synthetic.cardinalities))
        if self.format == "criteo_tsv":
            named, what = (13, 26), "Criteo's format has 26 categorical features and 13 dense ones"
        elif self.format == "tsv":
            named = (len(self.columns.dense), len(self.columns.sparse))
            what = f"data.columns names {named[1]} categorical features and {named[0]} dense ones"
        else:
            raise ConfigError(f"data.synthetic writes data.format=criteo_tsv or tsv, not {self.format}")
        if sampled != named:
            raise ConfigError(
                f"synthetic.cardinalities has {sampled[1]} values and synthetic.num_dense is {sampled[0]}, but {what}"
            )
