"""Prepare a data set from raw files: stage each, split, count values, assign ids, write shards, then dataset.json.

dataset.json is the commit. Until then everything that can be taken up again lies in the staging folder.

Size: memory is bounded by the limit alone. The staging folder takes about 110 bytes a row of Criteo, and DuckDB spills on top
what its sorts of distinct values do not fit into memory.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import duckdb
import numpy as np
import pyarrow as pa

from pipeline.config.data import DataConfig
from pipeline.config.ids import IdsConfig
from pipeline.config.splits import SPLITS
from pipeline.data.dataset import FILE_NAME, Dataset, SparseFeature
from pipeline.data.prepare.base_vocabulary import BUCKETS_FILE, BaseVocabulary
from pipeline.data.prepare.buckets import ids_of_buckets, learn_buckets
from pipeline.data.prepare.encode import Features, features_of
from pipeline.data.prepare.errors import engine_errors
from pipeline.data.prepare.given_splits import count_shared_rows
from pipeline.data.prepare.hints import find_hints
from pipeline.data.prepare.limit import refuse_early, refuse_files
from pipeline.data.prepare.parallel import map_ordered
from pipeline.data.prepare.resources import Resources
from pipeline.data.prepare.splits import (
    BlockRows,
    Boundaries,
    TrainingCounts,
    blocks_of,
    check_dates,
    count_training,
    find_boundaries,
)
from pipeline.data.prepare.staging import StagedFile, remove_unfinished, stage_source
from pipeline.data.prepare.standardize import learn_transforms
from pipeline.data.prepare.time_units import check_time_units
from pipeline.data.prepare.vocabulary import (
    count_values,
    map_entries,
    open_engine,
    rank_values,
    read_counts,
    vocabulary_file,
)
from pipeline.data.prepare.write_dataset import Prepared, assemble_dataset, describe_feature, move_out
from pipeline.data.prepare.write_shards import ShardWriter, WrittenShard, plan_shards
from pipeline.data.raw.layout import Layout, layout_of, with_group
from pipeline.data.raw.source import Source
from pipeline.data.raw.source_schemas import check_sources
from pipeline.data.raw.transforms import Transform
from pipeline.runtime.logs import progress
from pipeline.runtime.process.processes import only_one_run
from pipeline.runtime.storage import storage


def prepare_dataset(
    config: DataConfig, sources: list[Source], resources: Resources, base: BaseVocabulary | None = None
) -> tuple[Dataset, list[str]]:
    """Write the data set to config.path; it, and remarks on its columns. Raises DataError for sources that cannot become one."""
    layout = with_group(layout_of(config), config.group_column)
    features = features_of(config, layout)
    if base is not None:
        base.check(features)
    check_sources(layout, sources)
    os.makedirs(resources.staging, exist_ok=True)
    with only_one_run(resources.staging, "preparing"), _room_given_back(resources.staging):
        files = stage_sources(config, sources, layout, features, resources)
        with engine_errors(resources):
            dataset = _write_dataset(config, sources, features, files, resources, base)
        storage.publish_text(storage.join(config.path, FILE_NAME), dataset.to_json())
        storage.remove(resources.staging)
    negative: Counter[str] = Counter()
    for file in files:
        negative.update(file.num_negative)
    return dataset, find_hints(dataset, config.path, negative)


@contextmanager
def _room_given_back(staging: str) -> Iterator[None]:
    """A run that fails, of a full disk above all, keeps what another one can take over and nothing else."""
    try:
        yield
    except BaseException:
        with suppress(OSError, ValueError):  # the failure is what counts
            remove_unfinished(staging)
        raise


def stage_sources(
    config: DataConfig, sources: list[Source], layout: Layout, features: Features, resources: Resources
) -> list[StagedFile]:
    """Stage each source in turn; those that an earlier run has finished are taken over."""
    files: list[StagedFile] = []
    with progress("reading rows", sum(source.size_bytes for source in sources)) as bar:
        for number, source in enumerate(sources):

            def check(staged: StagedFile, position: int) -> None:
                refuse_early(config, sources, [*files, staged], position)

            file = stage_source(
                source, number, layout, features, resources.staging,
                block_bytes=resources.block_bytes, threads=resources.threads, advance=bar.advance, check=check,
            )  # fmt: skip
            assert file.num_rows + file.num_quarantined == file.num_source_rows
            files.append(file)
    refuse_files(config, sources, files)
    check_time_units(config, sources, files)
    return files


def _write_dataset(
    config: DataConfig,
    sources: list[Source],
    features: Features,
    files: list[StagedFile],
    resources: Resources,
    base: BaseVocabulary | None,
) -> Dataset:
    spill = os.path.join(resources.staging, "spill")
    with closing(open_engine(spill, resources.engine_bytes, resources.engine_threads)) as engine:
        boundaries = find_boundaries(config.split, files, engine, [source.split for source in sources])
        boundaries = replace(boundaries, sampling=features.negative_sampling)
        blocks = blocks_of(files, boundaries)
        held_out = sum(sum(block.per_split[1:]) for block in blocks)
        check_dates(config.split, sum(block.num_rows for block in blocks), held_out)
        shared_rows = count_shared_rows(config.split, blocks, engine) if features.row_hashes else {}
        sparse = give_ids(engine, features, files, blocks, boundaries, resources, base)
        in_buckets = learn_buckets(engine, features, blocks, boundaries, resources.staging, base)
    sparse += in_buckets
    transforms = learn_transforms(features, blocks, boundaries, base)
    shards = write_shards(config, features, blocks, boundaries, resources, in_buckets, transforms)
    for feature in sparse:
        if feature.vocabulary:
            move_out(resources.staging, config.path, feature.vocabulary)
    if base is not None:
        move_out(resources.staging, config.path, BUCKETS_FILE)
    dropped = sum(block.num_rows - sum(block.per_split) for block in blocks)
    prepared = Prepared(sparse, shards, transforms, shared_rows, dropped)
    paths = [file.quarantine_path for file in files]
    return assemble_dataset(config, sources, features, files, paths, prepared, base, resources.staging)


def give_ids(
    engine: duckdb.DuckDBPyConnection,
    features: Features,
    files: list[StagedFile],
    blocks: list[BlockRows],
    boundaries: Boundaries,
    resources: Resources,
    base: BaseVocabulary | None,
) -> list[SparseFeature]:
    """The features with their statistics; beside each staged file the id behind every entry of it."""
    staging = resources.staging
    counts_path = os.path.join(staging, "counts.parquet")
    training = count_training(blocks, boundaries, features, os.path.join(staging, "recounted.parquet"))
    num_rows = sum(block.per_split[0] for block in blocks)
    entries = [file.entries_path for file in files if file.block_rows]
    count_values(engine, [*entries, training.recounted], training.blocks, counts_path, features.shared_ids)
    if base is not None:
        counts_path = base.merge_counts(engine, features, counts_path)
    os.makedirs(os.path.join(staging, "vocabulary"), exist_ok=True)
    sparse = {
        number: _rank(features, number, batches, training, num_rows, staging, base)
        for number, batches in read_counts(counts_path)
    }
    for number in range(len(features.sparse)):
        if number not in sparse:  # nothing but missing values
            sparse[number] = _rank(features, number, [], training, num_rows, staging, base)
    vocabularies = {n: os.path.join(staging, f.vocabulary) for n, f in sparse.items() if f.vocabulary}
    hashed = [n for n, feature in sparse.items() if not feature.vocabulary]
    outputs = [(file.ids_path, file.num_entries) for file in files if file.block_rows]
    table = os.path.join(staging, "ids.parquet")
    map_entries(engine, entries, vocabularies, hashed, outputs, table, resources.engine_bytes)
    return [sparse[number] for number in range(len(features.sparse))]


def _rank(
    features: Features,
    number: int,
    batches: Iterable[tuple[pa.Array, np.ndarray]],
    training: TrainingCounts,
    num_rows: int,
    staging: str,
    base: BaseVocabulary | None,
) -> SparseFeature:
    name = features.sparse[number]
    ids = features.ids[name]
    vocabulary = vocabulary_file(name) if ids.kind == "vocabulary" else None
    path = os.path.join(staging, vocabulary) if vocabulary else None
    own_lookups = int(training.num_lookups[number])
    num_lookups = int(training.num_lookups[features.shared_ids.get(number, [number])].sum())
    if base is None or vocabulary is None:
        ranked = rank_values(batches, ids, num_lookups, path)
    else:
        kept = IdsConfig() if base.frozen else ids  # frozen: all of it, in its order
        ranked = rank_values(batches, kept, num_lookups + base.num_lookups(name), path)
    return describe_feature(features, number, ranked, own_lookups / num_rows)


def write_shards(
    config: DataConfig,
    features: Features,
    blocks: list[BlockRows],
    boundaries: Boundaries,
    resources: Resources,
    in_buckets: list[SparseFeature],
    transforms: dict[str, Transform],
) -> list[WrittenShard]:
    """Write the Parquet files of all splits side by side, as many at once as memory allows; in the order of their plans.

    in_buckets: features whose ids are the numbers of buckets, learnt from the training rows.
    """
    writer = ShardWriter(
        features,
        boundaries,
        resources.staging,
        config.path,
        config.rows_per_row_group,
        [(feature, ids_of_buckets(feature, resources.staging)) for feature in in_buckets],
        transforms,
    )
    plans = plan_shards(blocks, config.rows_per_shard)
    for name in SPLITS:
        storage.make_folder(storage.join(config.path, name))
    num_columns = len(features.label_types) + len(features.dense) + len(features.sparse) + len(features.buckets)
    num_columns += len(features.weighted)
    threads = resources.shard_threads(config.rows_per_row_group, num_columns)
    shards = []
    with progress("writing shards", sum(plan.num_rows for plan in plans)) as bar:
        for shard in map_ordered(writer.write, plans, threads):
            shards.append(shard)
            bar.advance(shard.file.num_rows)
    return shards
