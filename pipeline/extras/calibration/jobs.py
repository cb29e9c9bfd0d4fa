"""Train small models for some steps on batches in memory with the Trainer, and time the steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.config.data import DataConfig, ReaderConfig
from pipeline.config.jobs.train import TrainJob
from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.planner import HardwareConfig, PlannerConfig
from pipeline.config.registry import find
from pipeline.config.tables import ConstraintConfig, TableConfig
from pipeline.config.training import TrainerConfig
from pipeline.data.dataset import Dataset, FrequencyCurve, SparseFeature, Split
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.extras.step_time.calibration import TimedJob, median_and_spread
from pipeline.extras.step_time.plan_forecast import step_request
from pipeline.extras.step_time.work import Placement, placements_of
from pipeline.planner.hardware import resolve_hardware
from pipeline.planner.request import PlanRequest, TableOptimizer
from pipeline.planner.resolved_job import ResolvedJob, resolve_job
from pipeline.runtime.errors import UserError
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.sharding.torchrec.sharding import make_sharders
from pipeline.training.hooks.base import TrainingParts, build_hooks
from pipeline.training.optimizer import build_optimizer
from pipeline.training.sharded_model import ShardedModel, build_sharded_model, build_task
from pipeline.training.trainer import Trainer

NUM_BATCHES = 24
NUM_BANDS = 48  # of rows, in a frequency curve
ROUNDS, STEPS = 3, 8
# A round of long steps needs few steps. Two rounds warm up memory and oneDNN's products.
MIN_STEPS, ROUND_S, WARM_UP_S = 2, 0.12, 0.4
PLAN_S = 2.0
NUM_DENSE = 13
ENDLESS = 10**6
CPU_RANK = HardwareConfig(
    name="cpu", compute_device="cpu", ddr_gb_per_s=20.0, intra_host_gb_per_s=0.85, inter_host_gb_per_s=0.85
)


@dataclass(frozen=True)
class SmallJob:
    """Describe a small training. Each feature has a table with `rows` rows and `pooling` ids per
    sample. skew: the first share x of the rows gets the share x^(1/skew) of the lookups.

    batch: samples per rank. model: fields of the model's config. sharding: the type of all tables;
    None: the planner chooses. calibration: a file from which the planner predicts steps, to choose
    the shortest one (planner.objective=step_time).
    """

    rows: list[int]
    pooling: list[int]
    dim: int
    batch: int
    skew: float = 3.0
    kind: str = "dlrm"
    model: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    sparse: str = "rowwise_adagrad"
    dense: str = "adam"
    sharding: str | None = None
    calibration: str | None = None

    @property
    def names(self) -> list[str]:
        return [f"cat_{index}" for index in range(len(self.rows))]

    def config(self, world_size: int, hardware: HardwareConfig = CPU_RANK) -> TrainJob:
        table = TableConfig(embedding_dim=self.dim)
        if self.sharding is not None:
            table.sharding = ConstraintConfig(sharding_types=[self.sharding])
        return TrainJob(
            name="calibration",
            run_dir="runs/calibration",
            world_size=world_size,
            data=DataConfig(name="calibration", path="datasets/calibration"),
            tables={"default": table},
            model=find("model", self.kind)(**self.model),
            optimizer=OptimizerConfig(
                SparseOptimizerConfig(name=self.sparse, lr=1e-3), DenseOptimizerConfig(name=self.dense)
            ),
            planner=PlannerConfig(
                plan_file="plan.json", timeout_s=PLAN_S, objective="step_time" if self.calibration else "critical_path"
            ),
            hardware=replace(hardware, calibration=self.calibration),
            trainer=TrainerConfig(
                global_batch_size=self.batch * world_size, precision=self.precision, log_every_steps=ENDLESS
            ),
        )

    def dataset(self) -> Dataset:
        features = []
        for name, rows, count in zip(self.names, self.rows, self.pooling, strict=True):
            ranks = np.unique(np.geomspace(1, rows, NUM_BANDS).astype(int)).tolist()
            shares = [(rank / rows) ** (1 / self.skew) for rank in ranks]
            features.append(SparseFeature(name, rows, count > 1, float(count), FrequencyCurve(ranks, shares)))
        dense = [f"int_{index}" for index in range(NUM_DENSE)]
        return Dataset(
            "calibration",
            "label",
            dense,
            features,
            {"train": Split([], ENDLESS, ENDLESS // 4)},
            ENDLESS,
            ENDLESS,
            0,
            "log1p",
        )

    def resolve(self, world_size: int, hardware: HardwareConfig = CPU_RANK) -> ResolvedJob:
        return resolve_job(self.config(world_size, hardware), self.dataset(), world_size)

    def request(self, world_size: int) -> tuple[ResolvedJob, PlanRequest]:
        """Return the PlanRequest of this job."""
        resolved = self.resolve(world_size)
        request = PlanRequest(
            resolved.plain_tables,
            build_task(resolved, "cpu"),
            make_sharders(resolved.job.comms, resolved.job.trainer.seed),
            resolve_hardware(resolved.job.hardware, world_size),
            TableOptimizer(self.sparse),
            self.batch,
        )
        return resolved, request

    def amounts(self, world_size: int, threads: int, placements: list[Placement]) -> dict[str, float]:
        """Return the amounts of work in a step, as a prediction counts them."""
        resolved, request = self.request(world_size)
        return step_request(resolved, request, None, threads).amounts(placements)


def small_jobs(draw: random.Random) -> Iterator[SmallJob]:
    """Generate jobs of all kinds. Their steps take some milliseconds."""
    while True:
        kind = draw.choice(("dlrm", "dlrm", "dlrm", "dlrm_dcn", "dcnv2", "deepfm", "wide_deep"))
        dim, count = draw.choice((8, 16, 16, 32, 64)), draw.choice((4, 8, 13, 20, 26))
        layers = _layers(draw)
        model: dict[str, Any] = {"hidden_layer_sizes": layers}
        if kind.startswith("dlrm"):
            model = {"dense_arch_layer_sizes": [*_layers(draw)[:2], dim], "over_arch_layer_sizes": [*layers, 1]}
        if kind == "dlrm_dcn":
            model |= {"dcn_num_layers": draw.choice((1, 2, 3)), "dcn_low_rank_dim": draw.choice((16, 64, 128))}
        pooling = [draw.choice((1, 2, 3, 8)) if draw.random() < 0.25 else 1 for _ in range(count)]
        rows = [int(2 ** draw.uniform(2, 17.5)) for _ in range(count)]
        yield SmallJob(
            rows=rows,
            pooling=pooling,
            dim=dim,
            batch=draw.choice((128, 256, 512, 1024, 2048)),
            skew=draw.choice((1.0, 2.0, 4.0)),
            kind=kind,
            model=model,
            precision=draw.choice(("fp32", "fp32", "bf16")),
            sparse=draw.choice(("rowwise_adagrad", "rowwise_adagrad", "adagrad", "adam", "sgd")),
            dense=draw.choice(("adam", "adam", "adagrad", "sgd")),
        )


def _layers(draw: random.Random) -> list[int]:
    first = draw.choice((32, 64, 128, 256, 512))
    return [max(16, first >> shift) for shift in range(draw.choice((1, 2, 3)))]


class InMemoryTraining:
    """Hold a small job that is ready to run steps.

    Collective: every rank builds it and runs the same steps.
    """

    def __init__(self, job: SmallJob, context: DistributedContext, by_cpu: bool = False) -> None:
        """by_cpu: measure CPU seconds of this process, which do not depend on other programs."""
        self.job, self._context, self._rate = job, context, "samples_per_cpu_s" if by_cpu else "samples_per_s"
        self.resolved = job.resolve(context.world_size)
        self.assembly: ShardedModel = build_sharded_model(self.resolved, context)
        config = self.resolved.job
        self._optimizer = build_optimizer(self.assembly.model, config.optimizer, config.model.l2)
        self._batches = draw_batches(job, context.rank)

    def run(self, rounds: int = ROUNDS, steps: int = STEPS) -> tuple[float, float]:
        """Return the median seconds of a step over the rounds, and their spread.

        Two rounds before, and the first step of each round, are not timed. If steps are long, a
        round has fewer than `steps`.
        """
        cold_s = self._round(MIN_STEPS)
        steps = self._steps_of(ROUND_S, self._round(self._steps_of(WARM_UP_S, cold_s, steps)), steps)
        return median_and_spread([self._round(steps) for _ in range(rounds)])

    def _steps_of(self, seconds: float, step_s: float, most: int) -> int:
        """Collective: return rank 0's number of steps for `seconds`."""
        steps = torch.tensor([max(min(MIN_STEPS, most), min(most, int(seconds / step_s)))])
        if self._context.world_size > 1:
            dist.broadcast(steps, 0)
        return int(steps)

    def _round(self, steps: int) -> float:
        """Run a round and return the seconds of a step."""
        job = self.resolved.job
        parts = TrainingParts(
            model=self.assembly.model,
            task=self.assembly.task,
            optimizer=self._optimizer,
            context=self._context,
            reader=BatchesInMemory(self._batches, self.job.batch, steps + 1),  # type: ignore[arg-type]
            checkpointer=NoCheckpoints(),  # type: ignore[arg-type]
        )
        result = Trainer(job, parts, build_hooks(job, parts)).fit()
        return job.trainer.global_batch_size / result.throughput[self._rate]


