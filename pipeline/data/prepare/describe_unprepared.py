"""Describe the data set that `prepare` would write, without writing files. Plans without data use it.

A one-hot feature always has one id per sample. The length of lists is known only from rows, so
lists are an error. All ids are assumed to be looked up equally often, which is the worst case for a
cache.
"""

from __future__ import annotations

from pipeline.config.data import DataConfig
from pipeline.config.tables import is_pattern
from pipeline.data.dataset import FILE_NAME, Dataset, FrequencyCurve, SparseFeature, listed_labels
from pipeline.data.raw.layout import columns_of, feature_names
from pipeline.runtime.errors import DataError
from pipeline.runtime.shell_words import command


def describe_dataset(config: DataConfig, num_ids: dict[str, int]) -> Dataset:
    """Return the data set with empty `splits`. `num_ids`: the number of rows of each feature's
    table; hashed features need none.

    Raises:
        DataError: the config does not say how many ids a feature has, or how many ids a sample has.
    """
    columns = columns_of(config)
    if patterns := [name for name in config.columns.dense if is_pattern(name)]:
        raise DataError(
            f"{_absence(config)}, and only the data can tell which columns fit {patterns[0]!r}: {_prepare(config)}"
        )
    if columns.lists:
        raise DataError(
            f"{_absence(config)}, and how long the lists of {columns.lists[0]!r} are only the data can tell: {_prepare(config)}"
        )
    quantiles = {name: each.num_buckets + 1 for name, each in config.buckets.items() if each.kind == "quantile"}
    known = {**_hashed(config, columns.sparse), **quantiles, **num_ids}
    dense, sparse = feature_names(config)
    if missing := [name for name in sparse if name not in known]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(
            f"{_absence(config)}, and no table says how many ids {missing[0]!r}{more} has: choose tables that do "
            f"(tables.{missing[0]}.num_embeddings=<rows>), or {_prepare(config)}"
        )
    return Dataset(
        name=config.name,
        label=columns.label,
        dense_features=dense,
        sparse_features=[
            SparseFeature(name, known[name], False, 1.0, FrequencyCurve([known[name]], [1.0])) for name in sparse
        ],
        splits={},
        source_rows=0,
        accepted_rows=0,
        quarantined_rows=0,
        dense_transform=config.dense_transform,
        group_column=config.group_column,
        dense_columns={name: {"kind": kind} for name, kind in config.dense_transforms.items()},
        labels=listed_labels(columns.labels),
        weight_column=columns.weight,
    )


def _hashed(config: DataConfig, names: list[str]) -> dict[str, int]:
    ids = {name: config.feature_ids.get(name, config.ids) for name in names}
    return {name: each.hash_size for name, each in ids.items() if each.kind == "hash" and each.hash_size}


def _absence(config: DataConfig) -> str:
    return f"there is no {FILE_NAME} in {config.path!r}"


def _prepare(config: DataConfig) -> str:
    return f"prepare the data set with `{command('prepare')} data={config.name} source=<file, folder or glob>`, or set data.path"
