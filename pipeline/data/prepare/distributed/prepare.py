"""Prepare a data set by the tasks of an engine: the driver holds summaries of files, and the files hold the rest.

stage_file        source file -> typed rows, and each block's values
divide_file       staged file -> which rows train; its values as a sorted run
count_partition   range of values -> counts over all runs
number_partition  range of values -> ids, and the answers to all runs
map_file          staged file -> the id behind each of its entries
rank_feature      feature -> its vocabulary and statistics
write_shard       shard -> a Parquet file of the data set
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from pipeline.config.splits import SPLITS
from pipeline.data.dataset import FILE_NAME, Dataset, SparseFeature
from pipeline.data.prepare.buckets import BucketIds, ids_of_buckets, learn_from_counts
from pipeline.data.prepare.distributed.engine import Engine
from pipeline.data.prepare.distributed.files import (
    DividedFile,
    FileSummary,
    FileToDivide,
    count_times,
    divide_file,
    load_blocks,
    numbers_file,
    stage_file,
)
from pipeline.data.prepare.distributed.partitions import (
    FileToMap,
    Numbering,
    Partition,
    count_partition,
    cut_ranges,
    map_file,
    number_partition,
    write_bases,
)
from pipeline.data.prepare.distributed.recipe import Recipe, fetch, scratch_folder, task_engine
from pipeline.data.prepare.distributed.shards import SharedByShards, plan_tasks, write_shard
from pipeline.data.prepare.distributed.vocabularies import FeatureToRank, rank_feature
from pipeline.data.prepare.errors import engine_errors
from pipeline.data.prepare.given_splits import count_shared_rows
from pipeline.data.prepare.hints import find_hints
from pipeline.data.prepare.limit import refuse_files
from pipeline.data.prepare.splits import Boundaries, boundaries_of, check_dates, check_rows_to_train_on, times_at
from pipeline.data.prepare.standardize import names_to_learn, transform_from
from pipeline.data.prepare.time_units import check_time_units
from pipeline.data.prepare.write_dataset import Prepared, assemble_dataset, describe_feature, move_out
from pipeline.data.raw.source import Source
from pipeline.data.raw.source_schemas import check_sources
from pipeline.data.sql import sql_text
from pipeline.runtime.storage import storage

ROWS_A_PARTITION = 4_000_000  # of runs: a task of a minute or so
LEAST_ROWS_A_PARTITION = 250_000


def prepare_distributed(
    recipe: Recipe, sources: list[Source], engine: Engine, num_partitions: int | None = None
) -> tuple[Dataset, list[str]]:
    """As prepare_dataset, by the tasks of `engine`."""
    check_sources(recipe.layout, sources)
    dataset, files = write_distributed(recipe, sources, engine, num_partitions)
    storage.publish_text(storage.join(recipe.config.path, FILE_NAME), dataset.to_json())
    storage.remove(recipe.resources.staging)
    negative: Counter[str] = Counter()
    for file in files:
        negative.update(file.num_negative)
    return dataset, find_hints(dataset, recipe.config.path, negative)


def write_distributed(
    recipe: Recipe, sources: list[Source], engine: Engine, num_partitions: int | None = None
) -> tuple[Dataset, list[FileSummary]]:
    """Write all of a data set but dataset.json; what has the same bytes whatever the engine and the partitions are."""
    config, features = recipe.config, recipe.features
    sizes = [float(source.size_bytes) for source in sources]
    files = engine.map("reading rows", stage_file, list(enumerate(sources)), sizes)
    refuse_files(config, sources, files)
    check_time_units(config, sources, files)
    with scratch_folder(recipe) as scratch, engine_errors(recipe.resources):
        boundaries = _find_boundaries(recipe, engine, sources, files, scratch)
        divided = _divide(recipe, engine, files, boundaries)
        shared_rows = _count_shared(recipe, divided, scratch)
        sparse = _give_ids(recipe, engine, divided, num_partitions, scratch)
        in_buckets = _learn_buckets(recipe, divided, scratch)
        transforms = {
            name: transform_from([file.moments[name] for file in divided]) for name in names_to_learn(features)
        }
        shared = SharedByShards(boundaries, in_buckets, transforms)
        tasks = plan_tasks(divided, config.rows_per_shard, shared)
        for name in SPLITS:
            storage.make_folder(storage.join(config.path, name))
        shards = engine.map("writing shards", write_shard, tasks, [float(task.num_rows) for task in tasks])
        dropped = sum(file.num_rows for file in files) - sum(sum(file.per_split) for file in divided)
        found = [*sparse, *(feature for feature, _ in in_buckets)]
        prepared = Prepared(found, shards, transforms, shared_rows, dropped)
        quarantines = [storage.join(file.folder, "quarantine.jsonl") for file in files]
        return assemble_dataset(config, sources, features, files, quarantines, prepared, None, scratch), files


def _find_boundaries(
    recipe: Recipe, engine: Engine, sources: list[Source], files: list[FileSummary], scratch: str
) -> Boundaries:
    def find_times(rows: list[int]) -> list[int]:
        paths = engine.map("counting times", count_times, [file.folder for file in files])
        local = ", ".join(sql_text(fetch(path, scratch)) for path in paths)
        with task_engine(recipe, scratch) as database:
            query = f"SELECT time, sum(rows)::BIGINT AS rows FROM read_parquet([{local}]) GROUP BY time ORDER BY time"
            return times_at(database.sql(query), rows)

    found = boundaries_of(recipe.config.split, files, find_times, [source.split for source in sources])
    return replace(found, sampling=recipe.features.negative_sampling)


def _divide(recipe: Recipe, engine: Engine, files: list[FileSummary], boundaries: Boundaries) -> list[DividedFile]:
    first_rows = np.cumsum([0, *(file.num_rows for file in files)]).tolist()
    items = [FileToDivide(file.folder, boundaries, first) for file, first in zip(files, first_rows, strict=False)]
    divided = engine.map("dividing rows", divide_file, items, [float(file.num_rows) for file in files])
    check_rows_to_train_on(any(file.per_split[0] for file in divided), first_rows[-1])
    check_dates(recipe.config.split, first_rows[-1], sum(sum(file.per_split[1:]) for file in divided))
    return divided


def _count_shared(recipe: Recipe, divided: list[DividedFile], scratch: str) -> dict[str, int]:
    """Here and not in tasks: splits are given where a set was published, and those fit one machine."""
    if not recipe.features.row_hashes:
        return {}
    blocks = [block for file in divided for block in load_blocks(file.folder, file.path)]
    with task_engine(recipe, scratch) as database:
        return count_shared_rows(recipe.config.split, blocks, database)


def _give_ids(
    recipe: Recipe, engine: Engine, divided: list[DividedFile], num_partitions: int | None, scratch: str
) -> list[SparseFeature]:
    features = recipe.features
    keys = [(key, file.num_run_rows / len(file.run_keys)) for file in divided for key in file.run_keys]
    ranges = cut_ranges(keys, num_partitions or _num_partitions(divided, engine.num_tasks))
    runs = [file.path for file in divided]
    partitions = [Partition(number, len(ranges), keys, runs) for number, keys in enumerate(ranges)]
    histograms = engine.map("counting values", count_partition, partitions)
    bases = write_bases(recipe, histograms)
    numbered = engine.map("giving ids", number_partition, [Numbering(each, bases) for each in partitions])
    engine.map("giving ids to rows", map_file, [FileToMap(i, path, numbered) for i, path in enumerate(runs)])
    lookups = np.sum([file.num_lookups for file in divided], axis=0)
    counted = [storage.dirname(path) for path in histograms]
    items = [
        FeatureToRank(number, int(lookups[features.shared_ids.get(number, [number])].sum()), counted)
        for number in range(len(features.sparse))
    ]
    ranked = engine.map("writing vocabularies", rank_feature, items)
    num_rows = sum(file.per_split[0] for file in divided)
    found = []
    for number, each in enumerate(ranked):
        feature = describe_feature(features, number, each.ranked, int(lookups[number]) / num_rows)
        if each.path is not None and feature.vocabulary is not None:
            target = storage.join(recipe.config.path, feature.vocabulary)
            storage.make_folder(storage.dirname(target))
            storage.move_file(fetch(each.path, scratch), target)
        found.append(feature)
    return found


def _num_partitions(divided: list[DividedFile], num_tasks: int) -> int:
    """Some for each task that runs at once, and none larger than a task should be."""
    rows = sum(file.num_run_rows for file in divided)
    return max(1, -(-rows // ROWS_A_PARTITION), min(2 * num_tasks, rows // LEAST_ROWS_A_PARTITION))


def _learn_buckets(recipe: Recipe, divided: list[DividedFile], scratch: str) -> list[tuple[SparseFeature, BucketIds]]:
    found = []
    for number, name in enumerate(recipe.features.buckets):
        paths = [fetch(storage.join(file.path, numbers_file(number)), scratch) for file in divided]
        with task_engine(recipe, scratch) as database:
            parts = ", ".join(map(sql_text, paths))
            database.execute(
                f"CREATE TEMP TABLE counted AS SELECT value, sum(count)::BIGINT AS count FROM read_parquet([{parts}]) GROUP BY value"
            )
            feature = learn_from_counts(database, recipe.features, name, scratch, None)
        found.append((feature, ids_of_buckets(feature, scratch)))
        assert feature.vocabulary is not None
        move_out(scratch, recipe.config.path, feature.vocabulary)
    return found
