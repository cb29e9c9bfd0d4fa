"""Schemas of a data set: its raw rows, their ids and splits, and how shards are read (stdlib only)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from pipeline.config.labels import LabelConfig, NegativeSamplingConfig, check_labels
from pipeline.config.registry import find
from pipeline.config.sequences import HistoriesConfig, SequenceConfig, resolve_sequences
from pipeline.config.tables import is_pattern, matches
from pipeline.config.tags import TagsConfig
from pipeline.config.transforms import NUMBER, TransformConfig, make_transforms, raw_inputs
from pipeline.runtime.errors import (
    ConfigError,
    check_above,
    check_at_least,
    check_choice,
    check_given,
    check_within,
    did_you_mean,
)

DENSE_TRANSFORMS = ("log1p", "signed_log1p", "standardize", "none")
ID_KINDS = ("vocabulary", "hash")
BUCKET_KINDS = ("quantile", "log2", "given")
SPLITS = ("train", "validation", "test")
SPLIT_KINDS = ("row_range", "time", "date", "random", "user", "files", "given")
TEXT_FORMATS = ("csv", "tsv")  # whose delimiter and header data.delimiter and data.header give
SHUFFLES = ("row_groups", "none")
BAD_ROW_POLICIES = ("stop", "quarantine")
VERIFICATIONS = ("size", "checksum")


Value = TypeVar("Value")


@dataclass
class ColumnsConfig:
    """Names of the source's columns. Criteo's own (label, int_0..12, cat_0..25) are fixed by the format.

    A list-valued categorical column (Parquet list, or text joined by `list_separator`) goes
    into `multi_hot`, or into `sequence` where its order counts (config.sequences); every other categorical column into
    `sparse`. `timestamp` (whole numbers, or ISO 8601) is read where data.split.kind=time or date. `cat_{0..25}` in a list stands for cat_0 to cat_25. Empty text is a missing value, so is each word of
    `null_values`, and for dense columns NaN. list_separator=json: lists are JSON, [1, 2] or ["a", "b"].
    weighted: columns of multi_hot whose elements are id:weight, split at the last colon; an element without one counts 1.

    A single label is binary and needs no entry in `labels`; `label_values` and `label_threshold` are its values and threshold. Of several, `label` is the main one: a model of one task learns
    it, the gate goes by it; the first binary one where `label` names none of them. weight: a column of numbers of 0 at
    least, by which a row's losses and metrics are weighted.
    """

    label: str = "label"
    labels: dict[str, LabelConfig] = field(default_factory=dict)
    label_values: dict[str, int] = field(default_factory=dict)
    label_threshold: float | None = None
    weight: str | None = None
    dense: list[str] = field(default_factory=list)
    sparse: list[str] = field(default_factory=list)
    multi_hot: list[str] = field(default_factory=list)
    sequence: dict[str, SequenceConfig] = field(default_factory=dict)
    timestamp: str | None = None
    list_separator: str = "|"
    null_values: list[str] = field(default_factory=list)
    weighted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_given("data.columns.list_separator", self.list_separator)
        self.dense, self.sparse, self.multi_hot = map(expand_ranges, (self.dense, self.sparse, self.multi_hot))
        self._check_weighted()
        resolve_sequences(self.sequence, self.sparse)  # checks them
        if not self.labels:
            LabelConfig(values=self.label_values, threshold=self.label_threshold)  # checks them
            return
        if self.label_values or self.label_threshold is not None:
            key = "values" if self.label_values else "threshold"
            raise ConfigError(
                f"data.columns.label_{key} is of a single label, and data.columns.labels lists {len(self.labels)}: "
                f"set data.columns.labels.<name>.{key}"
            )
        check_labels(self.labels)
        if self.label == "label" and self.label not in self.labels:
            binary = (name for name, label in self.labels.items() if label.kind == "binary")
            self.label = next(binary, next(iter(self.labels)))
        elif self.label and self.label not in self.labels:
            raise ConfigError(
                f"data.columns.label={self.label!r} is not in data.columns.labels{did_you_mean(self.label, self.labels)}: "
                f"name one of {', '.join(self.labels)}"
            )

    def _check_weighted(self) -> None:
        self.weighted = expand_ranges(self.weighted)
        if other := [name for name in self.weighted if name not in self.multi_hot]:
            raise ConfigError(
                f"data.columns.weighted names {other[0]!r}, which is no column of data.columns.multi_hot"
                f"{did_you_mean(other[0], self.multi_hot)}: only the ids of bags have weights"
            )
        if self.weighted and self.list_separator == ":":
            raise ConfigError(
                "data.columns.list_separator=':' separates an id from its weight in the columns of data.columns.weighted: "
                "join the elements of lists by another character"
            )

    @property
    def lists(self) -> list[str]:
        """The columns with a list a row: bags, then sequences."""
        return [*self.multi_hot, *self.sequence]

    @property
    def sequences(self) -> dict[str, SequenceConfig]:
        """With every length and side."""
        return resolve_sequences(self.sequence, self.sparse)

    @property
    def all_labels(self) -> dict[str, LabelConfig]:
        """By column; empty for rows that are to be scored, where `label` is empty."""
        if not self.label:
            return {}
        return self.labels or {self.label: LabelConfig(values=self.label_values, threshold=self.label_threshold)}


def expand_ranges(names: list[str], key: str = "data.columns") -> list[str]:
    """`cat_{0..3}` becomes cat_0, cat_1, cat_2 and cat_3; other names stay."""
    found = []
    for name in names:
        match = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", name)
        first, last = (int(match[2]), int(match[3])) if match else (0, 0)
        if last < first:
            raise ConfigError(f"{key}: {name!r} counts from {first} down to {last}; write the smaller one first")
        found += [f"{match[1]}{number}{match[4]}" for number in range(first, last + 1)] if match else [name]
    return found


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


@dataclass
class SplitConfig:
    """Which rows train, validate and test; never a row in two of them.

    row_range: the last `validation_fraction` + `test_fraction` of the rows, in source order.
    time: the same fractions by the timestamp column (rows of one timestamp stay together).
    date: by the timestamp column too, validation from `validation_from` on and test from `test_from` on (as the column has it).
    random: about the same fractions, each row by a hash of its number and `seed`; user: by a hash of data.group_column's value and
    `seed`, so that all rows of one value are in one split.
    files: the last source file (1TB: day 23) is cut in halves, validation then test.
    given: `train`, `validation` and `test` name their files, each as `source` does, or a range of names (day_{0..22}).
    A split left out has no rows. Rows that are equal in every column that is read are counted across splits; where they
    are more than `max_shared_fraction` of a split's rows, the split is refused.
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
                f"split.{named[0]}={getattr(self, named[0])!r} names a split that exists, and split.kind={self.kind} cuts one "
                "from `source`: set split.kind=given, or leave it out"
            )
        check_within("split.seed", self.seed, 0, 2**63 - 1)
        if self.kind == "date" and self.validation_from is None:
            raise ConfigError(
                "split.kind=date needs split.validation_from=<time>, and split.test_from=<time> for a test split"
            )
        if self.kind != "date" and (self.validation_from is not None or self.test_from is not None):
            raise ConfigError(
                f"split.validation_from={self.validation_from} and split.test_from={self.test_from} go with split.kind=date, "
                f"not {self.kind}"
            )
        check_within("split.validation_fraction", self.validation_fraction, 0.0, 0.9)
        check_within("split.test_fraction", self.test_fraction, 0.0, 0.9)
        if self.validation_fraction + self.test_fraction >= 1.0:
            raise ConfigError(
                f"split fractions add up to {self.validation_fraction + self.test_fraction:g}: nothing is left to train on"
            )


