"""Make the embedding tables of a named suite, and a PlanRequest for hardware that need not be here.

Public shapes, and seeded synthetic ones whose totals are public. All models are on meta: no memory is allocated.
`python -m benchmarks.planner_suites` prints the totals of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import yaml
from torch import nn

from pipeline.config.planner import HardwareConfig
from pipeline.config.tables import ConstraintConfig, InitConfig
from pipeline.config.training import CommsConfig
from pipeline.embeddings.collection import build_embedding_bag_collection
from pipeline.embeddings.table import Table
from pipeline.planner.estimator import shard_state_bytes
from pipeline.planner.hardware import GIB, resolve_hardware
from pipeline.planner.request import PlanRequest, TableOptimizer
from pipeline.sharding.torchrec.sharding import make_sharders

PRESETS = Path(__file__).resolve().parents[1] / "conf" / "hardware"
OPTIMIZER = "rowwise_adagrad"
RANKS = (8, 16, 64, 128)  # in hosts of 8
TIGHTNESS = (None, 1.5, 1.2, 1.1, 1.05, 1.02)
ID_BYTES = 8
IN_HBM = ["fused", "dense"]  # with a tightness, nothing may move to the host's memory

# facebookresearch/dlrm, every id of the Kaggle data set
KAGGLE_ROWS = [
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
]  # fmt: skip
CRITEO_1TB_ROWS = [
    227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10, 2209, 11938, 155, 4, 976,
    14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36,
]  # fmt: skip
# mlcommons/training, recommendation_v2/torchrec_dlrm
DLRMV2_ROWS = [min(rows, 40_000_000) for rows in CRITEO_1TB_ROWS]
DLRMV2_SIZES = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]

# NVIDIA-Merlin/HugeCTR, benchmarks/embedding_collection: (tables, ids a sample, rows, dim). Their names round: the one
# called 180 tables, 70 billion parameters, hotness 80 has 177 tables, 66.3 billion and 81.6.
HUGECTR: dict[str, list[tuple[int, int, int, int]]] = {
    "hugectr_180": [
        (5, 100, 10_000, 128), (5, 50, 4_000_000, 64), (5, 30, 4_000_000, 64), (5, 50, 50_000_000, 32),
        (20, 50, 1000, 128), (30, 30, 10_000, 128), (10, 20, 5_000_000, 256), (20, 20, 4_000_000, 128),
        (10, 100, 10, 128), (10, 10, 1000, 64), (10, 100, 10_000, 128), (5, 100, 100_000, 64),
        (40, 200, 4_000_000, 64), (1, 100, 50_000_000, 128), (1, 100, 500_000_000, 32),
    ],
    "hugectr_200": [
        (10, 1, 100, 128), (10, 1, 1000, 128), (10, 5, 1000, 128), (10, 20, 10_000, 128), (20, 100, 10_000, 128),
        (10, 1, 10_000, 128), (10, 1, 100_000, 128), (10, 1, 1_000_000, 128), (10, 1, 2_000_000, 128),
        (10, 1, 2_000_000, 128), (10, 1, 4_000_000, 128), (20, 1, 4_000_000, 128), (20, 10, 2_000_000, 64),
        (10, 20, 4_000_000, 128), (10, 30, 4_000_000, 128), (10, 50, 4_000_000, 128), (10, 100, 50_000_000, 128),
    ],
    "hugectr_510": [
        (100, 1, 1000, 128), (150, 1, 100_000, 128), (20, 1, 1_000_000, 128), (50, 1, 2_000_000, 128),
        (150, 1, 4_000_000, 128), (20, 10, 4_000_000, 128), (20, 100, 4_000_000, 128),
    ],
    "hugectr_7": [
        (1, 80, 10_000_000, 256), (1, 20, 400_000_000, 64), (1, 20, 1_000_000_000, 128), (1, 40, 5_000_000_000, 32),
        (1, 1, 1_000_000_000, 128), (1, 1, 10_000_000, 64), (1, 1, 10_000_000, 128),
    ],
}  # fmt: skip
# facebookresearch/dlrm_datasets, embedding_bag: 856 tables, a batch of 65,536 samples with 887,017,990 lookups
PRODUCTION_LOOKUPS_PER_TABLE = 887_017_990 / 65_536 / 856
SYNTHETIC_DIMS = [16, 32, 64, 64, 96, 128, 128, 128, 192, 256]

# arXiv 1906.03109, RMC1 to RMC3: tables of 100 MB, 10 GB and 1 GB in all, RMC2 with about ten times the tables of the
# others, RMC1 and RMC2 with four times the lookups of RMC3. The paper gives ratios; these counts are one choice of them.
RMC: dict[str, tuple[int, int, float]] = {"rmc1": (4, 80, 0.1e9), "rmc2": (40, 80, 10e9), "rmc3": (4, 20, 1e9)}
RMC_DIM = 32


@dataclass(frozen=True)
class Suite:
    name: str
    tables: list[Table]
    global_batch_size: int = 65_536

    @property
    def num_parameters(self) -> int:
        return sum(table.num_embeddings * table.embedding_dim for table in self.tables)

    @property
    def lookups_per_sample(self) -> float:
        return sum(sum(table.pooling_factors) for table in self.tables)

    @property
    def training_bytes(self) -> int:
        """fp32 weights and optimizer state, once."""
        state = sum(shard_state_bytes(OPTIMIZER, table.num_embeddings, table.embedding_dim) for table in self.tables)
        return 4 * self.num_parameters + state

    @property
    def least_hbm_bytes(self) -> int:
        """Of all ranks together: weights, state, and what TorchRec counts for ids and outputs of tables left whole."""
        ids = ID_BYTES * self.lookups_per_sample
        outputs = 4 * sum(table.embedding_dim for table in self.tables)
        return self.training_bytes + int(self.global_batch_size * (ids + outputs))


class Tables(nn.Module):
    """The tables and nothing else, on meta."""

    def __init__(self, tables: list[Table]) -> None:
        super().__init__()
        self.tables = build_embedding_bag_collection(tables)


def build_suite(name: str) -> Suite:
    """Raises KeyError for a name that is not in SUITES."""
    return Suite(name, SUITES[name]())


def make_tables(rows: list[int], dims: list[int], pooling_factors: list[float]) -> list[Table]:
    return [
        Table(
            name=f"t_{index}",
            num_embeddings=count,
            embedding_dim=dim,
            feature_names=[f"f_{index}"],
            pooling="sum",
            data_type="fp32",
            init=InitConfig(),
            sharding=ConstraintConfig(),
            pooling_factors=[factor],
        )
        for index, (count, dim, factor) in enumerate(zip(rows, dims, pooling_factors, strict=True))
    ]


def _of_one_dim(rows: list[int], dim: int, sizes: list[int] | None = None) -> list[Table]:
    return make_tables(rows, [dim] * len(rows), [float(size) for size in sizes or [1] * len(rows)])


def _hugectr(name: str) -> list[Table]:
    rows, dims, factors = [], [], []
    for count, hotness, num_rows, dim in HUGECTR[name]:
        rows += [num_rows] * count
        dims += [dim] * count
        factors += [float(hotness)] * count
    return make_tables(rows, dims, factors)


def synthetic_tables(num_tables: int, seed: int = 0) -> list[Table]:
    """Rows and lookups log-normal with long tails; lookups a table are the production batch's on average, exactly."""
    generator = np.random.default_rng(seed)
    rows = np.clip(np.exp(generator.normal(np.log(3e5), 2.2, num_tables)), 100, 2e8).astype(int)
    factors = np.clip(np.exp(generator.normal(np.log(5), 1.5, num_tables)), 0.1, 400)
    factors *= PRODUCTION_LOOKUPS_PER_TABLE * num_tables / factors.sum()
    dims = generator.choice(SYNTHETIC_DIMS, num_tables)
    return make_tables(rows.tolist(), dims.tolist(), factors.tolist())


