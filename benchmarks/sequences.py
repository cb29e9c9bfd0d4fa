"""Time a step of DIN beside the same model in plain TorchRec, its EmbeddingCollection and a loop as its documentation teaches:

python -m benchmarks.sequences [lengths=full|drawn] [steps=20] [ranks=1]

Both look up the same ids of items and categories, in tables that target and history share, 50 positions long, and train tables by
Adagrad and layers by Adam. `drawn`: lengths are even from 0 to 50. Ours takes the ids as the reader gives them: to split them by
position is in its time. Each side has processes of its own, ours with the allocator's settings that train makes; they take
turns, and the ratio is of their medians.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.tables import InitConfig, TableConfig
from pipeline.config.training import CommsConfig
from pipeline.data.dataset import Dataset, FrequencyCurve, SequenceFeature, SparseFeature, Split
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.devices.cpu.process import keep_freed_memory
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.embeddings.tables import resolve_tables
from pipeline.extras.models.din import DINConfig
from pipeline.models.build import build_model
from pipeline.models.tasks.task import make_task
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.sharding.torchrec.sharding import make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.training.optimizer import build_optimizer

LENGTH, DIM, BATCH = 50, 16, 512
ROWS = {"item_id": 200_000, "category": 2_000}
TARGET_OF = {"history": "item_id", "history_category": "category"}
LR = 0.01
NUM_BATCHES, WARM_UP = 8, 3
PLAIN, OURS = "plain TorchRec", "this pipeline"


@dataclass(frozen=True)
class Raw:
    """Ids of targets and histories, a feature after the other; lengths [BATCH] of the histories."""

    values: list[torch.Tensor]
    lengths: torch.Tensor
    labels: torch.Tensor

    @property
    def features(self) -> KeyedJaggedTensor:
        ones = torch.ones(BATCH, dtype=torch.int32)
        lengths = torch.cat([ones, ones, self.lengths, self.lengths])
        return keyed_jagged_tensor(
            [*ROWS, *TARGET_OF], torch.cat(self.values), lengths, BATCH, [len(each) for each in self.values]
        )


def draw(kind: str) -> list[Raw]:
    """Ids by a power law: hot rows recur."""
    generator, found = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(NUM_BATCHES):
        lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32)
        if kind == "drawn":
            lengths = torch.randint(0, LENGTH + 1, (BATCH,), generator=generator, dtype=torch.int32)
        total = int(lengths.sum())
        values = [
            (torch.rand(count, generator=generator) ** 4 * ROWS[name]).long()
            for count, name in [(BATCH, "item_id"), (BATCH, "category"), (total, "item_id"), (total, "category")]
        ]
        found.append(Raw(values, lengths, torch.randint(0, 2, (BATCH,), generator=generator).float()))
    return found


class PlainDice(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, eps=1e-8, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = torch.sigmoid(self.norm(x))
        return p * x + (1 - p) * self.alpha * x


def _layers(width: int, sizes: list[int]) -> nn.Sequential:
    modules: list[nn.Module] = []
    for size in sizes:
        modules += [nn.Linear(width, size), PlainDice(size)]
        width = size
    return nn.Sequential(*modules, nn.Linear(width, 1))


class PlainDIN(nn.Module):
    """As open implementations have it: jagged rows padded to [B, 50, D], and the target repeated beside each position."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(num_embeddings=rows, embedding_dim=DIM, name=name, feature_names=[name, history])
            for (name, rows), history in zip(ROWS.items(), TARGET_OF, strict=True)
        ]
        self.embedding_collection = EmbeddingCollection(tables=tables, device=torch.device("meta"))
        self.attention, self.over = _layers(8 * DIM, [80, 40]), _layers(4 * DIM, [200, 80])

    def forward(self, features: KeyedJaggedTensor, labels: torch.Tensor) -> torch.Tensor:
        found = self.embedding_collection(features)
        target = torch.cat([found[name].values() for name in ROWS], dim=1)
        rows = torch.cat([found[name].to_padded_dense(LENGTH) for name in TARGET_OF], dim=2)
        mask = torch.arange(LENGTH) < found["history"].lengths().unsqueeze(1)
        query = target.unsqueeze(1).expand_as(rows)
        weights = self.attention(torch.cat([query, rows, query - rows, query * rows], dim=2).flatten(0, 1))
        weights = weights.view(-1, 1, LENGTH) * mask.unsqueeze(1)
        logits = self.over(torch.cat([target, (weights @ rows).squeeze(1)], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, labels)


def plain_steps(raw: list[Raw], context: DistributedContext) -> Callable[[int], float]:
    model = PlainDIN()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.embedding_collection.parameters(), {"lr": LR, "eps": 1e-8})
    planner = EmbeddingShardingPlanner(
        topology=Topology(context.world_size, "cpu", local_world_size=context.world_size)
    )
    sharders = [EmbeddingCollectionSharder()]
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())), lambda weights: torch.optim.Adam(weights, lr=LR)
    )
    optimizer = CombinedOptimizer([sharded.fused_optimizer, dense])

    def run(step: int) -> float:
        one = raw[step % len(raw)]
        optimizer.zero_grad()
        loss: torch.Tensor = sharded(one.features, one.labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return run


def our_dataset() -> Dataset:
    features = [SparseFeature(name, rows, False, 1.0, FrequencyCurve([rows], [1.0])) for name, rows in ROWS.items()]
    for name, target in TARGET_OF.items():
        about = SequenceFeature(LENGTH, "last", None if name == "history" else "history", target)
        curve = FrequencyCurve([ROWS[target]], [1.0])
        features.append(SparseFeature(name, ROWS[target], True, float(LENGTH), curve, sequence=about))
    return Dataset("drawn", "label", [], features, {"train": Split([], 1, 1)}, 1, 1, 0, "none")


def our_steps(raw: list[Raw], context: DistributedContext) -> Callable[[int], float]:
    config = DINConfig(sequences=list(TARGET_OF), targets=list(ROWS))
    tables = resolve_tables(
        {"default": TableConfig(embedding_dim=DIM, init=InitConfig("uniform"))},
        our_dataset(),
        sequences=config.sequence_inputs,
    )
    optimizers = OptimizerConfig(SparseOptimizerConfig("adagrad", lr=LR), DenseOptimizerConfig("adam", lr=LR))
    task = make_task(config, build_model(config, tables, 0), tables)
    apply_sparse_optimizer(task, optimizers.sparse)
    planner = EmbeddingShardingPlanner(
        topology=Topology(context.world_size, "cpu", local_world_size=context.world_size)
    )
    plan = planner.collective_plan(task, make_sharders(CommsConfig()), dist.GroupMember.WORLD)
    model = shard_model(task, plan, CommsConfig(), context)
    optimizer, split = build_optimizer(model, optimizers), IdSplitter(tables)
    model.train()

    def run(step: int) -> float:
        one = raw[step % len(raw)]
        batch = Batch(torch.empty(BATCH, 0), split(one.features), one.labels, torch.ones(BATCH))
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return run


def run_side(rank: int, ranks: int, side: str, kind: str, store: str, pipe: Connection) -> None:
    """On one rank of one side: as many steps as the pipe asks for, answered with the seconds of each, until it asks for 0."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    if side == OURS:
        keep_freed_memory(ranks)  # as train does
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    context = DistributedContext(rank, ranks, rank, ranks, torch.device("cpu"), "gloo")
    raw = draw(kind)
    run = our_steps(raw, context) if side == OURS else plain_steps(raw, context)
    for step in range(WARM_UP):
        run(step)
    pipe.send([])
    while steps := pipe.recv():
        seconds = []
        for step in range(steps):
            started = time.perf_counter()
            run(step)
            seconds.append(time.perf_counter() - started)
        pipe.send(seconds)
    dist.destroy_process_group()


def measure(kind: str, num_steps: int, ranks: int) -> dict[str, float]:
    """Median seconds a step of each side, which take turns of two steps."""
    spawn, pipes = multiprocessing.get_context("spawn"), {}
    seconds: dict[str, list[float]] = {PLAIN: [], OURS: []}
    with tempfile.TemporaryDirectory() as folder:
        for number, side in enumerate(seconds):
            pairs = [spawn.Pipe() for _ in range(ranks)]
            for rank, (_, far) in enumerate(pairs):
                arguments = (rank, ranks, side, kind, f"{folder}/{number}", far)
                spawn.Process(target=run_side, args=arguments, daemon=True).start()
            pipes[side] = [near for near, _ in pairs]
        for side in seconds:
            assert all(near.recv() == [] for near in pipes[side])
        for _ in range(num_steps // 2):
            for side, nears in pipes.items():
                for near in nears:
                    near.send(2)
                answers = [near.recv() for near in nears]
                seconds[side] += answers[0]
        for near in (near for nears in pipes.values() for near in nears):
            near.send(0)
    return {side: statistics.median(each) for side, each in seconds.items()}


def main(words: list[str]) -> None:
    given = {"lengths": "full", "steps": "20", "ranks": "1"} | dict(word.split("=", 1) for word in words)
    kind, steps, ranks = given["lengths"], int(given["steps"]), int(given["ranks"])
    medians = measure(kind, steps, ranks)
    for side, each in medians.items():
        print(f"{side:16} {1000 * each:8.1f} ms a step of {BATCH} rows a rank, {kind} histories of {LENGTH}")
    print(f"ratio {medians[PLAIN] / medians[OURS]:.2f} on {ranks} rank(s), {steps} steps each")


if __name__ == "__main__":
    main(sys.argv[1:])
