"""Choose how many rows of a frequency_split table every rank replicates, so that the fewest bytes
are sent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.config.jobs.train import TrainJob
from pipeline.config.optimizers import find_optimizer
from pipeline.config.tables import AUTO, DEFAULT, TableConfig
from pipeline.data.dataset import Dataset
from pipeline.embeddings.compression.kind import compressed, kind_of
from pipeline.embeddings.limits import COLUMN_SHARDING_TYPES, precisions
from pipeline.embeddings.physical import check_compressed, num_numbers
from pipeline.embeddings.table import Table
from pipeline.extras.frequency_split.head_size import (
    HeadTable,
    StepBytes,
    Wire,
    bag_shapes,
    choose_head_rows,
    step_bytes,
)
from pipeline.extras.frequency_split.kind import FrequencySplit, has_auto_head
from pipeline.planner.resolved_job import HeadChoice, resolve_job_tables

BYTES_A_VALUE = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": (32 + 8) / 32}
ROW_SHARDING_TYPES = ("row_wise", "table_row_wise")
WEIGHT_BYTES = 4
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadReport:
    """Hold the bytes that leave a rank in a step: without a head, with the chosen head, and with
    all rows in the head.
    """

    table: str
    head_rows: int
    num_embeddings: int
    share: float  # of the lookups
    none: StepBytes
    chosen: StepBytes
    all: StepBytes

    def note(self) -> str:
        sizes = " / ".join(show(each.total) for each in (self.none, self.chosen, self.all))
        return (
            f"head of {self.head_rows:,} of {self.num_embeddings:,} rows, {100 * self.share:.1f} "
            f"% of lookups; a step sends {sizes} per rank without a head / with this head / with "
            "all rows replicated"
        )


def show(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB" if num_bytes >= 2**20 / 10 else f"{num_bytes / 1024:,.1f} KiB"


def has_auto(configs: Mapping[str, TableConfig]) -> bool:
    return any(_is_auto(config) for config in configs.values())


def auto_tables(configs: Mapping[str, TableConfig], tables: list[Table]) -> list[Table]:
    """Return those of the `tables` (resolved from without_auto(configs)) whose head is `auto`."""
    return [table for table in tables if _is_split(table) and _is_auto(_own_or_default(configs, table.config_name))]


def without_auto(configs: Mapping[str, TableConfig]) -> dict[str, TableConfig]:
    """Return the configs with a head of one row for every `auto`, so that tables can be
    resolved.
    """
    return {name: _with_rows(config, 1) if _is_auto(config) else config for name, config in configs.items()}


def resolve_split_tables(
    job: TrainJob, dataset: Dataset, world_size: int, choose: HeadChoice | None
) -> tuple[TrainJob, list[Table]]:
    """Return the job with numbers in place of `head_rows: auto`, and its tables. choose=None: memory has no limit."""
    resolved = resolve_job_tables(job, without_auto(job.tables), dataset)
    if has_auto(job.tables):
        auto = auto_tables(job.tables, resolved)
        heads = choose(resolved, auto) if choose else choose_heads(job, resolved, auto, dataset, world_size, math.inf)
        job = replace(job, tables=with_head_rows(job.tables, {table.config_name: heads[table.name] for table in auto}))
        resolved = [_with_head(table, heads[table.name]) if table in auto else table for table in resolved]
    return job, resolved


def _with_head(table: Table, rows: int) -> Table:
    assert table.compression is not None
    fixed = replace(table, compression=replace(table.compression, head_rows=str(rows), min_rows=0))
    check_compressed(fixed)
    return fixed


def choose_heads(
    job: TrainJob,
    tables: list[Table],
    auto: list[Table],
    dataset: Dataset,
    world_size: int,
    room_bytes: float,
    earlier: Mapping[str, TableConfig] | None = None,
) -> dict[str, int]:
    """Return the number of head rows for each table of `auto`. These tables are among `tables`.

    room_bytes: a rank's memory for tables. earlier: the tables of the resumed run, whose numbers
    are kept.

    Raises:
        PlanError: the ids of such a table have no order.
    """
    kept = {
        table.name: int(before.compression.head_rows)
        for table in auto
        if (before := (earlier or {}).get(table.config_name)) is not None
        and before.compression is not None
        and kind_of(before.compression) is FrequencySplit
        and before.compression.head_rows != AUTO
    }
    free = [table for table in auto if table.name not in kept]
    others = sum(num_numbers(table) for table in tables if table not in free) * WEIGHT_BYTES / world_size
    wires = {table.name: wire_of(job, table, world_size) for table in free}
    chosen = choose_head_rows(
        [head_table(job, table, dataset) for table in free], lambda table: wires[table.name], room_bytes - others
    )
    return {**kept, **chosen}


def with_head_rows(configs: Mapping[str, TableConfig], heads: Mapping[str, int]) -> dict[str, TableConfig]:
    """Return `configs` without `auto`: each table of `heads` gets a separate entry with its number of head rows."""
    resolved = dict(configs)
    for name, rows in heads.items():
        config = resolved.get(name, TableConfig())
        compression = config.compression or resolved[DEFAULT].compression
        assert compression is not None
        resolved[name] = replace(config, compression=replace(compression, head_rows=str(rows), min_rows=0))
    if (default := resolved.get(DEFAULT)) is not None and _is_auto(default):
        # every table that used it now has a separate entry
        resolved[DEFAULT] = replace(default, compression=None)
    return resolved


def head_reports(job: TrainJob, tables: list[Table], dataset: Dataset, world_size: int) -> list[HeadReport]:
    """Report each frequency_split table whose head is replicated."""
    reports = []
    for table in tables:
        split = compressed(table)
        if not isinstance(split, FrequencySplit) or split.config.head_sharding_types != ["data_parallel"]:
            continue
        head, wire = head_table(job, table, dataset), wire_of(job, table, world_size)
        rows, cold = split.head_rows, split.cold_part
        lookups = sum(table.pooling_factors)
        share = 1.0 if cold is None else 1.0 - sum(cold.pooling_factors) / lookups if lookups else 0.0
        none, chosen, all_rows = (step_bytes(head, each, wire) for each in (0, rows, table.num_embeddings))
        reports.append(HeadReport(table.name, rows, table.num_embeddings, share, none, chosen, all_rows))
    return reports


def head_table(job: TrainJob, table: Table, dataset: Dataset) -> HeadTable:
    features = [dataset.sparse_feature(name) for name in table.feature_names]
    entry = find_optimizer(job.optimizer.sparse.name)
    state = entry.state_per_element * table.embedding_dim + entry.state_per_row
    shapes = bag_shapes(features, job.data.synthetic_multi_hot)
    return HeadTable(table.name, table.num_embeddings, table.embedding_dim, shapes, WEIGHT_BYTES * state)


def wire_of(job: TrainJob, table: Table, world_size: int) -> Wire:
    """Describe how the tail's pooled rows are sent.

    If the tail may be sharded by tables or columns, assume that it is.
    """
    allowed = table.sharding.sharding_types
    by_rows = bool(allowed) and set(allowed) <= set(ROW_SHARDING_TYPES)
    forward, backward = precisions(job.comms)["reduce_scatter" if by_rows else "all_to_all"]
    on_gloo = job.comms.backend == "gloo" or (job.comms.backend == "auto" and job.hardware.compute_device == "cpu")
    return Wire(
        world_size,
        job.trainer.micro_batch_size // world_size,
        BYTES_A_VALUE[forward],
        BYTES_A_VALUE[backward],
        by_rows,
        summed_twice=on_gloo,
        column_shards=_column_shards(table),
    )


def _column_shards(table: Table) -> int:
    """Return into how many column shards a table must be split, because each shard gets all ids; otherwise 1."""
    if not table.sharding.sharding_types or not set(table.sharding.sharding_types) <= set(COLUMN_SHARDING_TYPES):
        return 1
    return -(-table.embedding_dim // (table.sharding.min_partition or table.embedding_dim // 2))


def _own_or_default(tables: Mapping[str, TableConfig], name: str) -> TableConfig:
    config = tables.get(name, TableConfig())
    return config if config.compression is not None else tables.get(DEFAULT, TableConfig())


def _is_split(table: Table) -> bool:
    return isinstance(compressed(table), FrequencySplit)


def _is_auto(config: TableConfig) -> bool:
    return has_auto_head(config.compression)


def _with_rows(config: TableConfig, rows: int) -> TableConfig:
    assert config.compression is not None
    return replace(config, compression=replace(config.compression, head_rows=str(rows)))
