"""List the sharding types under which an optimizer trains a table just as without sharding (stdlib only).

Row-wise optimizers keep one state a row. Cut by columns, each shard keeps a state of its own for its part of the
row, which is another optimizer than the unsharded one: after 5 steps of row-wise Adagrad weights differ by
tenths. SGD, Adagrad and Adam work element by element and do not notice.
"""

from __future__ import annotations

from pipeline.config.tables import SHARDING_TYPES
from pipeline.embeddings.table import Table

COLUMN_SHARDING_TYPES = ("column_wise", "table_column_wise", "grid_shard")
ROW_STATE_OPTIMIZERS = ("rowwise_adagrad", "partial_rowwise_adam", "lamb")


def sharding_types_exact_for(optimizer_name: str) -> tuple[str, ...]:
    """The sharding types under which `optimizer_name` updates a table just as without sharding."""
    if optimizer_name not in ROW_STATE_OPTIMIZERS:
        return SHARDING_TYPES
    return tuple(kind for kind in SHARDING_TYPES if kind not in COLUMN_SHARDING_TYPES)


def allowed_sharding_types(table: Table, optimizer_name: str) -> tuple[str, ...]:
    """What a planner may choose from: the types that the table's config names, else those that are exact."""
    return tuple(table.sharding.sharding_types) or sharding_types_exact_for(optimizer_name)
