"""Build the two variants of benchmarks/step.py: TorchRec's loop as its documentation teaches it, and this trainer, on the same batches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from pipeline.cli.command_line import load_config
from pipeline.config.generated import SyntheticConfig
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import Dataset, FrequencyCurve, SparseFeature, Split
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.extras.calibration.jobs import BatchesInMemory, NoCheckpoints
from pipeline.planner.resolved_job import ResolvedJob, resolve_job
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training.compiled import DenseCompiler
from pipeline.training.hooks.base import TrainingParts, build_hooks
from pipeline.training.optimizer import build_optimizer
from pipeline.training.sharded_model import ShardedModel, build_sharded_model
from pipeline.training.trainer import Trainer

NUM_DENSE = 13
NUM_BATCHES = 24  # different ones, drawn before the clock starts; more than the caches hold
WARM_UP = 4


@dataclass(frozen=True)
class Timed:
    """`seconds_a_step` is of the timed steps; `num_steps` counts all that were run, the warm-up too."""

    seconds_a_step: float
    num_steps: int


KAGGLE = [
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
]  # fmt: skip
DLRMV2 = [
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    40000000, 40000000, 40000000, 590152, 12973, 108, 36,
]  # fmt: skip
MULTI_HOT = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]


@dataclass(frozen=True)
class Preset:
    """`ids_per_sample` [features]; row counts are capped so that tables, states and both sides fit one machine."""

    num_embeddings: list[int]
    dim: int
    dense_layers: list[int]
    over_layers: list[int]
    batch_size: int = 2048
    ids_per_sample: list[int] | None = None
    dcn: bool = False

    @property
    def pooling(self) -> list[int]:
        return self.ids_per_sample or [1] * len(self.num_embeddings)

    @property
    def names(self) -> list[str]:
        return [f"cat_{index}" for index in range(len(self.num_embeddings))]


def _capped(sizes: list[int], most: int) -> list[int]:
    return [min(size, most) for size in sizes]


PRESETS = {
    # conf/experiment/quickstart.yaml on its generated data; id 0 stands for unknown values.
    "quickstart": Preset([1 + size for size in SyntheticConfig().cardinalities], 16, [64, 32, 16], [64, 32, 1]),
    # The same layers over tables that no cache holds.
    "small_layers": Preset(_capped(KAGGLE, 200_000), 16, [64, 32, 16], [64, 32, 1]),
    # facebookresearch/dlrm, bench/dlrm_s_criteo_kaggle.sh, at the batch size of torchrec_dlrm's README.
    "kaggle_16": Preset(_capped(KAGGLE, 1_000_000), 16, [512, 256, 64, 16], [512, 256, 1]),
    "kaggle_64": Preset(_capped(KAGGLE, 500_000), 64, [512, 256, 64], [512, 512, 256, 1]),
    # MLPerf DLRMv2 with a smaller batch and rows.
    "dlrmv2": Preset(
        _capped(DLRMV2, 200_000), 128, [512, 256, 128], [1024, 1024, 512, 256, 1], 256, MULTI_HOT, dcn=True
    ),
    # For GPUs: all rows of Kaggle's data set, and batches that fill a GPU. Three sides of each fit 40 GB.
    "kaggle_full": Preset(KAGGLE, 64, [512, 256, 64], [512, 512, 256, 1], 16384),
    "dlrmv2_large": Preset(
        _capped(DLRMV2, 2_000_000), 128, [512, 256, 128], [1024, 1024, 512, 256, 1], 8192, MULTI_HOT, dcn=True
    ),
    "multi_hot": Preset(_capped(KAGGLE, 200_000), 32, [128, 64, 32], [256, 128, 1], 1024, MULTI_HOT),
}


@dataclass(frozen=True)
class RawBatch:
    dense: torch.Tensor  # [B, NUM_DENSE]
    ids: torch.Tensor  # [sum of pooling * B], a feature after the other
    labels: torch.Tensor  # [B] 0 or 1


def draw(preset: Preset, rank: int) -> list[RawBatch]:
    """Ids by a power law (the share of the first x of the rows is x^(1/4)): hot rows recur, as in click logs."""
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(NUM_BATCHES):
        ids = [
            (torch.rand(preset.batch_size * count, generator=generator) ** 4 * rows).long()
            for rows, count in zip(preset.num_embeddings, preset.pooling, strict=True)
        ]
        dense = torch.randn(preset.batch_size, NUM_DENSE, generator=generator)
        labels = torch.randint(0, 2, (preset.batch_size,), generator=generator)
        batches.append(RawBatch(dense, torch.cat(ids), labels))
    return batches


def _lengths(preset: Preset) -> torch.Tensor:
    return torch.tensor(preset.pooling, dtype=torch.int32).repeat_interleave(preset.batch_size)


def torchrec_loop(preset: Preset, raw: list[RawBatch], context: DistributedContext) -> Callable[[int], Timed]:
    """Train n steps after a warm-up: default planner and sharders, DMP, TrainPipelineSparseDist, fp32."""
    step = torchrec_side(preset, raw, context)[1]

    def run(num_steps: int) -> Timed:
        for _ in range(WARM_UP):
            step()
        wait_for(context.device)
        started = time.perf_counter()
        for _ in range(num_steps):
            step()
        wait_for(context.device)
        return Timed((time.perf_counter() - started) / num_steps, num_steps + WARM_UP)

    return run


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what was launched on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def torchrec_side(
    preset: Preset,
    raw: list[RawBatch],
    context: DistributedContext,
    sharding_types: list[str] | None = None,
) -> tuple[DistributedModelParallel, Callable[[], torch.Tensor]]:
    """Return the sharded model and a function that trains it on the next batch and returns the loss.

    With `sharding_types` the tables take them in turn. Without, TorchRec's planner may choose data_parallel,
    whose tables the loop of the documentation trains by the optimizer of the dense layers.
    """
    from torchrec.models.dlrm import DLRM_DCN
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    tables = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=preset.dim, feature_names=[name])
            for name, rows in zip(preset.names, preset.num_embeddings, strict=True)
        ],
    )
    kind, extra = (DLRM_DCN, {"dcn_num_layers": 3, "dcn_low_rank_dim": 512}) if preset.dcn else (DLRM, {})
    model = DLRMTrain(kind(tables, NUM_DENSE, preset.dense_layers, preset.over_layers, **extra))
    apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.02})
    plan = None
    if context.world_size > 1 or sharding_types:
        topology = Topology(
            world_size=context.world_size, local_world_size=context.local_world_size, compute_device=context.device.type
        )
        constraints = {
            f"t_{name}": ParameterConstraints(sharding_types=[kind])
            for name, kind in zip(preset.names, itertools.cycle(sharding_types or []), strict=False)
        }
        planner = EmbeddingShardingPlanner(topology, preset.batch_size, constraints=constraints or None)
        from torchrec.distributed.model_parallel import get_default_sharders

        plan = planner.collective_plan(model, get_default_sharders(), dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(model, device=context.device, plan=plan)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda weights: torch.optim.Adam(weights, lr=1e-3),
    )
    optimizer = CombinedOptimizer([sharded.fused_optimizer, dense])
    batches = [
        TorchRecBatch(one.dense, KeyedJaggedTensor(preset.names, one.ids, lengths=_lengths(preset)), one.labels)
        for one in raw
    ]
    if context.device.type == "cuda":  # as its DataLoader does
        batches = [batch.pin_memory() for batch in batches]
    sharded.train()
    train = TrainPipelineSparseDist(sharded, optimizer, context.device, execute_all_batches=True)
    endless = itertools.cycle(batches)

    def step() -> torch.Tensor:
        loss: torch.Tensor = train.progress(endless)[0]  # DLRMTrain's output: loss, logits, labels
        return loss

    return sharded, step


def our_loop(
    preset: Preset, raw: list[RawBatch], context: DistributedContext, overrides: list[str]
) -> Callable[[int], Timed]:
    """Train n steps with the product's own Trainer; metrics and log lines are in the time."""
    return our_side(preset, raw, context, overrides)[1]


