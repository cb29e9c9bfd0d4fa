"""Time the tables' kernels, lookups and updates, over rows, widths, ids, skew and optimizers, several tables at once."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from pipeline.config.optimizers import all_optimizers
from pipeline.planner.step_time.measurements import Number, median_and_spread
from pipeline.planner.step_time.table_work import TableSample
from pipeline.sharding.torchrec.cpu_tables import Bags, FastLookup, TablesWithMoments, speed_up_cpu_tables
from pipeline.training.calibration.clock import Bench, time_call

MOST_TABLE_BYTES = 128 << 20  # weights and states of one sample
FLUSHED_BYTES = 6 << 20  # what the dense layers pass through the caches between lookup and update
NUM_BATCHES = 12  # no batch comes twice, or caches would hold more than in training
WARM_UP = 4


def measure_tables(bench: Bench, seconds: float, seed: int) -> None:
    """About `seconds` in all, row-wise Adagrad a third of it."""
    names = [name for name, entry in all_optimizers().items() if entry.cpu_kernel is not None]
    shares = {name: 2.0 if name == "rowwise_adagrad" else 1.0 for name in names}
    for name in names:
        share, draw = 0.9 * seconds * shares[name] / sum(shares.values()), random.Random(f"{seed} {name}")
        for sample in bench.within(share, samples(draw, name), least=6):
            time_tables(bench, sample, name, draw.random() < 0.3)
    for sample in bench.within(0.1 * seconds, samples(random.Random(seed), "rowwise_adagrad"), least=2):
        _time_fbgemm(bench, sample)


def samples(draw: random.Random, optimizer: str) -> Iterator[TableSample]:
    entry = all_optimizers()[optimizer]
    while True:
        count, dim = draw.choice((1, 2, 4, 8, 16, 26)), draw.choice((4, 8, 16, 32, 64, 128))
        most = MOST_TABLE_BYTES / (4 * dim * (1 + entry.state_per_element)) / count
        rows = [max(2, int(2 ** draw.uniform(2, math.log2(max(8, min(most, 2e6)))))) for _ in range(count)]
        pooling = [draw.choice((1, 1, 1, 1, 2, 5, 20)) if draw.random() < 0.4 else 1 for _ in rows]
        batch = int(2 ** draw.uniform(6, 12.5))
        while batch * sum(pooling) * dim > 3e7:
            batch //= 2
        yield TableSample(rows, dim, pooling, max(batch, 16), draw.choice((1.0, 2.0, 3.0, 4.0, 6.0)))


def time_tables(bench: Bench, sample: TableSample, optimizer: str, in_bf16: bool) -> None:
    """Rows `lookup` and `update`; between two calls other memory passes through the caches, as the layers' does."""
    module = build_tables(sample, optimizer)
    if not speed_up_cpu_tables([module]):
        return
    lookup: FastLookup = module.forward  # type: ignore[assignment]
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    batches = [draw_ids(sample, seed) for seed in range(NUM_BATCHES)]
    gradient = torch.full((sample.batch, sample.dim * len(sample.rows)), 1e-4, dtype=dtype)
    passing = torch.zeros(FLUSHED_BYTES // 4)
    forward, backward = [], []
    bench.agree(True)
    for bags in (Bags(ids, offsets) for ids, offsets in batches):
        passing.add_(1)
        forward.append(_seconds(bench, lambda bags=bags: lookup.look_up(bags, dtype)))  # type: ignore[misc]
        passing.add_(1)
        gradient.add_(0)
        backward.append(_seconds(bench, lambda bags=bags: lookup.update(gradient, bags)))  # type: ignore[misc]
        lookup.num_steps += 1
    shape: dict[str, Number] = {
        "optimizer": optimizer, "number_bytes": 2 if in_bf16 else 4, "sample": json.dumps(asdict(sample)),
    }  # fmt: skip
    for kind, times in (("lookup", forward), ("update", backward)):
        seconds, spread = median_and_spread(times[WARM_UP:])
        bench.add(kind, shape, seconds, spread)


def _seconds(bench: Bench, call: Callable[[], object]) -> float:
    started = bench.clock()
    call()
    return bench.clock() - started


def _time_fbgemm(bench: Bench, sample: TableSample) -> None:
    """FBGEMM's own forward and backward, which run under sharding.fast_cpu=false."""
    module = build_tables(sample, "rowwise_adagrad")
    ids, offsets = draw_ids(sample, 0)
    shape: dict[str, Number] = {
        "optimizer": "rowwise_adagrad", "number_bytes": 4, "sample": json.dumps(asdict(sample)),
    }  # fmt: skip
    with torch.no_grad():
        bench.add("fbgemm_lookup", shape, *time_call(lambda: module(ids, offsets), 0.02, bench.clock))

    def step() -> None:
        module(ids, offsets).backward(gradient)

    gradient = torch.full((sample.batch, sample.dim * len(sample.rows)), 1e-4)
    bench.add("fbgemm_step", shape, *time_call(step, 0.02, bench.clock))


def build_tables(sample: TableSample, optimizer: str) -> SplitTableBatchedEmbeddingBagsCodegen:
    tables = TablesWithMoments(
        [(rows, sample.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in sample.rows],
        optimizer=EmbOptimType[all_optimizers()[optimizer].fbgemm],
        learning_rate=1e-3,
        eps=1e-6,
    )
    with torch.no_grad():
        for weights in tables.split_embedding_weights():
            weights.fill_(0.01)
        for states in (tables.momentum1_host, getattr(tables, "momentum2_host", torch.empty(0))):
            states.detach().zero_()  # else the first steps would wait for the kernel's pages
    return tables


def draw_ids(sample: TableSample, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and offsets of a batch."""
    generator = np.random.default_rng(seed)
    ids = [
        (generator.random(sample.batch * pooling) ** sample.skew * rows).astype(np.int64)
        for rows, pooling in zip(sample.rows, sample.pooling, strict=True)
    ]
    lengths = np.repeat(np.array(sample.pooling), sample.batch)
    return torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
