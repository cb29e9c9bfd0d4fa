"""A small DLRM that can be planned and recorded, for tests of predicted steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config.data import DataConfig
from pipeline.config.jobs.train import TrainJob
from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.planner import HardwareConfig, PlannerConfig
from pipeline.config.registry import find
from pipeline.config.tables import ConstraintConfig, TableConfig
from pipeline.config.training import TrainerConfig
from pipeline.data.dataset import Dataset, FrequencyCurve, SparseFeature, Split
from pipeline.extras.step_time.calibration import Calibration, Conditions, Machine, Speeds, TimedJob
from pipeline.extras.step_time.work import AMOUNTS
from pipeline.planner.hardware import resolve_hardware
from pipeline.planner.plan_record import PlanRecord
from pipeline.planner.planner import make_plan
from pipeline.planner.request import PlanRequest, TableOptimizer
from pipeline.planner.resolved_job import ResolvedJob, resolve_job
from pipeline.sharding.torchrec.sharding import make_sharders
from pipeline.training.sharded_model import build_task

NUM_DENSE = 13
CPU = HardwareConfig(
    name="cpu", compute_device="cpu", ddr_gb_per_s=20.0, intra_host_gb_per_s=0.85, inter_host_gb_per_s=0.85
)
MACHINE = Machine("a CPU", 2, 23.5, 32.0)
QUIET = Conditions("2026-11-23T09:00:00+00:00", 200.0, 0.05, 0.02, 1000.0)
SPEEDS = Speeds(0.1, 0.2, 8.0, 1.0, {"21": 2.0, "39": 4.0}, 1.05, 30.0)


@dataclass(frozen=True)
class SmallStep:
    """A job with a table for each of `rows`."""

    rows: list[int] = field(default_factory=lambda: [100, 1000, 10000])
    pooling: list[int] = field(default_factory=lambda: [1, 1, 4])
    dim: int = 16
    batch: int = 64
    kind: str = "dlrm"
    model: dict[str, Any] = field(
        default_factory=lambda: {"dense_arch_layer_sizes": [32, 16], "over_arch_layer_sizes": [24, 1]}
    )
    precision: str = "fp32"
    sharding: str | None = None

    def resolve(self, world_size: int, hardware: HardwareConfig = CPU) -> ResolvedJob:
        table = TableConfig(embedding_dim=self.dim)
        if self.sharding is not None:
            table.sharding = ConstraintConfig(sharding_types=[self.sharding])
        job = TrainJob(
            name="small",
            run_dir="runs/small",
            world_size=world_size,
            data=DataConfig(name="small", path="datasets/small"),
            tables={"default": table},
            model=find("model", self.kind)(**self.model),
            optimizer=OptimizerConfig(SparseOptimizerConfig("rowwise_adagrad"), DenseOptimizerConfig("adam")),
            planner=PlannerConfig(plan_file="plan.json", timeout_s=2.0, objective="critical_path"),
            hardware=hardware,
            trainer=TrainerConfig(global_batch_size=self.batch * world_size, precision=self.precision),
        )
        features = [
            SparseFeature(f"cat_{index}", rows, count > 1, float(count), FrequencyCurve([rows], [1.0]))
            for index, (rows, count) in enumerate(zip(self.rows, self.pooling, strict=True))
        ]
        dense = [f"int_{index}" for index in range(NUM_DENSE)]
        dataset = Dataset(
            "small", "label", dense, features, {"train": Split([], 10**6, 10**5)}, 10**6, 10**6, 0, "log1p"
        )
        return resolve_job(job, dataset, world_size)

    def request(
        self, world_size: int, hardware: HardwareConfig = CPU, **changes: Any
    ) -> tuple[ResolvedJob, PlanRequest]:
        resolved = self.resolve(world_size, hardware)
        task = build_task(resolved, resolved.job.hardware.compute_device)
        made = PlanRequest(
            resolved.plain_tables,
            task,
            make_sharders(resolved.job.comms),
            resolve_hardware(resolved.job.hardware, world_size),
            TableOptimizer("rowwise_adagrad"),
            self.batch,
            **changes,
        )
        return resolved, made


def planned(resolved: ResolvedJob, request: PlanRequest) -> PlanRecord:
    return make_plan(replace(resolved.job.planner, kind="torchrec"), request)


def calibrated(*setups: str, **conditions: float) -> Calibration:
    """A machine on which a unit of the n-th amount takes n + 1 microseconds."""
    values = {**vars(QUIET), **conditions}
    jobs = [
        TimedJob(setup, float(10 * (index + 1)), 0.01, {name: 10.0 * (name == of) for name in AMOUNTS})
        for setup in setups
        for index, of in enumerate(AMOUNTS)
    ]
    return Calibration("made_up", MACHINE, {"torch": "2.13.0"}, Conditions(**values), SPEEDS, jobs)