def resolved_job(preset: Preset, device_type: str, world_size: int, overrides: list[str]) -> ResolvedJob:
    """Return the job of our side, over a data set of the preset's columns without files."""
    layers = [
        f"model.dense_arch_layer_sizes={preset.dense_layers}",
        f"model.over_arch_layer_sizes={preset.over_layers}",
    ]
    job = load_config(
        TrainJob,
        [
            "data=quickstart",
            f"model={'dlrm_dcn' if preset.dcn else 'dlrm'}",
            *layers,
            "name=step",
            f"hardware={'cpu' if device_type == 'cpu' else 'auto'}",
            f"world_size={world_size}",
            f"tables.default.embedding_dim={preset.dim}",
            f"trainer.global_batch_size={preset.batch_size * world_size}",
            *overrides,
        ],
    )
    features = [
        SparseFeature(name, rows, count > 1, float(count), FrequencyCurve([1, rows], [rows**-0.25, 1.0]))
        for name, rows, count in zip(preset.names, preset.num_embeddings, preset.pooling, strict=True)
    ]
    splits = {"train": Split([], 10**6, 10**5)}
    dataset = Dataset(
        "step", "label", [f"int_{i}" for i in range(NUM_DENSE)], features, splits, 10**6, 10**6, 0, "log1p"
    )
    return resolve_job(job, dataset, world_size)


def our_side(
    preset: Preset, raw: list[RawBatch], context: DistributedContext, overrides: list[str]
) -> tuple[ShardedModel, Callable[[int], Timed]]:
    """Return the sharded model, and a function that trains n steps after one step that is not timed."""
    resolved = resolved_job(preset, context.device.type, context.world_size, overrides)
    job = resolved.job
    assembly = build_sharded_model(resolved, context)
    if job.trainer.compile:
        DenseCompiler().compile(assembly.task.model)
    optimizer = build_optimizer(assembly.model, job.optimizer, job.model.l2)
    per_key = [count * preset.batch_size for count in preset.pooling]
    batches = [
        Batch(
            one.dense,
            keyed_jagged_tensor(preset.names, one.ids, _lengths(preset), preset.batch_size, per_key),
            one.labels.float(),
            torch.ones(preset.batch_size),
        )
        for one in raw
    ]
    if context.device.type == "cuda":  # as the reader does
        batches = [batch.pin_memory() for batch in batches]

    def run(num_steps: int) -> Timed:
        # The trainer's own rate leaves out the first step alone, which builds: the warm-up is a fit of its own.
        parts = TrainingParts(
            model=assembly.model,
            task=assembly.task,
            optimizer=optimizer,
            context=context,
            reader=BatchesInMemory(batches, preset.batch_size, num_steps + 1),
            checkpointer=NoCheckpoints(),
        )
        result = Trainer(job, parts, build_hooks(job, parts)).fit()
        return Timed(preset.batch_size * context.world_size / result.throughput["samples_per_s"], num_steps + 1)

    return assembly, run
