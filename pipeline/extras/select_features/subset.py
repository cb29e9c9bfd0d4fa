"""Describe a prepared data set without some of its features. The files are linked, not copied."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from pipeline.config.columns import vector_features
from pipeline.config.data import DataConfig
from pipeline.config.jobs.train import TrainJob
from pipeline.config.tables import TableConfig
from pipeline.config.transforms import make_transforms, raw_inputs
from pipeline.data.dataset import FILE_NAME, Dataset
from pipeline.data.prepare.identity import recipe_of
from pipeline.data.raw.layout import feature_names, find_format
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.storage import storage

Value = TypeVar("Value")


def needed_features(job: TrainJob, dataset: Dataset) -> set[str]:
    """Return the features that cannot be left out alone: the model's config names them, or a sequence
    uses their ids or positions.
    """
    known = {*dataset.dense_features, *dataset.sparse_feature_names}
    named = set(_texts(asdict(job.model))) & known
    sequences = [feature.sequence for feature in dataset.sparse_features if feature.sequence]
    return named | {name for each in sequences for name in (each.shares, each.beside) if name}


def data_without(data: DataConfig, dropped: Collection[str], path: str) -> DataConfig:
    """Return the config of the data set in `path`, which has all features of `data` but the dropped ones."""
    if (fixed := find_format(data.format).columns) is not None:  # such a format has all its columns: name the others
        columns = replace(data.columns, label=fixed.label, dense=fixed.dense, sparse=fixed.sparse)
        data = replace(data, format="tsv", header=[fixed.label, *fixed.dense, *fixed.sparse], columns=columns)
    columns, data = data.columns, replace(data, synthetic=None, generator={})  # of the raw rows

    def kept(names: list[str]) -> list[str]:
        return [name for name in names if name not in dropped]

    columns = replace(
        columns,
        dense=kept(columns.dense),
        sparse=kept(columns.sparse),
        multi_hot=kept(columns.multi_hot),
        weighted=kept(columns.weighted),
        vectors={name: width for name, width in columns.vectors.items() if kept(vector_features(name, width))},
        sequence=_without(columns.sequence, dropped),
    )
    inputs = raw_inputs(make_transforms(_without(data.transforms, dropped)))
    read = {*columns.dense, *columns.sparse, *columns.raw_lists, *inputs, data.group_column}
    joins = [{**join, "columns": [name for name in join["columns"] if name in read]} for join in data.joins]
    return replace(
        data,
        path=path,
        columns=columns,
        joins=[join for join in joins if join["columns"]],
        feature_ids=_without(data.feature_ids, dropped),
        dense_transforms=_without(data.dense_transforms, dropped),
        buckets=_without(data.buckets, dropped),
        transforms=_without(data.transforms, dropped),
        synthetic_multi_hot=_without(data.synthetic_multi_hot, dropped),
    )


def tables_without(tables: Mapping[str, TableConfig], dropped: Collection[str]) -> dict[str, TableConfig]:
    """Return the tables' config for the features that are left."""
    found = {}
    for name, table in _without(tables, dropped).items():
        names = [each for each in table.feature_names or [] if each not in dropped]
        if names or not table.feature_names:
            found[name] = replace(table, feature_names=names or table.feature_names)
    return found


def write_subset(source: str, dataset: Dataset, data: DataConfig) -> None:
    """Write the data set that `data` describes to its path, by links to the files in `source`. Raises
    ConfigError if another data set is there, or `source` is not on a disk.
    """
    if not storage.is_local(source):
        raise ConfigError(
            f"select_features links the files of the data set, but {source} is not on a disk: copy it to one"
        )
    names = feature_names(data)
    kept = dataset.with_features(*names)
    features = {*names[0], *names[1]}
    recipe = recipe_of(data)
    kept = replace(
        kept,
        dense_columns={name: about for name, about in kept.dense_columns.items() if name in features},
        transforms=[each for each in kept.transforms if each["column"] in features],
        recipe={key: recipe.get(key, value) for key, value in kept.recipe.items()},
    )
    path, text = storage.join(data.path, FILE_NAME), kept.to_json()
    if storage.is_file(path):
        if storage.read_text(path) != text:
            raise ConfigError(f"{data.path} has other features or rows: choose another run_dir, or remove {data.path}")
        return
    files = [file.path for split in kept.splits.values() for file in split.files]
    files += [each.path for each in kept.side_tables]
    for name in [*files, *(each.vocabulary for each in kept.sparse_features if each.vocabulary)]:
        target = storage.join(data.path, name)
        storage.make_folder(storage.dirname(target))
        if not os.path.lexists(target):
            _link(os.path.abspath(storage.join(source, name)), target)
    storage.publish_text(path, text)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        os.symlink(source, target)


def _without(values: Mapping[str, Value], dropped: Collection[str]) -> dict[str, Value]:
    return {name: value for name, value in values.items() if name not in dropped}


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in nested values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.items():
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)
