"""Limit sharding types, widths and precisions to those that train exactly (stdlib only).

Row-wise optimizers have one state per row. If a table is split by columns, each shard has a
separate state for its part of the row. This is a different optimizer: after 5 steps of row-wise
Adagrad, weights differ by tenths. SGD, Adagrad and Adam are not affected.
"""

from __future__ import annotations

from pipeline.config.optimizers import find_optimizer
from pipeline.config.tables import SHARDING_TYPES
from pipeline.config.training import CommsConfig
from pipeline.embeddings.table import SHARD_WIDTH, Table
from pipeline.runtime.errors import PlanError

COLUMN_SHARDING_TYPES = ("column_wise", "table_column_wise", "grid_shard")
# Managed collision initializes the rows of evicted ids directly. If a row is also in a cache
# (fused_uvm_caching), the cache would keep the evicted id's vector and write it back over the new
# one.
KERNELS_OF_MANAGED_ROWS = ("fused", "fused_uvm")
INT8_ROW = 32  # fbgemm's codec quantizes this many adjacent values with one scale and bias


def sharding_types_exact_for(optimizer_name: str) -> tuple[str, ...]:
    """Return the types under which the optimizer updates tables exactly as without sharding."""
    if not find_optimizer(optimizer_name).whole_rows:
        return SHARDING_TYPES
    return tuple(kind for kind in SHARDING_TYPES if kind not in COLUMN_SHARDING_TYPES)


def allowed_sharding_types(table: Table, optimizer_name: str) -> tuple[str, ...]:
    """List the types that a planner may choose: the config's types, or all exact types."""
    return tuple(table.sharding.sharding_types) or sharding_types_exact_for(optimizer_name)


def check_widths(tables: list[Table]) -> None:
    """Raise PlanError for a table that only data_parallel can place."""
    for table in tables:
        if table.embedding_dim % SHARD_WIDTH and table.sharding.sharding_types != ["data_parallel"]:
            raise PlanError(
                f"tables.{table.config_name}.embedding_dim={table.embedding_dim}, but FBGEMM's "
                f"sharded tables need a multiple of {SHARD_WIDTH}: use "
                f"{table.embedding_dim // SHARD_WIDTH * SHARD_WIDTH + SHARD_WIDTH}, or "
                f"tables.{table.config_name}.sharding.sharding_types=[data_parallel]"
            )


def precisions(comms: CommsConfig) -> dict[str, tuple[str, str]]:
    """Return collective -> (forward, backward) precision.

    A reduce-scatter adds numbers. int8 does not allow this, because 32 values share one scale. So
    reduce-scatter, and the all-gather of its gradients, use fp16.
    """
    asked = (comms.forward_precision, comms.backward_precision)
    summed = ["fp16" if precision == "int8" else precision for precision in asked]
    return {"all_to_all": asked, "reduce_scatter": (summed[0], summed[1])}


def describe_comms(comms: CommsConfig) -> dict[str, str]:
    """Return {"all_to_all": "int8 forward / fp16 backward", ...}."""
    described = {
        name: f"{forward} forward / {backward} backward" for name, (forward, backward) in precisions(comms).items()
    }
    return {**described, "all_reduce": "fp32"}


def check_batch_fits_comms(comms: CommsConfig, batch_size: int, tables: list[Table]) -> None:
    """Raise PlanError if int8 all-to-all, which sends rows of 32, would fail at the first step."""
    if "int8" not in precisions(comms)["all_to_all"]:
        return
    for table in tables:
        by_columns = set(COLUMN_SHARDING_TYPES) & set(table.sharding.sharding_types or COLUMN_SHARDING_TYPES)
        width = SHARD_WIDTH if by_columns else table.embedding_dim
        if batch_size * width % INT8_ROW:
            raise PlanError(
                f"comms int8 sends {INT8_ROW} values with one scale, but batch_size={batch_size} "
                "(rows per rank) times the "
                f"{width} columns of table {table.config_name!r} or of a shard of it is not a "
                f"multiple of {INT8_ROW}; make the batch size per rank a multiple of "
                f"{INT8_ROW // SHARD_WIDTH}, or use comms precision fp16"
            )
