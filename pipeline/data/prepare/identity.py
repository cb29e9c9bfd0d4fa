"""Define what a data set's bytes depend on, and find a data set that was prepared with the same
input."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.config.columns import LabelConfig
from pipeline.config.data import SPLITS, DataConfig
from pipeline.config.registry import from_extra
from pipeline.data.dataset import FILE_NAME, Dataset, listed_labels, load_dataset
from pipeline.data.raw.blocks import Source
from pipeline.data.raw.layout import feature_names, with_dense_names
from pipeline.runtime.errors import DataError, UserError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.storage import stamp_of

if TYPE_CHECKING:
    from pipeline.data.prepare.base_vocabulary import BaseVocabulary

MAX_NAMED = 5
NOT_IN_RECIPE = (*SPLITS, "max_shared_fraction")


def find_prepared(
    config: DataConfig, sources: list[Source], base: BaseVocabulary | None = None, verify_sources: bool = False
) -> Dataset | None:
    """Return the finished data set if it was made from the same sources by the same recipe.

    A large source is identified by samples of its bytes. All of its bytes are compared if it was
    written to after the data set was, or if `verify_sources` asks for it.

    Raises:
        DataError: config.path holds another data set.
    """
    from pipeline.data.vocabulary_files import find_vocabulary

    path = storage.join(config.path, FILE_NAME)
    if not storage.is_file(path):
        return None
    hint = f"choose another data.path, or remove {config.path} to prepare it anew"
    try:
        dataset = load_dataset(config.path)
    except UserError as error:
        raise DataError(f"{path} is of another release: {hint}") from error
    differing = [
        f"{key} was {found}, is {wanted}" for key, (found, wanted) in _differences(config, dataset, base).items()
    ]
    given = {source.name: (source.size_bytes, source.digest, source.split) for source in sources}
    prepared = {
        source["path"]: (source["size_bytes"], source["digest"], source.get("split")) for source in dataset.sources
    }
    differing += [f"{name} is another file" for name in given.keys() & prepared.keys() if given[name] != prepared[name]]
    written_ns = stamp_of(path).modified_ns or sys.maxsize  # unknown in an object store
    differing += _changed_sources(dataset, sources, 0 if verify_sources else written_ns, hint)
    if config.joins:
        differing += from_extra("changed_joins", "data.joins")(config, dataset)
    differing += [f"{name} is new" for name in given.keys() - prepared.keys()]
    differing += [f"{name} is missing" for name in prepared.keys() - given.keys()]
    if differing:
        raise DataError(f"{config.path} was prepared from other input ({'; '.join(sorted(differing)[:5])}): {hint}")
    files = [(shard.path, shard.size_bytes) for split in dataset.splits.values() for shard in split.files]
    for name, size_bytes in files + [(side.path, side.size_bytes) for side in dataset.side_tables]:
        shard_path = storage.join(config.path, name)
        if not storage.is_file(shard_path) or storage.size_bytes(shard_path) != size_bytes:
            raise DataError(f"{shard_path} is not the {size_bytes:,} bytes that {FILE_NAME} names: {hint}")
    for feature in dataset.sparse_features:
        if feature.vocabulary:
            try:
                find_vocabulary(config.path, feature)
            except UserError as error:
                raise DataError(f"{error}; {hint}") from error
    return dataset


def _changed_sources(dataset: Dataset, sources: list[Source], since_ns: int, hint: str) -> list[str]:
    """Return the large sources that were modified after `since_ns` and whose SHA-256 is another one.

    0 compares all. Then a data set without SHA-256 is a DataError.
    """
    given, changed = {source.name: source for source in sources}, []
    for prepared in dataset.sources:
        source = given.get(prepared["path"])
        if source is None or not source.is_sampled or source.digest != prepared["digest"]:
            continue
        if since_ns and (source.stamp is None or source.stamp.modified_ns <= since_ns):
            continue
        if "sha256" not in prepared and not since_ns:
            raise DataError(f"{FILE_NAME} has no SHA-256 of {source.path}, as an earlier release wrote it: {hint}")
        if prepared.get("sha256") not in (None, storage.sha256_of(source.path)):
            changed.append(f"{source.name} has as many bytes as before, and other ones")
    return changed


def _differences(
    config: DataConfig, dataset: Dataset, base: BaseVocabulary | None = None
) -> dict[str, tuple[Any, Any]]:
    """Return key -> (value in the data set, value in the config), for the recipe's keys with different values."""
    wanted, found = _flat("data", recipe_of(config, base)), _flat("data", dataset.recipe)
    # Keys that may be absent in this job. Some keys are in a recipe only if they are set.
    keys = wanted.keys() | {key for key in found if key.startswith(("data.columns.label", "data.joins"))}
    return {key: (found.get(key), wanted.get(key)) for key in keys if wanted.get(key) != found.get(key)}


