"""Prepare a data set from raw files by tasks. The driver's memory holds only a summary of each file.

stage_file source file -> typed rows, and each block's values divide_file staged file -> the split
of each row, and counts of its training rows number_feature feature -> its vocabulary, and the id of
each of its values write_shard shard -> a Parquet file of the data set

Writing dataset.json commits the data set. Until then the folders of finished tasks stay in the
staging folder.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np

from pipeline.config.data import SPLITS
from pipeline.config.registry import from_extra
from pipeline.data.dataset import FILE_NAME, Dataset, SparseFeature
from pipeline.data.prepare.base_vocabulary import BUCKETS_FILE
from pipeline.data.prepare.buckets import BucketIds, ids_of_buckets, learn_from_counts
from pipeline.data.prepare.divide import (
    DividedFile,
    FileToDivide,
    count_times,
    divide_file,
    load_blocks,
    numbers_file,
)
from pipeline.data.prepare.executor import Executor
from pipeline.data.prepare.given_splits import count_shared_rows
from pipeline.data.prepare.hints import find_hints
from pipeline.data.prepare.limit import refuse_files
from pipeline.data.prepare.number_feature import (
    IDS_FILE,
    VOCABULARY_FILE,
    FeatureToNumber,
    NumberedFeature,
    number_feature,
)
from pipeline.data.prepare.recipe import Recipe, fetch, scratch_folder, task_engine
from pipeline.data.prepare.resources import engine_errors
from pipeline.data.prepare.splits import Boundaries, check_dates, check_rows_to_train_on, find_boundaries, times_at
from pipeline.data.prepare.staging import FileSummary, FileToStage, stage_file
from pipeline.data.prepare.standardize import base_transforms, names_to_learn, transform_from
from pipeline.data.prepare.time_units import check_time_units
from pipeline.data.prepare.write_dataset import Prepared, assemble_dataset, describe_feature, move_out, with_digest
from pipeline.data.prepare.write_shards import SharedByShards, WrittenShard, plan_shards, write_shard
from pipeline.data.raw.source import check_unchanged
from pipeline.data.raw.source_schemas import check_sources
from pipeline.data.sql import parquet
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage

MAX_NAMED = 3
logger = get_logger(__name__)


def prepare_dataset(recipe: Recipe, executor: Executor) -> tuple[Dataset, list[str]]:
    """Write the data set to config.path. Return the data set, and warnings about its columns.

    Raises:
        DataError: the sources cannot become a data set.
        SourceChangedError: a source was written to, replaced or removed since it was listed.
    """
    config, staging = recipe.config, recipe.resources.staging
    check_sources(recipe.layout, list(recipe.sources))
    with executor.running():
        files = _stage(recipe, executor)
        with scratch_folder(recipe) as scratch, engine_errors(recipe.resources):
            dataset = _write_dataset(recipe, executor, files, scratch)
        check_unchanged([*recipe.sources, *(recipe.joins.sources if recipe.joins else ())])
        storage.publish_text(storage.join(config.path, FILE_NAME), dataset.to_json())
        storage.remove(staging)
    negative: Counter[str] = Counter()
    for file in files:
        negative.update(file.num_negative)
    return dataset, find_hints(dataset, config.path, negative)


def _stage(recipe: Recipe, executor: Executor) -> list[FileSummary]:
    files: list[FileSummary] = []
    numbers = range(len(recipe.sources))
    items = (FileToStage(number, list(files) if executor.in_order else None) for number in numbers)
    sizes = [float(source.size_bytes) for source in recipe.sources]
    for file in executor.map("reading rows", stage_file, items, sizes):
        files.append(file)
    refuse_files(recipe.config, recipe.sources, files)
    _report_open_lines(recipe, files)
    check_time_units(recipe.config, recipe.sources, files)
    return files


def _report_open_lines(recipe: Recipe, files: list[FileSummary]) -> None:
    """Warn of files whose last line has no line end: this line may be complete, or cut."""
    named = [
        f"{recipe.sources[file.number].path} (row {file.num_source_rows:,})" for file in files if file.has_open_line
    ]
    if named:
        more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        logger.warning(
            "%d of %d source files end without a line end: %s%s. The last row of each was read as it is. If a "
            "program was still writing the file, prepare it again into another data.path when the file is finished",
            len(named), len(files), ", ".join(named[:MAX_NAMED]), more,
        )  # fmt: skip


def _write_dataset(recipe: Recipe, executor: Executor, files: list[FileSummary], scratch: str) -> Dataset:
    """Write all files of the data set except dataset.json."""
    features = recipe.features
    boundaries = _find_boundaries(recipe, executor, files, scratch)
    divided = _divide(recipe, executor, files, boundaries)
    shared_rows = _count_shared_rows(recipe, divided, scratch)
    numbered = _number(recipe, executor, divided)
    in_buckets = _learn_buckets(recipe, divided, scratch)
    transforms = base_transforms(features, recipe.base)
    for name in names_to_learn(features):
        if name not in transforms:
            transforms[name] = transform_from([file.moments[name] for file in divided])
    ids_paths = [storage.join(each.folder, IDS_FILE) for each in numbered]
    shared = SharedByShards(boundaries, ids_paths, in_buckets, transforms)
    shards = _write_shards(recipe, executor, divided, shared)
    sparse = _publish_vocabularies(recipe, divided, numbered, in_buckets, scratch)
    dropped = sum(file.num_rows for file in files) - sum(sum(file.per_split) for file in divided)
    side_tables = from_extra("write_side_tables", "data.joins")(recipe, shards) if recipe.joins else []
    prepared = Prepared(sparse, shards, transforms, shared_rows, dropped, side_tables)
    return assemble_dataset(recipe, files, prepared, scratch)


def _find_boundaries(recipe: Recipe, executor: Executor, files: list[FileSummary], scratch: str) -> Boundaries:
    def find_times(rows: list[int]) -> list[int]:
        folders, sizes = [file.folder for file in files], [float(file.num_rows) for file in files]
        paths = list(executor.map("counting times", count_times, folders, sizes))
        local = [fetch(path, scratch) for path in paths]
        with task_engine(recipe, scratch) as engine:
            query = f"SELECT time, sum(rows)::BIGINT AS rows FROM {parquet(*local)} GROUP BY time ORDER BY time"
            return times_at(engine.sql(query), rows)

    given = [source.split for source in recipe.sources]
    found = find_boundaries(recipe.config.split, files, find_times, given)
    return replace(found, sampling=recipe.features.negative_sampling)


def _divide(recipe: Recipe, executor: Executor, files: list[FileSummary], boundaries: Boundaries) -> list[DividedFile]:
    sizes = [file.num_rows for file in files]
    num_rows, first_rows = sum(sizes), (np.cumsum(sizes) - sizes).tolist()
    items = [FileToDivide(file.folder, boundaries, first) for file, first in zip(files, first_rows, strict=True)]
    divided = list(executor.map("dividing rows", divide_file, items, [float(size) for size in sizes]))
    check_rows_to_train_on(any(file.per_split[0] for file in divided), num_rows)
    check_dates(recipe.config.split, num_rows, sum(sum(file.per_split[1:]) for file in divided))
    return divided


def _count_shared_rows(recipe: Recipe, divided: list[DividedFile], scratch: str) -> dict[str, int]:
    """Count rows that are in two splits. This is not a task, because only published data sets have
    given splits, and they fit one machine.
    """
    if not recipe.features.row_hashes:
        return {}
    blocks = [block for file in divided for block in load_blocks(file.folder, file.path)]
    with task_engine(recipe, scratch) as engine:
        return count_shared_rows(recipe.config.split, blocks, engine)


def _number(recipe: Recipe, executor: Executor, divided: list[DividedFile]) -> list[NumberedFeature]:
    features = recipe.features
    lookups, num_values = (
        np.sum([getattr(file, name) for file in divided], axis=0) for name in ("num_lookups", "num_values")
    )
    files = [(file.folder, file.path) for file in divided]
    items = []
    for number in range(len(features.sparse)):
        group = features.shared_ids.get(number, [number])
        items.append(FeatureToNumber(number, files, int(lookups[group].sum())))
    sizes = (num_values + 1.0).tolist()
    numbered = list(executor.map("giving ids", number_feature, items, sizes, recipe.resources.threads))
    large = [number for number, each in enumerate(numbered) if each is None]  # one after another, with all memory
    rest = [replace(items[number], in_memory=False) for number in large]
    found = executor.map("giving ids to many values", number_feature, rest, [sizes[number] for number in large])
    for number, each in zip(large, found, strict=True) if large else ():
        numbered[number] = each
    return [each for each in numbered if each is not None]


def _learn_buckets(recipe: Recipe, divided: list[DividedFile], scratch: str) -> list[tuple[SparseFeature, BucketIds]]:
    """Learn the features in buckets; their vocabularies are written below `scratch`."""
    if not recipe.features.buckets:
        return []
    found = []
    with task_engine(recipe, scratch) as engine:
        for number, name in enumerate(recipe.features.buckets):
            paths = [fetch(storage.join(file.path, numbers_file(number)), scratch) for file in divided]
            engine.execute(
                "CREATE OR REPLACE TEMP TABLE counted AS SELECT value, sum(count)::BIGINT AS count "
                f"FROM {parquet(*paths)} GROUP BY value"
            )
            feature = learn_from_counts(engine, recipe.features, name, scratch, recipe.base)
            found.append((feature, ids_of_buckets(feature, scratch)))
    return found


def _write_shards(
    recipe: Recipe, executor: Executor, divided: list[DividedFile], shared: SharedByShards
) -> list[WrittenShard]:
    config, features = recipe.config, recipe.features
    items = plan_shards(divided, config.rows_per_shard, shared)
    for name in SPLITS:
        storage.make_folder(storage.join(config.path, name))
    num_columns = len(features.label_types) + len(features.dense) + len(features.sparse) + len(features.buckets)
    num_columns += len(features.weighted)
    at_once = recipe.resources.shard_threads(config.rows_per_row_group, num_columns)
    sizes = [float(item.num_rows) for item in items]
    return list(executor.map("writing shards", write_shard, items, sizes, at_once))


def _publish_vocabularies(
    recipe: Recipe,
    divided: list[DividedFile],
    numbered: list[NumberedFeature],
    in_buckets: list[tuple[SparseFeature, BucketIds]],
    scratch: str,
) -> list[SparseFeature]:
    """Move the vocabularies into the data set. Return the features; features in buckets come last."""
    features, path = recipe.features, recipe.config.path
    lookups = np.sum([file.num_lookups for file in divided], axis=0).tolist()
    num_rows = sum(file.per_split[0] for file in divided)
    sparse = []
    for number, each in enumerate(numbered):
        feature = describe_feature(features, number, each.ranked, lookups[number] / num_rows)
        if feature.vocabulary is not None:
            target = storage.join(path, feature.vocabulary)
            local = fetch(storage.join(each.folder, VOCABULARY_FILE), scratch)
            feature = with_digest(feature, local)
            storage.make_folder(storage.dirname(target))
            storage.move_file(local, target)
        sparse.append(feature)
    for feature, _ in in_buckets:
        assert feature.vocabulary is not None
        sparse.append(with_digest(feature, storage.join(scratch, feature.vocabulary)))
        move_out(scratch, path, feature.vocabulary)
    if recipe.base is not None:
        found = {name: each.value_buckets for name, each in zip(features.sparse, numbered, strict=True)}
        storage.publish_text(storage.join(path, BUCKETS_FILE), json.dumps(found))
    return sparse
