"""Resolve a job against its data set once. The result does not change afterwards.

This module also replaces `head_rows: auto` by a number. The number depends on frequency curves,
batch size, ranks and memory, so a run chooses it once and stores it in its config.yaml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from pipeline.config.jobs.train import TrainJob
from pipeline.config.model import used_tables
from pipeline.config.registry import from_extra
from pipeline.config.tables import TableConfig, expand_patterns
from pipeline.data.dataset import Dataset
from pipeline.data.raw.layout import with_dense_names
from pipeline.data.targets import Target, targets_of
from pipeline.embeddings.physical import physical_tables
from pipeline.embeddings.table import Table
from pipeline.embeddings.tables import resolve_tables

AUTO_TIERS = "auto"  # sharding.tiers
# The job without the tiers of sharding.tiers=auto -> the tables that get tiers.
TierChoice = Callable[["ResolvedJob"], Any]
# All tables, and the tables whose head is `auto` -> the rows of each of these heads.
HeadChoice = Callable[[list[Table], list[Table]], dict[str, int]]

SplitTables = Callable[[TrainJob, Dataset, int, HeadChoice | None], tuple[TrainJob, list[Table]]]
SPLIT_KEY = "tables.*.compression.kind=frequency_split"


class HeadReport(Protocol):
    """What the frequent rows of a split table are expected to save."""

    @property
    def table(self) -> str: ...

    def note(self) -> str: ...


@dataclass(frozen=True)
class ResolvedJob:
    """Hold a job and its data set, resolved for `world_size` ranks.

    job: the config, with numbers in place of `head_rows: auto` and with the tiers that
    sharding.tiers=auto chose. all_tables: a table for every sparse feature, for the reader. tables:
    the tables that the model uses. targets: the labels to learn.
    """

    job: TrainJob
    dataset: Dataset
    world_size: int
    all_tables: list[Table]
    tables: list[Table]
    head_reports: list[HeadReport]
    targets: list[Target]

    @cached_property
    def plain_tables(self) -> list[Table]:
        """Return the tables to shard: the parts of compressed tables, and all other tables."""
        return physical_tables(self.tables)


def resolve_job(
    job: TrainJob,
    dataset: Dataset,
    world_size: int,
    choose: HeadChoice | None = None,
    choose_tiers: TierChoice | None = None,
) -> ResolvedJob:
    """Local: resolve the job. `choose` is called if a `head_rows` is `auto`, and `choose_tiers` if
    sharding.tiers is `auto`.

    If one of the functions is None, memory has no limit. Raises ConfigError or DataError if tables,
    compression or labels do not fit.
    """
    data = with_dense_names(job.data, dataset.dense_of_source)
    job = replace(job, data=data, tables=expand_patterns(job.tables, dataset.sparse_feature_names))
    is_split = any(_is_split(config) for config in job.tables.values())
    if is_split:
        resolve_split_tables: SplitTables = from_extra("resolve_split_tables", SPLIT_KEY)
        job, resolved = resolve_split_tables(job, dataset, world_size, choose)
    else:
        resolved = resolve_job_tables(job, job.tables, dataset)
    job.model.check_tables(resolved, len(dataset.dense_features))
    used = used_tables(job.model, resolved)
    reports = from_extra("head_reports", SPLIT_KEY)(job, used, dataset, world_size) if is_split else []
    notes = {report.table: report.note() for report in reports}
    used = [replace(table, note=notes[table.name]) if table.name in notes else table for table in used]
    targets = targets_of(job.data.columns, dataset, job.model.learns_all)
    whole = ResolvedJob(job, dataset, world_size, resolved, used, reports, targets)
    if choose_tiers is None or job.sharding.tiers != AUTO_TIERS:
        return whole
    with_tiers: Callable[..., ResolvedJob] = from_extra("with_tiers", "sharding.tiers=auto")
    return with_tiers(whole, choose_tiers(whole))


def resolve_job_tables(job: TrainJob, configs: dict[str, TableConfig], dataset: Dataset) -> list[Table]:
    """Resolve the tables of all features of the data set. `configs`: the `tables` entry of the job."""
    return resolve_tables(
        configs,
        dataset,
        job.data.synthetic_multi_hot,
        auto_init=job.model.table_init,
        sequences=job.model.sequence_inputs,
    )


def _is_split(config: TableConfig) -> bool:
    return config.compression is not None and config.compression.kind == "frequency_split"
