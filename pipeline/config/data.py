"""Define the schema of a data set: its raw rows, their preparation, and how shards are read (stdlib
only)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pipeline.config.columns import ColumnsConfig
from pipeline.config.generated import GeneratorConfig, SyntheticConfig
from pipeline.config.ids import BucketsConfig, IdsConfig
from pipeline.config.labels import LabelConfig, NegativeSamplingConfig
from pipeline.config.reader import ReaderConfig
from pipeline.config.registry import find
from pipeline.config.settings import read_settings
from pipeline.config.splits import SplitConfig
from pipeline.config.tables import is_pattern, matches
from pipeline.config.transforms import NUMBER, TransformConfig, make_transforms, raw_inputs
from pipeline.runtime.errors import ConfigError, check_at_least, check_choice, check_given, check_within, did_you_mean

DENSE_TRANSFORMS = ("log1p", "signed_log1p", "standardize", "none")
TEXT_FORMATS = ("csv", "tsv")  # formats that use data.delimiter and data.header
SUCCESS_FILES = ("required", "reported", "ignored")
Value = TypeVar("Value")


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
    # the columns of csv and tsv files that have no header line
    header: list[str] = field(default_factory=list)
    # exceptions from dense_transform by column
    dense_transforms: dict[str, str] = field(default_factory=dict)
    # new column -> kind and settings of its transform
    transforms: dict[str, Any] = field(default_factory=dict)
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
        if self.generator:
            self.read_generator()
        self._check_negative_sampling()
        if self.split.kind in ("time", "date") and not self.columns.timestamp:
            raise ConfigError(
                f"data.split.kind={self.split.kind} needs data.columns.timestamp=<column>, and data.format=csv, tsv or parquet"
            )
        if self.split.kind == "user" and self.group_column is None:
            raise ConfigError("data.split.kind=user needs data.group_column=<the column of users>")

    def read_generator(self) -> GeneratorConfig:
        """Return `generator` as the dataclass of its kind.

        Raises ConfigError for unknown keys and wrong types.
        """
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
            *columns.lists,
            columns.weight,
            self.group_column,
        ]
        if twice := [name for name in made if name in taken or name == columns.timestamp or not name]:
            raise ConfigError(f"data.transforms.{twice[0]} makes a column that already exists: give it another name")
        for column, each in made.items():
            for name, kind in each.inputs.items():
                if name in columns.lists or (name in columns.dense and kind != NUMBER):
                    what = "lists" if name in columns.lists else "numbers"
                    raise ConfigError(
                        f"data.transforms.{column} reads {name!r} as {kind}, but data.columns has it as {what}: use another column, or a "
                        "kind that reads {what}"
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
        """Replace patterns such as cat_* by an entry for every feature that fits.

        A feature's own entry has priority.
        """
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
