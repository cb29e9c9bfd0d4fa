"""Plans of any size, drawn by a seed and never searched, for tests of what shows and compares them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from pipeline.planner.estimator import shard_state_bytes
from pipeline.planner.plan_record import (
    PHASES,
    Fingerprint,
    Objective,
    PlanDescription,
    PlanRecord,
    RankLoad,
    TableChoice,
    critical_path_ms,
)
from pipeline.planner.request import PlanRequest

DIM = 64
Shardings = dict[str, dict[str, dict[str, Any]]]


def drawn_plan(
    num_tables: int, num_ranks: int, seed: int = 0, device: str = "cuda"
) -> tuple[PlanDescription, Shardings]:
    """Tables of every kind of sharding on `num_ranks` ranks in hosts of 8; sizes fall off as 1 / rank."""
    generator = random.Random(seed)
    local = min(8, num_ranks)
    choices, shardings = [], {}
    taken = [[0.0, 0.0] for _ in range(num_ranks)]
    for index in range(num_tables):
        kind = generator.choice(["table_wise", "table_wise", "row_wise", "data_parallel", "column_wise"])
        kernel = "dense" if kind == "data_parallel" else generator.choice(["fused", "fused", "fused_uvm_caching"])
        kernel = kernel if device == "cuda" else "dense" if kind == "data_parallel" else "fused"
        rows = num_ranks * max(1, 40_000_000 // (index + 1) // num_ranks)
        first = generator.randrange(num_ranks)
        ranks = {
            "table_wise": [first],
            "column_wise": sorted({first, (first + 1) % num_ranks}),
        }.get(kind, list(range(num_ranks)))
        sharding: dict[str, Any] = {"sharding_type": kind, "compute_kernel": kernel, "ranks": ranks}
        parts = 1 if kind == "data_parallel" else len(ranks)
        size = [rows // parts, DIM] if kind == "row_wise" else [rows, DIM // (parts if kind == "column_wise" else 1)]
        sharding["sharding_spec"] = (
            None if kind == "data_parallel" else [{"offsets": [0, 0], "sizes": size, "placement": ""} for _ in ranks]
        )
        shardings[f"table_{index}"] = sharding
        for rank in ranks:
            in_host = device == "cpu" or kernel == "fused_uvm_caching"
            taken[rank][in_host] += 1.01 * 4 * (size[0] * size[1] + size[0])
        choices.append(
            TableChoice(
                name=f"table_{index}", num_embeddings=rows, embedding_dim=DIM, weight_bytes=4 * rows * DIM,
                state_bytes=4 * rows, hbm_bytes=0, ddr_bytes=0, ssd_bytes=0, sharding_type=kind, compute_kernel=kernel, ranks=ranks,
                cost_ms=generator.random(), reason=f"drawn <{kind}> & \"so\"",
            )
        )  # fmt: skip
    loads = [
        RankLoad(rank, int(hbm), int(ddr), 0, *(generator.random() for _ in PHASES))
        for rank, (hbm, ddr) in enumerate(taken)
    ]
    objective = Objective("critical_path", max(load.cost_ms for load in loads), critical_path_ms(loads), 3.0, 0.0123)
    description = PlanDescription(
        planner="search",
        hardware="h100_80gb",
        tables=choices,
        ranks=loads,
        objective=objective,
        usable_hbm_bytes=int(1.2 * max(hbm for hbm, _ in taken)) if device == "cuda" else 0,
        usable_ddr_bytes=int(1.2 * max(ddr for _, ddr in taken)),
        usable_ssd_bytes=0,
        dense_bytes=0,
        fingerprint=_fingerprint(choices, num_ranks, local, device),
        torchrec_objective=Objective("max_rank", 4.5, 5.6),
    )
    return description, {"sparse.tables": shardings}


def _fingerprint(choices: list[TableChoice], num_ranks: int, local: int, device: str) -> Fingerprint:
    return {
        "topology": {"compute_device": device, "world_size": num_ranks, "local_world_size": local},
        "tables": {choice.name: {"num_embeddings": choice.num_embeddings} for choice in choices},
        "sparse_optimizer": {"name": "rowwise_adagrad", "weight_decay": 0.0},
        "batch_size": 512,
        "libraries": {"torch": "2.13.0"},
    }


def assert_capacity_kept(record: PlanRecord, asked: PlanRequest) -> None:
    """By hand: the bytes of each rank's shards, with optimizer state and without any buffer."""
    hardware, optimizer = asked.hardware, asked.optimizer.name
    taken = Counter[tuple[str, int]]()
    sizes = {table.name: 4 if table.data_type == "fp32" else 2 for table in asked.tables}
    shapes = {table.name: (table.num_embeddings, table.embedding_dim) for table in asked.tables}
    for name, sharding in next(iter(record.plan.plan.values())).items():
        tier = "hbm" if hardware.compute_device == "cuda" and "uvm" not in sharding.compute_kernel else "ddr"
        pieces = [shard.shard_sizes for shard in sharding.sharding_spec.shards] if sharding.sharding_spec else None
        for index, rank in enumerate(sharding.ranks):
            rows, columns = pieces[index] if pieces else shapes[name]
            taken[tier, rank] += rows * columns * sizes[name] + shard_state_bytes(optimizer, rows, columns)
    for load in record.ranks:
        assert taken["hbm", load.rank] <= load.hbm_bytes <= record.usable_hbm_bytes < max(1, hardware.hbm_cap_bytes)
        assert taken["ddr", load.rank] <= load.ddr_bytes <= record.usable_ddr_bytes < hardware.ddr_cap_bytes