def check_not_contradicted(config: DataConfig, dataset: Dataset, given: Iterable[str]) -> str:
    """Raise DataError if a job that reads a data set contradicts its preparation.

    `given` are the keys on the command line. Training cannot apply them, so a sweep over them would
    compare equal runs. Other keys may differ, because they may have been given to the preparation:
    the returned text names them, and is empty if there is none.
    """
    if not dataset.recipe:  # not written by prepare
        return ""
    config = with_dense_names(config, dataset.dense_of_source)
    named = [each for each in given if each.startswith("data.")]
    found, wanted = _flat("data", dataset.recipe), _flat("data", recipe_of(config))
    unused = []
    for key in sorted(found.keys() | wanted.keys()):
        if (then := found.get(key)) == (now := wanted.get(key)):
            continue
        unused.append(f"{key}={now} (prepared {f'with {then}' if key in found else 'without it'})")
        if any(key == each or key.startswith(f"{each}.") or each.startswith(f"{key}.") for each in named):
            raise DataError(
                f"{key}={now}, but data set {dataset.name!r} was prepared {f'with {then}' if key in found else 'without it'}, and training cannot change it: prepare it "
                "with that value in another data.path, or leave the key out"
            )
    names = feature_names(config)
    if names != (dataset.dense_features, dataset.sparse_feature_names):
        described = " and ".join(
            f"{kind} {', '.join(each) or 'none'}" for kind, each in zip(("dense", "categorical"), names, strict=True)
        )
        raise DataError(
            f"data set {dataset.name!r} has the dense features {', '.join(dataset.dense_features) or 'none'} and the categorical ones "
            f"{', '.join(dataset.sparse_feature_names) or 'none'}, but the job's data config describes {described}: choose the "
            "config that it was prepared with (data=...), or prepare again in another data.path"
        )
    if not unused:
        return ""
    more = f" and {len(unused) - MAX_NAMED} more" if len(unused) > MAX_NAMED else ""
    return (
        f"not used, because data set {dataset.name!r} was prepared with other values: {', '.join(unused[:MAX_NAMED])}{more}. "
        "To use them, prepare again in another data.path"
    )


def recipe_of(config: DataConfig, base: BaseVocabulary | None = None) -> dict[str, Any]:
    """Return everything that the data set's bytes depend on, except the sources."""
    keys = (
        "format",
        "columns",
        "dense_transform",
        "ids",
        "feature_ids",
        "split",
        "rows_per_shard",
        "rows_per_row_group",
    )
    recipe = {key: value for key, value in asdict(config).items() if key in keys}
    columns: dict[str, Any] = recipe["columns"]
    if config.columns.labels:  # training may choose the main label and the weights of losses
        columns["labels"] = {
            label.name: asdict(label) | _cells_of(config.columns.labels[label.name])
            for label in listed_labels(config.columns.labels)
        }
        del columns["label"]
    else:
        del columns["labels"]
    del columns["label_values"], columns["label_threshold"]
    del columns["propensity"], columns["position"]  # they are labels
    if not config.columns.labels:
        for label in config.columns.all_labels.values():
            columns |= {f"label_{key}": value for key, value in _cells_of(label).items()}
    if not config.columns.sequence:
        del columns["sequence"]
    for key in ("weighted", "vectors"):
        if not columns[key]:
            del columns[key]
    # as for group_column below: absent in data sets of earlier releases
    if config.columns.weight is None:
        del columns["weight"]
    if config.negative_sampling is not None:
        recipe["negative_sampling"] = asdict(config.negative_sampling)
    if config.group_column is not None:
        recipe["group_column"] = config.group_column
    if config.joins:  # the bytes of the tables are compared instead of their places
        recipe["joins"] = [{key: value for key, value in join.items() if key != "table"} for join in config.joins]
    if config.buckets:
        recipe["buckets"] = {name: _without_none(asdict(each)) for name, each in sorted(config.buckets.items())}
    if config.transforms:
        recipe["transforms"] = config.transforms
    if config.dense_transforms:
        recipe["dense_transforms"] = dict(sorted(config.dense_transforms.items()))
    for key, usual in (("delimiter", None), ("header", []), ("encoding", "utf-8"), ("quotes", "doubled")):
        if (value := getattr(config, key)) != usual:
            recipe[key] = value
    if not config.columns.null_values:
        del recipe["columns"]["null_values"]
    if config.split.kind not in ("random", "user"):
        del recipe["split"]["seed"]
    if config.split.kind != "date":
        del recipe["split"]["validation_from"], recipe["split"]["test_from"]
    # The files of a given split are among the sources, and their location does not matter.
    recipe["split"] = {key: value for key, value in recipe["split"].items() if key not in NOT_IN_RECIPE}
    return recipe if base is None else recipe | {"vocabularies": base.describe()}


def _cells_of(label: LabelConfig) -> dict[str, Any]:
    """Return the config's entry that says how a label's cells are read, if there is one. Data sets
    of earlier releases have no such entry.
    """
    given = {"values": dict(sorted(label.values.items())), "threshold": label.threshold}
    return {key: value for key, value in given.items() if value not in ({}, None)}


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _flat(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """Flatten {"a": {"b": 1}} to {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(f"{prefix}.{key}", value) if isinstance(value, dict) else {f"{prefix}.{key}": value}
    return flat
