"""Tables and plan requests of known suites, for tests of the planner. All on meta: no memory is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.config.planner import HardwareConfig
from pipeline.config.tables import ConstraintConfig, InitConfig
from pipeline.config.training import CommsConfig
from pipeline.embeddings.collection import build_embedding_bag_collection
from pipeline.embeddings.table import Table
from pipeline.planner.hardware import Hardware, resolve_hardware
from pipeline.planner.request import PlanRequest, TableOptimizer
from pipeline.sharding.torchrec.sharding import make_sharders

HARDWARE = Path(__file__).resolve().parents[2] / "conf" / "hardware"
KAGGLE_ROWS = [
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
]  # fmt: skip
DLRMV2_ROWS = [
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    40000000, 40000000, 40000000, 590152, 12973, 108, 36,
]  # fmt: skip
DLRMV2_SIZES = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]


def make_tables(rows: list[int], dim: int, pooling_factors: list[int] | None = None, **changes: Any) -> list[Table]:
    """Tables t0, t1, ... of one feature each; `changes` are fields of Table."""
    fields = {"pooling": "sum", "data_type": "fp32", "init": InitConfig(), "sharding": ConstraintConfig(), **changes}
    factors = pooling_factors or [1] * len(rows)
    return [
        Table(
            name=f"t{index}",
            num_embeddings=count,
            embedding_dim=dim,
            feature_names=[f"f{index}"],
            pooling_factors=[float(factors[index])],
            **fields,
        )
        for index, count in enumerate(rows)
    ]


def preset(name: str, **changes: Any) -> HardwareConfig:
    return HardwareConfig(**{**yaml.safe_load((HARDWARE / f"{name}.yaml").read_text()), **changes})


def on(name: str, world_size: int, **changes: Any) -> Hardware:
    return resolve_hardware(preset(name, **changes), world_size)


class TinyModel(nn.Module):
    """Tables at `sparse.tables` and a dense layer beside them."""

    def __init__(self, tables: list[Table], num_dense: int = 64) -> None:
        super().__init__()
        self.sparse = nn.Module()
        self.sparse.tables = build_embedding_bag_collection(tables)
        self.dense = nn.Linear(num_dense, num_dense)

    @property
    def collection(self) -> EmbeddingBagCollection:
        tables = self.sparse.tables
        assert isinstance(tables, EmbeddingBagCollection)
        return tables


def request(
    tables: list[Table],
    hardware: Hardware,
    optimizer: str | TableOptimizer = "rowwise_adagrad",
    model: nn.Module | None = None,
    batch_size: int = 1024,
) -> PlanRequest:
    return PlanRequest(
        tables=tables,
        model=model or TinyModel(tables),
        sharders=make_sharders(CommsConfig()),
        hardware=hardware,
        optimizer=TableOptimizer(optimizer) if isinstance(optimizer, str) else optimizer,
        batch_size=batch_size,
    )
