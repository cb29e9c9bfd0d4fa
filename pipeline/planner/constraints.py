"""List what the planner may choose for each table, by its config, the optimizer and the
hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder

from pipeline.config.optimizers import find_optimizer
from pipeline.embeddings.limits import COLUMN_SHARDING_TYPES, KERNELS_OF_MANAGED_ROWS, allowed_sharding_types
from pipeline.embeddings.table import Table
from pipeline.planner.hardware import Hardware
from pipeline.runtime.errors import PlanError

COLUMN_STEP = 4  # FBGEMM needs dims divisible by it
TORCHREC_MIN_PARTITION = 128


@dataclass(frozen=True)
class TableOptimizer:
    """The settings of the sparse optimizer that a plan depends on."""

    name: str
    weight_decay: float = 0.0


@dataclass(frozen=True)
class PlacedTable:
    """A table and the position of its parameter in the model.

    `module`: the path of its EmbeddingBagCollection.
    """

    table: Table
    module: str
    parameter: nn.Parameter
    sharder: ModuleSharder[nn.Module]


def place_tables(tables: list[Table], model: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[PlacedTable]:
    """Find each table in the model, in the order of `tables`."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    found = {
        name: (path, parameter, by_type[type(module)])
        for path, module in _sharded_modules("", model, set(by_type))
        for name, parameter in by_type[type(module)].shardable_parameters(module).items()
    }
    expected = {table.name for table in tables}
    assert found.keys() == expected, f"model and tables differ in {sorted(found.keys() ^ expected)}"
    return [PlacedTable(table, *found[table.name]) for table in tables]


def _sharded_modules(path: str, module: nn.Module, types: set[type]) -> Iterator[tuple[str, nn.Module]]:
    if type(module) in types:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _sharded_modules(f"{path}.{name}" if path else name, child, types)


def build_constraints(
    placed: list[PlacedTable], hardware: Hardware, optimizer: TableOptimizer
) -> dict[str, ParameterConstraints]:
    """Return per table: pooling factors from the data, and the sharding types and kernels that keep
    training exact.

    Raises:
        PlanError: a table has no option left. The message states what it requests and what exists.
    """
    return {
        entry.table.name: ParameterConstraints(
            sharding_types=_sharding_types(entry, hardware, optimizer),
            compute_kernels=_compute_kernels(entry, hardware),
            min_partition=_min_partition(entry.table),
            pooling_factors=list(entry.table.pooling_factors),
        )
        for entry in placed
    }


def _sharding_types(entry: PlacedTable, hardware: Hardware, optimizer: TableOptimizer) -> list[str]:
    table, named = entry.table, bool(entry.table.sharding.sharding_types)
    offered = entry.sharder.sharding_types(hardware.compute_device)
    types = [kind for kind in allowed_sharding_types(table, optimizer.name) if kind in offered]
    if not named:
        types = [kind for kind in types if kind in _worth_trying(table, hardware, optimizer)]
    if table.tiers is not None:  # a replicated table is completely in memory
        types = [kind for kind in types if kind != "data_parallel"]
    if table.sharding.compute_kernels and "dense" not in table.sharding.compute_kernels:
        types = [kind for kind in types if kind != "data_parallel"]
    if not types:
        raise PlanError(
            f"table {table.config_name!r} may be sharded as {table.sharding.sharding_types or 'anything exact'} with kernels "
            f"{table.sharding.compute_kernels or 'of any kind'}, but on {hardware.compute_device} "
            f"there is {', '.join(sorted(offered))}, and data_parallel needs the dense kernel; "
            f"change tables.{table.config_name}.sharding"
        )
    return types


def _worth_trying(table: Table, hardware: Hardware, optimizer: TableOptimizer) -> list[str]:
    """List the types to try if the config names none: types that train, and that differ from each
    other on this hardware.
    """
    if hardware.world_size == 1:
        return ["table_wise"]
    by_columns = table.embedding_dim > (table.sharding.min_partition or TORCHREC_MIN_PARTITION)
    types = ["table_wise", "row_wise"] + (["column_wise"] if by_columns else [])
    if hardware.num_hosts > 1:
        types += ["table_row_wise"] + (["table_column_wise"] if by_columns else [])
    # A replicated table has an optimizer of this package or of torch, whose state has the table's
    # type.
    is_replicable = find_optimizer(optimizer.name).replicated_states is not None
    if table.data_type == "fp32" and is_replicable:
        types.append("data_parallel")
    return types


def _compute_kernels(entry: PlacedTable, hardware: Hardware) -> list[str]:
    table, there = entry.table, hardware.device.table_kernels
    if table.managed is not None:
        there = tuple(kernel for kernel in there if kernel in KERNELS_OF_MANAGED_ROWS)
    kernels = [kernel for kernel in table.sharding.compute_kernels or there if kernel in there]
    if not kernels:
        why = "" if table.managed is None else " for managed_collision, which writes rows without the cache"
        raise PlanError(
            f"table {table.config_name!r} asks for kernels {table.sharding.compute_kernels}, on {hardware.compute_device} "
            f"there are {', '.join(there)}{why}; change tables.{table.config_name}.sharding.compute_kernels"
        )
    return kernels


def _min_partition(table: Table) -> int | None:
    """Return the minimum width of a column shard; None is TorchRec's 128.

    A table that must be split by columns is split at least in two.
    """
    sharding, half = table.sharding, table.embedding_dim // 2
    only_columns = bool(sharding.sharding_types) and set(sharding.sharding_types) <= set(COLUMN_SHARDING_TYPES)
    if sharding.min_partition is None and only_columns and half < TORCHREC_MIN_PARTITION and half % COLUMN_STEP == 0:
        return half
    return sharding.min_partition
