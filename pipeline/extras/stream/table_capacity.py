"""Compute how many rows tables need for new values of a stream, and enlarge full tables (without torch)."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from pipeline.config.jobs.train import TrainJob
from pipeline.config.model import used_tables
from pipeline.config.retraining import NewValuesConfig
from pipeline.config.tables import DEFAULT, TableConfig, expand_patterns
from pipeline.data.dataset import Dataset, SparseFeature, vocabulary_of
from pipeline.embeddings.table import Table
from pipeline.embeddings.tables import resolve_tables
from pipeline.extras.frequency_split.head_rows import without_auto
from pipeline.extras.stream.new_values import TableCapacity

MIN_ROWS = 64  # that a table gains


def with_capacity(
    job: TrainJob,
    dataset: Dataset,
    config: NewValuesConfig,
    earlier: dict[str, TableConfig],
    full: Collection[str] = (),
) -> TrainJob:
    """Return the job with rows for new values in its tables.

    earlier: the tables of the resumed run; no table becomes smaller than there. full: names of
    tables to enlarge.
    """
    tables = expand_patterns(job.tables, dataset.sparse_feature_names)
    before = expand_patterns(earlier, dataset.sparse_feature_names)
    job = replace(job, tables=tables)
    for table in _growing_tables(job, dataset):
        entry, now = table.config_name, table.num_embeddings
        had = before[entry].num_embeddings or 0 if entry in before else 0
        rows = had if had >= now else now + _more(now, config)
        if table.name in full:
            rows += _more(rows, config)
        if rows > now:
            rows = max(now, had, min(rows, config.max_rows or rows))
            tables[entry] = replace(tables.get(entry, TableConfig()), num_embeddings=rows)
    return job


def _more(rows: int, config: NewValuesConfig) -> int:
    return max(MIN_ROWS, math.ceil(config.spare * rows)) if config.spare else 0


def capacities_of(job: TrainJob, dataset: Dataset, config: NewValuesConfig) -> dict[str, TableCapacity]:
    """Return the capacities by vocabulary for a job of with_capacity().

    If several tables share a vocabulary, the smallest table decides.
    """
    capacities: dict[str, TableCapacity] = {}
    if not config.spare:
        return capacities
    whole = {name for table in _growing_tables(job, dataset) for name in table.feature_names}
    used = {name for table in _used_tables(job, dataset) for name in table.feature_names}
    for table in _growing_tables(job, dataset):
        rows = table.num_embeddings
        for vocabulary in {vocabulary_of(dataset.sparse_feature(name)) for name in table.feature_names}:
            sharing = {each.name for each in dataset.sparse_features if vocabulary_of(each) == vocabulary}
            if sharing & used <= whole and (vocabulary not in capacities or rows < capacities[vocabulary].end):
                first = dataset.sparse_feature(vocabulary).cardinality
                capacities[vocabulary] = TableCapacity(
                    table.name, first, rows, config.max_rows is None or rows < config.max_rows
                )
    return capacities


def _growing_tables(job: TrainJob, dataset: Dataset) -> list[Table]:
    """Return the tables that the model looks up completely and whose features have vocabularies of
    values.

    Parts of compressed tables, hashes and buckets of numbers have a fixed size.
    """
    return [
        table
        for table in _used_tables(job, dataset)
        if not _is_compressed(job, table)
        and all(_can_grow(dataset.sparse_feature(name), job.data.synthetic_multi_hot) for name in table.feature_names)
    ]


def _is_compressed(job: TrainJob, table: Table) -> bool:
    """Return whether the table is compressed, or would be if it had more rows."""
    sections = [job.tables[name] for name in (table.config_name, DEFAULT) if name in job.tables]
    config = next((each.compression for each in sections if each.compression is not None), None)
    return config is not None and config.kind != "none"


def _used_tables(job: TrainJob, dataset: Dataset) -> list[Table]:
    resolved = resolve_tables(
        without_auto(job.tables),
        dataset,
        job.data.synthetic_multi_hot,
        auto_init=job.model.table_init,
        sequences=job.model.sequence_inputs,
    )
    return used_tables(job.model, resolved)


def _can_grow(feature: SparseFeature, multi_hot: dict[str, int]) -> bool:
    return feature.hash_size is None and feature.boundaries is None and multi_hot.get(feature.name, 1) == 1
