"""Resolve a job against its data set, once: every later step reads the result, and nothing changes it.

`head_rows: auto` becomes a number here too. The choice depends on frequency curves, batch, ranks and memory, so a run makes
it once and keeps it in its config.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pipeline.config.jobs.train import TrainJob
from pipeline.config.model import used_tables
from pipeline.config.registry import from_extra
from pipeline.config.tables import expand_patterns
from pipeline.data.dataset import Dataset
from pipeline.data.targets import Target, targets_of
from pipeline.embeddings.physical import check_compressed, physical_tables
from pipeline.embeddings.table import Table
from pipeline.embeddings.tables import resolve_tables
from pipeline.planner.head_rows import (
    HeadReport,
    auto_tables,
    choose_heads,
    has_auto,
    head_reports,
    with_head_rows,
    with_notes,
    without_auto,
)

AUTO_TIERS = "auto"  # sharding.tiers
# The job without tiers of sharding.tiers=auto -> which tables have them.
TierChoice = Callable[["ResolvedJob"], Any]
# Tables, and those of them whose head is `auto` -> rows of each of the latter.
HeadChoice = Callable[[list[Table], list[Table]], dict[str, int]]


@dataclass(frozen=True)
class ResolvedJob:
    """What a job and its data set come to on `world_size` ranks.

    job: as it was given, with a number for every `head_rows: auto`, and the tiers that sharding.tiers=auto chooses.
    all_tables: one for every sparse feature of the data set, as the reader needs them; `tables` are those that the model
    uses, each with a note of what its head is expected to save. targets: the labels that it learns.
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
        """What is sharded: the parts of compressed tables, and the others as they are."""
        return physical_tables(self.tables)


def resolve_job(
    job: TrainJob,
    dataset: Dataset,
    world_size: int,
    choose: HeadChoice | None = None,
    choose_tiers: TierChoice | None = None,
) -> ResolvedJob:
    """Local. `choose` is asked where a head is `auto`, `choose_tiers` where tiers are; None: as if memory had no limit.

    Raises:
        ConfigError: tables, or compression, that do not fit the data set or the model.
        DataError: data.columns names labels that the data set has not.
    """
    job = replace(job, tables=expand_patterns(job.tables, dataset.sparse_feature_names))
    resolved = resolve_tables(
        without_auto(job.tables),
        dataset,
        job.data.synthetic_multi_hot,
        auto_init=job.model.table_init,
        sequences=job.model.sequence_inputs,
    )
    if has_auto(job.tables):
        auto = auto_tables(job.tables, resolved)
        heads = choose(resolved, auto) if choose else choose_heads(job, resolved, auto, dataset, world_size, math.inf)
        job = replace(job, tables=with_head_rows(job.tables, {table.config_name: heads[table.name] for table in auto}))
        resolved = [_with_head(table, heads[table.name]) if table in auto else table for table in resolved]
    job.model.check_tables(resolved, len(dataset.dense_features))
    used = used_tables(job.model, resolved)
    reports = head_reports(job, used, dataset, world_size)
    targets = targets_of(job.data.columns, dataset, job.model.learns_all)
    whole = ResolvedJob(job, dataset, world_size, resolved, with_notes(used, reports), reports, targets)
    if choose_tiers is None or job.sharding.tiers != AUTO_TIERS:
        return whole
    with_tiers: Callable[..., ResolvedJob] = from_extra("with_tiers", "sharding.tiers=auto")
    return with_tiers(whole, choose_tiers(whole))


def _with_head(table: Table, rows: int) -> Table:
    assert table.compression is not None
    fixed = replace(table, compression=replace(table.compression, head_rows=str(rows), min_rows=0))
    check_compressed(fixed)
    return fixed
