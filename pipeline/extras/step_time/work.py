"""List the work of a step on CPU ranks as amounts: calls, FLOPs, bytes, rows of tables, exchanges.

The time of a step is predicted as a sum of amounts, each multiplied by a rate that `calibrate` has
fitted (rates.py). Counts are plain numbers; FLOPs and bytes are in millions, so that all rates are
microseconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingPlan

from pipeline.config.optimizers import find_optimizer
from pipeline.embeddings.table import Table
from pipeline.extras.step_time.recorded_layers import PRODUCTS, DensePart, Operation
from pipeline.planner.cost_model import BY_HOST, ID_BYTES, LENGTH_BYTES, Wire, shard_shares
from pipeline.planner.request import Placement

MILLION = 1e6
LANES = 16  # columns that a product computes at once; a part of them takes as long
HANDED_NUMBERS = 32_768  # at::internal::GRAIN_SIZE: torch splits larger operations between threads
DRAWN = ("native_dropout", "bernoulli", "bernoulli_", "rand_like")
LAYER_AMOUNTS = (
    "steps", "calls", "products", "handed", "flops_fp32", "flops_bf16", "batched_flops",
    "fp32_product_bytes", "bf16_product_bytes", "moved_bytes", "drawn_bytes", "norm_bytes", "updated_layer_bytes",
)  # fmt: skip
TABLE_AMOUNTS = (
    "features", "bags", "ids", "row_bytes", "pooled_bytes", "state_bytes",
)  # fmt: skip
EXCHANGE_AMOUNTS = (
    "whole_shardings", "row_shardings", "replicated_shardings", "norms", "whole_exchange_bytes", "row_exchange_bytes",
    "averaged_bytes",
)  # fmt: skip
AMOUNTS = LAYER_AMOUNTS + TABLE_AMOUNTS + EXCHANGE_AMOUNTS


def layer_amounts(dense: DensePart, threads: int) -> dict[str, float]:
    """Return the amounts of the layers, which do not depend on the plan."""
    amounts = dict.fromkeys(LAYER_AMOUNTS, 0.0) | {"steps": 1.0}
    for operation in dense.operations:
        if not operation.has_kernel:
            continue
        amounts["calls"] += 1
        num_bytes = (operation.in_bytes + operation.out_bytes) / MILLION
        if operation.name.startswith("optimizer:"):
            amounts["updated_layer_bytes"] += num_bytes
        elif operation.name in PRODUCTS:
            amounts["products"] += 1
            dtype = "bf16" if operation.dtype == "bf16" else "fp32"
            amounts[f"{dtype}_product_bytes"] += num_bytes
            amounts[_flops_kind(operation)] += product_flops(operation, 1, LANES) / MILLION
        else:
            amounts[_passes_kind(operation.name)] += num_bytes
        numbers = max(operation.in_bytes, operation.out_bytes) / (2 if operation.dtype == "bf16" else 4)
        amounts["handed"] += threads > 1 and numbers >= HANDED_NUMBERS
    return amounts


def _passes_kind(name: str) -> str:
    """Return the kind of an operation by how it passes over its numbers: random numbers are sampled
    one by one, and a batch norm reads numbers several times.
    """
    if name in DRAWN:
        return "drawn_bytes"
    return "norm_bytes" if "batch_norm" in name else "moved_bytes"


def _flops_kind(operation: Operation) -> str:
    if len(operation.shapes[-1]) == 3:
        return "batched_flops"
    return "flops_bf16" if operation.dtype == "bf16" else "flops_fp32"


def product_flops(operation: Operation, row_block: int, column_block: int) -> float:
    """Return the FLOPs of a matrix product. Rows and columns are rounded up to complete blocks."""
    count, rows, columns, inner = operation.product_sizes
    rows, columns = math.ceil(rows / row_block) * row_block, math.ceil(columns / column_block) * column_block
    return 2.0 * count * rows * columns * inner


def placements_of(plan: ShardingPlan) -> list[Placement]:
    found = []
    for module in plan.plan.values():
        for name, sharding in module.items():
            assert isinstance(sharding, ParameterSharding)
            found.append(Placement(name, sharding.sharding_type, _shards(sharding)))
    return found


def _shards(sharding: ParameterSharding) -> tuple[tuple[int, int, int, int], ...]:
    if sharding.sharding_type == "data_parallel":
        return ()
    spec = sharding.sharding_spec
    assert isinstance(spec, EnumerableShardingSpec)
    return tuple((shard.placement.rank(), shard.shard_offsets[0], *shard.shard_sizes) for shard in spec.shards)


def table_amounts(
    placements: Sequence[Placement],
    tables: Sequence[Table],
    dense: DensePart,
    optimizer: str,
    wire: Wire,
    batch_size: int,
    world_size: int,
) -> dict[str, float]:
    """Return the amounts of tables and exchanges. Each amount is that of the rank with the largest."""
    by_name = {table.name: table for table in tables}
    entry = find_optimizer(optimizer)
    ranks: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(world_size)]
    sent: defaultdict[str, float] = defaultdict(
        float
    )  # bytes of ids that a rank sends, and of tables that all ranks have
    for placed in placements:
        table = by_name[placed.table]
        num_features, num_ids = len(table.feature_names), batch_size * sum(table.pooling_factors)
        way = _way(placed.kind)
        shards = placed.shards
        if way == "replicated":
            shards = tuple((rank, 0, table.num_embeddings, table.embedding_dim) for rank in range(world_size))
            sent[way] += 4 * table.num_embeddings * table.embedding_dim
        else:
            copies = 1 if way == "row" else len(shards)
            sent[way] += copies * (num_ids * ID_BYTES + batch_size * num_features * LENGTH_BYTES)
        batches = 1 if way == "replicated" else world_size
        for rank, first, rows, columns in shards:
            ids = batches * num_ids * (_share(table, first, rows) if way == "row" else 1.0)
            bags = batches * batch_size * num_features
            state = entry.state_per_element * columns + entry.state_per_row
            own = {
                "bags": bags, "ids": ids, "row_bytes": ids * 4 * columns, "pooled_bytes": bags * 4 * columns,
                "state_bytes": ids * 4 * state, f"{way}_width": bags * 4 * columns,
            }  # fmt: skip
            for name, amount in own.items():
                ranks[rank][name] += amount
    most = {name: max(rank[name] for rank in ranks) for rank in ranks for name in rank}
    amounts = {name: most.get(name, 0.0) / (MILLION if name.endswith("bytes") else 1) for name in TABLE_AMOUNTS}
    amounts["features"] = float(sum(len(table.feature_names) for table in tables))
    amounts |= dict.fromkeys(EXCHANGE_AMOUNTS, 0.0)
    if world_size == 1:
        return amounts
    numbers = {  # bytes of a number on the wire, in both directions
        "whole": (wire.forward or 4.0) + (wire.backward or 4.0),
        "row": (wire.summed_forward or 4.0) + (wire.summed_backward or 4.0),
    }
    kinds = {placed.kind for placed in placements}
    for way in ("whole", "row", "replicated"):
        amounts[f"{way}_shardings"] = float(sum(_way(kind) == way for kind in kinds))
    for way, num_bytes in numbers.items():
        moved = sent[way] + most.get(f"{way}_width", 0.0) / 4 * num_bytes
        amounts[f"{way}_exchange_bytes"] = moved / MILLION
    return amounts | {
        "norms": float(sum(each.name.startswith("native_batch_norm") for each in dense.operations)),
        "averaged_bytes": (dense.weight_bytes + sent["replicated"]) / MILLION,
    }


def _way(kind: str) -> str:
    """Return which ids a shard gets: whole (all ids of its table), row (the ids of its rows) or
    replicated (the rank's ids).
    """
    if kind == "data_parallel":
        return "replicated"
    return "row" if kind == "row_wise" or kind in BY_HOST else "whole"


def _share(table: Table, first: int, rows: int) -> float:
    """Return the share of a table's lookups that are for rows first .. first + rows."""
    begin, count = np.array([first]), np.array([rows])
    return float(shard_shares(table.frequencies, begin, count, table.num_embeddings)[0])