SHARDINGS = ("row_wise", "data_parallel", "column_wise")


def with_shardings(jobs: list[SmallJob]) -> list[SmallJob]:
    """Force one sharding type on the tables of every third job, so that each type is measured."""
    return [
        replace(job, sharding=SHARDINGS[index // 3 % len(SHARDINGS)]) if index % 3 == 2 else job
        for index, job in enumerate(jobs)
    ]


class TimedTrainings:
    """Time each job several times and keep the fastest time. Collective: every rank has one."""

    def __init__(self, context: DistributedContext, threads: int, by_cpu: bool) -> None:
        self._context, self._threads, self._by_cpu = context, threads, by_cpu
        self._times: dict[int, tuple[float, float]] = {}
        self._jobs: dict[int, tuple[SmallJob, list[Placement]]] = {}

    def run_one(self, job: SmallJob) -> None:
        InMemoryTraining(job, self._context, self._by_cpu)

    def time(self, number: int, job: SmallJob) -> None:
        """Time a job. Do nothing if its tables cannot be sharded as it says."""
        try:
            training = InMemoryTraining(job, self._context, self._by_cpu)
        except UserError:
            return
        took = training.run()
        self._times[number] = min(took, self._times.get(number, took))
        self._jobs[number] = job, placements_of(training.assembly.plan.plan)

    def timed_jobs(self, setup: str) -> dict[int, TimedJob]:
        """Return the times with each job's amounts of work, which are recorded now."""
        found = {}
        for number, (seconds, spread) in self._times.items():
            job, placements = self._jobs[number]
            amounts = job.amounts(self._context.world_size, self._threads, placements)
            rounded = {name: round(amount, 4) for name, amount in amounts.items()}
            found[number] = TimedJob(setup, round(1e6 * seconds, 2), round(spread, 4), rounded)
        return found


def draw_batches(job: SmallJob, rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.tensor(job.pooling, dtype=torch.int32).repeat_interleave(job.batch)
    batches = []
    for _ in range(NUM_BATCHES):
        ids = [
            (torch.rand(job.batch * count, generator=generator, dtype=torch.float64) ** job.skew * rows).long()
            for rows, count in zip(job.rows, job.pooling, strict=True)
        ]
        features = keyed_jagged_tensor(
            job.names, torch.cat(ids), lengths, job.batch, [job.batch * count for count in job.pooling]
        )
        labels = torch.randint(0, 2, (job.batch,), generator=generator).float()
        dense = torch.randn(job.batch, NUM_DENSE, generator=generator)
        batches.append(Batch(dense, features, labels, torch.ones(job.batch)))
    return batches


class BatchesInMemory:
    """Provide what Trainer needs of a ShardReader, with batches in memory."""

    stall_seconds = 0.0
    config = ReaderConfig()

    def __init__(self, batches: list[Batch], batch_size: int, num_steps: int) -> None:
        self._batches, self.batch_size, self.steps_per_epoch = batches, batch_size, num_steps
        self.num_rows = num_steps * batch_size

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        for step in range(start_step, self.steps_per_epoch):
            yield self._batches[step % len(self._batches)]


class NoCheckpoints:
    """Provide what Trainer needs of a Checkpointer."""

    asynchronous = False

    def check_free_space(self, num_saves: int) -> None: ...

    def save(self, step: int, values: dict[str, Any], files: dict[str, bytes] | None = None) -> str:
        return "nowhere"

    def wait(self) -> None: ...