@dataclass
class ReaderConfig:
    """How shards become batches. `num_streams` fixes the order of rows for every world size that divides it.

    shuffle: row_groups permutes row groups and the rows within each, anew every epoch; none follows the file
    order in rounds of `num_streams` row groups. decode_threads: 1 decodes on the prefetch thread; more read a
    row group ahead for every stream, and hide the latency of storage.
    on_bad_rows: stop names the first bad row and ends the run on all ranks; quarantine gives bad rows weight 0, so that
    steps and batches stay what they are, and lists them in <run>/quarantine, until they are more than max_bad_fraction.
    verify: at the start, the size of every shard, or its SHA-256 too (ranks share the work).
    """

    num_streams: int = 16
    shuffle: str = "row_groups"
    prefetch_batches: int = 8
    decode_threads: int = 1
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


def check_batch_geometry(global_batch_size: int, num_streams: int, world_size: int) -> None:
    """Raise ConfigError unless every rank owns the same number of streams and every stream gives a batch the same rows."""
    if num_streams % world_size:
        ranks = [n for n in range(1, num_streams + 1) if num_streams % n == 0]
        raise ConfigError(
            f"data.reader.num_streams={num_streams} cannot be divided evenly among {world_size} ranks: run on "
            f"{_either(ranks)} ranks, or set data.reader.num_streams={_either(_multiples_near(num_streams, world_size))} "
            "(another number of streams is another order of rows)"
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


@dataclass
class SyntheticConfig:
    """A generated data set with a planted teacher, for `python -m pipeline.generate`: Criteo's format, or tsv with a header.

    Ids have probability ~ rank^-zipf_exponent among the feature's `cardinalities` (26 in Criteo's format, which has 13
    dense features; else as many as data.columns names). The teacher's logits have standard deviation `teacher_scale`; `num_interactions` pairs of the smallest features interact.
    """

    num_rows: int = 1_000_000
    cardinalities: list[int] = field(
        default_factory=lambda: [
            3, 4, 6, 8, 10, 12, 15, 18, 20, 25, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 800, 1000, 2000, 5000, 10000, 20000
        ]
    )  # fmt: skip
    zipf_exponent: float = 1.2
    id_effect_decay: float = 0.25  # effects of ids ~ rank^-this; 0: a rare id says as much as a hot one
    num_dense: int = 13
    num_interactions: int = 5
    teacher_scale: float = 2.0
    positive_rate: float = 0.25
    seed: int = 0
    # A series of windows: rows of their own, sampled from a teacher that turns by `drift` radians a window, with a share
    # `churn` of the values of large features replaced by new ones in each.
    window: int = 0
    drift: float = 0.0
    churn: float = 0.0

    def __post_init__(self) -> None:
        check_at_least("synthetic.num_rows", self.num_rows, 1)
        check_at_least("synthetic.window", self.window, 0)
        check_within("synthetic.drift", self.drift, 0.0, 1.6)
        check_within("synthetic.churn", self.churn, 0.0, 1.0)
        check_at_least("synthetic.num_dense", self.num_dense, 1)
        check_above("synthetic.zipf_exponent", self.zipf_exponent, 0.0)
        check_at_least("synthetic.id_effect_decay", self.id_effect_decay, 0.0)
        check_above("synthetic.teacher_scale", self.teacher_scale, 0.0)
        check_within("synthetic.positive_rate", self.positive_rate, 0.001, 0.999)
        check_within("synthetic.num_interactions", self.num_interactions, 0, len(self.cardinalities) // 2)
        if min(self.cardinalities, default=0) < 1:
            raise ConfigError(
                f"synthetic.cardinalities has {len(self.cardinalities)} values, the least "
                f"{min(self.cardinalities, default=0)}; name features of at least 1 id each"
            )


@dataclass
class UserItemConfig:
    """A generated data set of users' clicks on items, for `python -m pipeline.generate`: a TSV with a header.

    Users and items have probability ~ rank^-exponent. Logits are dot products of planted vectors of `latent_dim` and have
    standard deviation `teacher_scale`.
    """

    num_rows: int = 1_000_000
    num_users: int = 3000
    num_items: int = 1500
    num_groups: int = 12
    num_genres: int = 20
    latent_dim: int = 6
    user_exponent: float = 0.5
    item_exponent: float = 0.7
    teacher_scale: float = 2.0
    positive_rate: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_users", "num_items", "num_groups", "num_genres", "latent_dim"):
            check_at_least(f"user_item.{name}", getattr(self, name), 1)
        check_at_least("user_item.user_exponent", self.user_exponent, 0.0)
        check_at_least("user_item.item_exponent", self.item_exponent, 0.0)
        check_above("user_item.teacher_scale", self.teacher_scale, 0.0)
        check_within("user_item.positive_rate", self.positive_rate, 0.001, 0.999)


@dataclass
class ConversionsConfig:
    """A generated data set of clicks and of conversions that follow on them, for `python -m pipeline.generate`: a TSV with a header.

    click_rate is the mean over impressions, conversion_rate that of the probability to convert after a click, whether there is
    one or not. dependence: the correlation of both logits, which have standard deviation `teacher_scale`.
    """

    num_rows: int = 1_000_000
    num_users: int = 2000
    num_items: int = 1000
    num_groups: int = 8
    num_categories: int = 10
    user_exponent: float = 0.3
    item_exponent: float = 0.5
    click_rate: float = 0.2
    conversion_rate: float = 0.2
    dependence: float = 0.5
    teacher_scale: float = 1.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_users", "num_items", "num_groups", "num_categories"):
            check_at_least(f"conversions.{name}", getattr(self, name), 1)
        check_at_least("conversions.user_exponent", self.user_exponent, 0.0)
        check_at_least("conversions.item_exponent", self.item_exponent, 0.0)
        check_within("conversions.click_rate", self.click_rate, 0.001, 0.999)
        check_within("conversions.conversion_rate", self.conversion_rate, 0.001, 0.999)
        check_within("conversions.dependence", self.dependence, -1.0, 1.0)
        check_above("conversions.teacher_scale", self.teacher_scale, 0.0)


SUCCESS_FILES = ("required", "reported", "ignored")


@dataclass
class DataConfig:
    """One data set: its raw format, how it is prepared into `path`, and how it is read from there."""

    name: str = "???"
    path: str = "${paths.data}/${.name}"
    format: str = "criteo_tsv"
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    # Whose rows gauc, ndcg_at_<k> and hit_rate_at_<k> rank among themselves: a column of the source, which no model reads.
    group_column: str | None = None
    dense_transform: str = "log1p"
    ids: IdsConfig = field(default_factory=IdsConfig)
    feature_ids: dict[str, IdsConfig] = field(default_factory=dict)
    buckets: dict[str, BucketsConfig] = field(
        default_factory=dict
    )  # of dense columns, which then are categorical features
    split: SplitConfig = field(default_factory=SplitConfig)
    negative_sampling: NegativeSamplingConfig | None = None  # of the training rows
    rows_per_shard: int = 1_000_000
    rows_per_row_group: int = 16_384
    max_quarantined_fraction: float = 0.001
    # Multi-hot ids sampled on the fly from one-hot ids, as MLPerf DLRMv2 does; feature name -> ids a sample.
    synthetic_multi_hot: dict[str, int] = field(default_factory=dict)
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    synthetic: SyntheticConfig | None = None
    user_item: UserItemConfig | None = None
    delimiter: str | None = None  # of csv (a comma) and tsv (a tab)
    header: list[str] = field(default_factory=list)  # the columns of csv and tsv files whose first line is a row
    dense_transforms: dict[str, str] = field(default_factory=dict)  # of dense columns that have another one
    conversions: ConversionsConfig | None = None
    transforms: dict[str, Any] = field(default_factory=dict)  # column that is made -> kind and settings of how
    histories: HistoriesConfig | None = None
    success_file: str = "reported"  # where a folder of Spark's or Hive's holds no _SUCCESS: required, reported, ignored
    tags: TagsConfig | None = None

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
                f"data.delimiter and data.header describe text with named columns: data.format={self.format} is none, use csv or tsv"
            )
        if self.delimiter is not None and (
            len(self.delimiter) != 1 or self.delimiter in '"\r\n' or not self.delimiter.isascii()
        ):
            raise ConfigError(f"data.delimiter={self.delimiter!r} must be one character, such as ; or a tab")
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
            if unknown := [name for name in names if name not in dense]:
                raise ConfigError(
                    f"data.{key} names {unknown[0]!r}, not a dense column{did_you_mean(unknown[0], dense)}"
                )
        for name, kind in self.dense_transforms.items():
            check_choice(f"data.dense_transforms.{name}", kind, DENSE_TRANSFORMS)
        if self.synthetic is not None:
            self._check_synthetic(self.synthetic)
        self._check_negative_sampling()
        if self.split.kind in ("time", "date") and not self.columns.timestamp:
            raise ConfigError(
                f"data.split.kind={self.split.kind} needs data.columns.timestamp=<column>, and data.format=csv, tsv or parquet"
            )
        if self.split.kind == "user" and self.group_column is None:
            raise ConfigError("data.split.kind=user needs data.group_column=<the column of users>")

    def _check_transforms(self, made: Mapping[str, TransformConfig], columns: ColumnsConfig) -> None:
        raw_inputs(made)
        taken = [
            *columns.all_labels,
            *columns.dense,
            *columns.sparse,
            *columns.lists,
            columns.weight,
            self.group_column,
        ]
        if twice := [name for name in made if name in taken or name == columns.timestamp or not name]:
            raise ConfigError(f"data.transforms.{twice[0]} makes a column that is there already: give it another name")
        for column, each in made.items():
            for name, kind in each.inputs.items():
                if name in columns.lists or (name in columns.dense and kind != NUMBER):
                    what = "lists" if name in columns.lists else "numbers"
                    raise ConfigError(
                        f"data.transforms.{column} reads {name!r} as {kind}, and data.columns has it as {what}"
                    )
                if name in columns.sparse and kind == NUMBER:
                    raise ConfigError(
                        f"data.transforms.{column} reads {name!r} as a number, and data.columns.sparse has it as a category"
                    )
                if name in columns.all_labels or name == columns.weight:
                    raise ConfigError(f"data.transforms.{column} reads {name!r}, which rows to be scored do not have")

    def _learn_transforms(self, made: Mapping[str, TransformConfig]) -> None:
        """What is learnt of a column that is made is learnt as of one of the source."""
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
                f"data.negative_sampling.label={name!r} is no binary label that all rows have{did_you_mean(name, labels)}; "
                f"the labels are {', '.join(labels)}"
            )

    def _expand(self, values: dict[str, Value], key: str, features: list[str]) -> dict[str, Value]:
        """With an entry for every feature that a pattern such as cat_* fits; a feature's own entry goes before patterns."""
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
