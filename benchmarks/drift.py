"""Measure what fresher models are worth on data that drift: NE of a model that is minutes, an hour or a day old:

    python -m benchmarks.drift [--days 3] [--turn 0.3] [--churn 0.5] [--rows 4096] [--seeds 3]

The quickstart's generator makes a window of 5 minutes after the other, 288 a day. In a day its teacher turns by `--turn` radians,
and `--churn` of the values of features with 300 and more are replaced by new ones. One DLRM trains on every window once. Before
it does, the window is scored by what would serve: the model as it was at the last 5 minutes, hour, and day. The first
day is not counted. Ids are hashes of values, as where new values come without end.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.differential import job_of
from pipeline.checkpoint.tables import flatten, local_chunks
from pipeline.config.generated import SyntheticConfig
from pipeline.data.dataset import Dataset, FrequencyCurve, SparseFeature, Split
from pipeline.data.generate.drift import renewed, rotated_effects, rotated_vectors
from pipeline.data.generate.synthetic import make_teacher, prepared_dense, sample_features, sigmoid
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.devices.process_group import init_distributed
from pipeline.planner.resolved_job import resolve_job
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training.optimizer import build_optimizer
from pipeline.training.sharded_model import ShardedModel, build_sharded_model

A_DAY, AN_HOUR, BATCH = 288, 12, 2048
AGES = {"5 minutes": 1, "an hour": AN_HOUR, "a day": A_DAY}
SPARE = 4  # rows of a table for each value that is in use: new ones come, and old ones stay a while


def windows(
    config: SyntheticConfig, count: int, num_rows: int
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]]:
    """dense [rows, num_dense], ids [num_sparse, rows], labels [rows] of windows 1, 2, ..."""
    first = make_teacher(config)
    for number in range(1, count + 1):
        now = replace(config, window=number)
        teacher = replace(
            first, id_effects=rotated_effects(now, first.id_effects), id_vectors=rotated_vectors(now, first.id_vectors)
        )
        random = np.random.default_rng([config.seed, 9, number])
        counts, missing, ranks = sample_features(now, random, num_rows)
        dense = prepared_dense(counts, missing)
        labels = random.random(num_rows) < sigmoid(teacher.logits(dense, ranks))
        ids = np.stack(
            [_hashed(renewed(now, feature, ranks[feature]), size) for feature, size in enumerate(config.cardinalities)]
        )
        yield dense.astype(np.float32), ids, labels.astype(np.float32)


def _hashed(values: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    if size < 300:
        return values
    return np.where(values > 0, 1 + (values * 0x9E3779B1 & 0xFFFFFFFF) % (SPARE * size), 0)


def rows_of(size: int) -> int:
    return 1 + (size if size < 300 else SPARE * size)


def batches(window: tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]) -> Iterator[Batch]:
    dense, ids, labels = window
    names = [f"cat_{index}" for index in range(len(ids))]
    for begin in range(0, len(labels), BATCH):
        rows = slice(begin, begin + BATCH)
        count = len(labels[rows])
        values = torch.from_numpy(ids[:, rows].reshape(-1))
        lengths = torch.ones(len(values), dtype=torch.int32)
        features = keyed_jagged_tensor(names, values, lengths, count, [count] * len(names))
        yield Batch(torch.from_numpy(dense[rows]), features, torch.from_numpy(labels[rows]), torch.ones(count))


def make_model(config: SyntheticConfig, seed: int, context: DistributedContext) -> ShardedModel:
    features = [
        SparseFeature(
            f"cat_{index}", rows_of(size), False, 1.0, FrequencyCurve([1, rows_of(size)], [rows_of(size) ** -0.25, 1.0])
        )
        for index, size in enumerate(config.cardinalities)
    ]
    dense = [f"int_{index}" for index in range(config.num_dense)]
    dataset = Dataset("drift", "label", dense, features, {"train": Split([], 10**6, 10**5)}, 10**6, 10**6, 0, "log1p")
    return build_sharded_model(
        resolve_job(replace(job_of(None), trainer=replace(job_of(None).trainer, seed=seed)), dataset, 1), context
    )


def copy_state(source: ShardedModel, target: ShardedModel) -> None:
    theirs, ours = (flatten(one.model.state_dict()) for one in (source, target))
    with torch.no_grad():
        for key, value in ours.items():
            for (part, _), (now, _) in zip(local_chunks(value), local_chunks(theirs[key]), strict=True):
                part.copy_(now)


def losses(assembly: ShardedModel, window: tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]) -> float:
    """The sum of the log losses of its rows."""
    assembly.model.eval()
    with torch.no_grad():
        return sum(float(assembly.model(batch)[0]) * batch.batch_size for batch in batches(window))


def run(config: SyntheticConfig, days: int, num_rows: int, seed: int, context: DistributedContext) -> dict[str, float]:
    """NE of each age over all windows behind the first day."""
    job = job_of(None)
    trained = make_model(config, seed, context)
    optimizer = build_optimizer(trained.model, job.optimizer, job.model.l2)
    served = {name: make_model(config, seed, context) for name in AGES}
    totals, clicks, rows = dict.fromkeys(AGES, 0.0), 0.0, 0
    for number, window in enumerate(windows(config, days * A_DAY, num_rows)):
        for name, age in AGES.items():
            if number % age == 0:
                copy_state(trained, served[name])
        if number >= A_DAY:
            for name, model in served.items():
                totals[name] += losses(model, window)
            clicks, rows = clicks + float(window[2].sum()), rows + num_rows
        trained.model.train()
        for batch in batches(window):
            optimizer.zero_grad()
            loss, _ = trained.model(batch)
            loss.backward()
            optimizer.step()
    rate = clicks / rows
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return {name: total / rows / float(entropy) for name, total in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=3)
    parser.add_argument("--turn", type=float, default=0.3)
    parser.add_argument("--churn", type=float, default=0.5)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    context = init_distributed()
    found = []
    for seed in range(options.seeds):
        config = SyntheticConfig(drift=options.turn / A_DAY, churn=options.churn / A_DAY, seed=seed)
        found.append(run(config, options.days, options.rows, seed, context))
    for name in AGES:
        mean = statistics.mean(one[name] for one in found)
        worse = [100 * (one[name] / one["5 minutes"] - 1) for one in found]
        print(
            f"{name:<10} old  NE {mean:.5f}  {statistics.mean(worse):+.3f} % ({min(worse):+.3f} .. {max(worse):+.3f} over {len(found)} seeds)"
        )


if __name__ == "__main__":
    main()