def _rmc(name: str, seed: int = 0) -> list[Table]:
    """Tables of log-normal size that take the stated bytes in fp32, but for the rounding of rows."""
    num_tables, lookups, num_bytes = RMC[name]
    sizes = np.exp(np.random.default_rng(seed).normal(0, 1, num_tables))
    rows = (sizes * num_bytes / (4 * RMC_DIM) / sizes.sum()).astype(int)
    return _of_one_dim(rows.tolist(), RMC_DIM, [lookups] * num_tables)


SUITES: dict[str, Callable[[], list[Table]]] = {
    "criteo_kaggle": partial(_of_one_dim, KAGGLE_ROWS, 16),
    "criteo_1tb": partial(_of_one_dim, CRITEO_1TB_ROWS, 128),
    "mlperf_dlrmv2": partial(_of_one_dim, DLRMV2_ROWS, 128, DLRMV2_SIZES),
    **{name: partial(_hugectr, name) for name in HUGECTR},
    **{f"synthetic_{count}": partial(synthetic_tables, count) for count in (100, 400, 856)},
    **{name: partial(_rmc, name) for name in RMC},
}


def build_request(
    suite: Suite, world_size: int, preset: str = "h100_80gb", tightness: float | None = None
) -> PlanRequest:
    """`tightness` times the least HBM that a rank would need were all spread evenly; None: the preset's own.

    With a tightness no table may lie in host memory. Plan with reserve(tightness), so that all of that HBM is the tables'.
    """
    tables, hardware = suite.tables, resolve_hardware(load_preset(preset), world_size)
    if tightness is not None:
        tables = [replace(table, sharding=ConstraintConfig(compute_kernels=IN_HBM)) for table in tables]
        hardware = replace(hardware, hbm_cap_bytes=int(tightness * suite.least_hbm_bytes / world_size))
    return PlanRequest(
        tables=tables,
        model=Tables(tables),
        sharders=make_sharders(CommsConfig()),
        hardware=hardware,
        optimizer=TableOptimizer(OPTIMIZER),
        batch_size=suite.global_batch_size // world_size,
    )


def reserve(tightness: float | None) -> float:
    """planner.reserved_memory_fraction that goes with build_request: the default, or nothing."""
    return 0.15 if tightness is None else 0.0


def load_preset(name: str) -> HardwareConfig:
    return HardwareConfig(**yaml.safe_load((PRESETS / f"{name}.yaml").read_text()))


def describe(suite: Suite) -> str:
    return (
        f"{suite.name:15} {len(suite.tables):4} tables {suite.num_parameters / 1e9:9.3f} billion parameters "
        f"{suite.training_bytes / GIB:9.1f} GiB with {OPTIMIZER} {suite.lookups_per_sample:9.1f} lookups a sample"
    )


if __name__ == "__main__":
    for name in SUITES:
        print(describe(build_suite(name)))
