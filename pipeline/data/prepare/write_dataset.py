"""Describe the prepared data as a Dataset, and publish the files next to its shards."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np

from pipeline.config.data import SPLITS
from pipeline.config.transforms import described
from pipeline.data.dataset import Dataset, SequenceFeature, SideTable, SparseFeature, Split, listed_labels
from pipeline.data.prepare.encode import Features
from pipeline.data.prepare.identity import recipe_of
from pipeline.data.prepare.recipe import Recipe
from pipeline.data.prepare.staging import FileSummary
from pipeline.data.prepare.vocabulary import RankedFeature, vocabulary_file
from pipeline.data.prepare.write_shards import WrittenShard
from pipeline.data.quality import auc
from pipeline.data.raw.blocks import Source
from pipeline.data.raw.dense_transforms import Transform
from pipeline.runtime.storage import storage

QUARANTINE_FILE = "quarantine.jsonl"


@dataclass(frozen=True)
class Prepared:
    """The results of tasks. sparse: bucketed features come last. dropped_rows: training rows
    left out by negative sampling. side_tables: of data.joins."""

    sparse: list[SparseFeature]
    shards: list[WrittenShard]
    transforms: dict[str, Transform]
    shared_rows: dict[str, int]
    dropped_rows: int
    side_tables: list[SideTable]


def assemble_dataset(recipe: Recipe, files: Sequence[FileSummary], prepared: Prepared, scratch: str) -> Dataset:
    """Describe the data set, and publish the quarantine file, which is first written to the local folder `scratch`."""
    config, sources, features = recipe.config, recipe.sources, recipe.features
    shards = prepared.shards
    quarantined = sum(file.num_quarantined for file in files)
    if quarantined:
        _publish_quarantine(recipe, files, scratch)
    return Dataset(
        name=config.name,
        label=features.label,
        dense_features=features.dense,
        sparse_features=prepared.sparse,
        splits={name: _split(shards, number, features) for number, name in enumerate(SPLITS)},
        source_rows=sum(file.num_source_rows for file in files),
        accepted_rows=sum(file.num_rows for file in files),
        quarantined_rows=quarantined,
        dense_transform=features.dense_transform,
        sources=[_describe(source, file) for source, file in zip(sources, files, strict=True)],
        recipe=recipe_of(config, recipe.base),
        versions={name: version(name) for name in ("duckdb", "numpy", "pyarrow")},
        bayes_auc=_bayes_auc(shards, features),
        shared_rows=prepared.shared_rows,
        group_column=features.group,
        dense_columns={
            **{name: Transform(kind).as_dict() for name, kind in features.transforms.items() if name in features.dense},
            **{name: transform.as_dict() for name, transform in prepared.transforms.items()},
        },
        labels=listed_labels(config.columns.labels),
        weight_column=features.weight,
        negative_sampling=_describe_sampling(features, prepared.dropped_rows),
        transforms=described(features.derived, features.derived_kinds),
        side_tables=prepared.side_tables,
    )


def describe_feature(
    features: Features, number: int, ranked: RankedFeature, mean_pooling_factor: float
) -> SparseFeature:
    name = features.sparse[number]
    ids = features.ids[name]
    vocabulary = vocabulary_file(name) if ids.kind == "vocabulary" else None
    return SparseFeature(
        name=name,
        cardinality=ranked.cardinality,
        multi_hot=name in features.multi_hot,
        mean_pooling_factor=mean_pooling_factor,
        frequency_curve=ranked.frequency_curve,
        vocabulary=vocabulary,
        hash_size=None if vocabulary else ids.hash_size,
        hash_seed=ids.hash_seed,
        num_distinct=ranked.num_distinct,
        sequence=_describe_sequence(features, name),
        weighted=name in features.weighted,
    )


def with_digest(feature: SparseFeature, path: str) -> SparseFeature:
    """Return the feature with the size and SHA-256 of its vocabulary, the local file `path`."""
    return replace(feature, vocabulary_bytes=os.path.getsize(path), vocabulary_sha256=storage.sha256_of(path))


def _describe_sequence(features: Features, name: str) -> SequenceFeature | None:
    sequence = features.sequences.get(name)
    if sequence is None:
        return None
    assert sequence.max_length is not None and sequence.keep is not None
    return SequenceFeature(sequence.max_length, sequence.keep, sequence.beside, sequence.shares)


def _split(shards: list[WrittenShard], number: int, features: Features) -> Split:
    held = [shard for shard in shards if shard.split == number]
    weight, positive = sum(shard.weight for shard in held), sum(shard.positive_weight for shard in held)
    is_plain = weight == sum(shard.file.num_rows for shard in held) and not features.weight
    return Split(
        files=[shard.file for shard in held],
        num_rows=sum(shard.file.num_rows for shard in held),
        num_positives=sum(shard.num_positives for shard in held),
        weighted_rate=None if is_plain else positive / weight if weight else 0.0,
    )


def _bayes_auc(shards: list[WrittenShard], features: Features) -> dict[str, float]:
    """Return the AUC of the teacher's probabilities. Keys are `split` for the main label, and
    `split/label` for other labels.

    Empty if the source was not generated. A masked label counts in rows where its mask is 1. Rows
    count by their weight.
    """
    aucs = {}
    for number, split in enumerate(SPLITS):
        held = [shard for shard in shards if shard.split == number]
        for name in held[0].truth if held else {}:
            truth, labels = (
                np.concatenate(parts) for parts in zip(*((s.truth[name], s.labels[name]) for s in held), strict=True)
            )
            weights = np.concatenate([s.labels[features.weight] for s in held]) if features.weight else None
            if mask := features.labels[name].mask:
                counts = np.concatenate([shard.labels[mask] for shard in held]) == 1
                truth, labels = truth[counts], labels[counts]
                weights = None if weights is None else weights[counts]
            area = auc(truth, labels, weights)
            key = split if name == features.label else f"{split}/{name}"
            # labels of one kind cannot be ranked
            aucs[key] = 0.5 if math.isnan(area) else round(area, 9)
    return aucs


def _describe_sampling(features: Features, dropped_rows: int) -> dict[str, Any]:
    if (sampling := features.negative_sampling) is None:
        return {}
    return {"label": sampling.label, "keep": sampling.keep, "dropped_rows": dropped_rows}


def _publish_quarantine(recipe: Recipe, files: Sequence[FileSummary], scratch: str) -> None:
    with open(os.path.join(scratch, QUARANTINE_FILE), "w", encoding="utf-8") as out:
        for source, staged in zip(recipe.sources, files, strict=True):
            with storage.open_file(storage.join(staged.folder, QUARANTINE_FILE)) as file:
                for line in file:
                    out.write(json.dumps({"file": source.name, **json.loads(line)}, ensure_ascii=False) + "\n")
    move_out(scratch, recipe.config.path, QUARANTINE_FILE)


def move_out(staging: str, folder: str, name: str) -> None:
    """Move a local file to its place in the data set."""
    storage.make_folder(storage.dirname(storage.join(folder, name)))
    storage.move_file(os.path.join(staging, name), storage.join(folder, name))


def _describe(source: Source, file: FileSummary) -> dict[str, Any]:
    about = {
        "path": source.name,
        "size_bytes": source.size_bytes,
        "digest": source.digest,
        "num_rows": file.num_source_rows,
        "num_quarantined": file.num_quarantined,
    }
    about |= {"sha256": file.sha256} if file.sha256 else {}
    return about if source.split is None else about | {"split": source.split}
