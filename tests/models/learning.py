"""Train a model in one process on rows drawn in memory, and say how well it ranks rows that it has not seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.config.generated import SyntheticConfig
from pipeline.config.model import ModelConfig
from pipeline.config.tables import InitConfig, TableConfig
from pipeline.data.dataset import Dataset, FrequencyCurve, SparseFeature, Split
from pipeline.data.generate.synthetic import make_teacher, prepared_dense, sample_features, sigmoid
from pipeline.data.quality import auc
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.data.targets import Target
from pipeline.embeddings.tables import resolve_tables
from pipeline.extras.generate.conversions import make_funnel, sample_labels
from pipeline.extras.generate.kinds import ConversionsConfig, UserItemConfig
from pipeline.extras.generate.user_item import make_taste, sample_pairs
from pipeline.models.build import build_model
from pipeline.models.tasks.task import make_task
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.sharding.torchrec.table_init import initialize_tables

ALONE = DistributedContext(0, 1, 0, 1, torch.device("cpu"), "gloo")
BATCH = 1024


@dataclass(frozen=True)
class Rows:
    """dense [rows, num_dense], ids {feature: [rows]} from 1, labels and true probabilities [rows].

    Of a click and a conversion, which counts where there was a click, both are [rows, 2].
    """

    dense: np.ndarray
    ids: dict[str, np.ndarray]
    labels: np.ndarray
    truth: np.ndarray

    def part(self, rows: slice) -> Rows:
        return Rows(
            self.dense[rows], {name: ids[rows] for name, ids in self.ids.items()}, self.labels[rows], self.truth[rows]
        )

    def batch(self, rows: slice | np.ndarray) -> Batch:
        ids = torch.from_numpy(np.stack([ids[rows] for ids in self.ids.values()]))
        count = ids.shape[1]
        features = keyed_jagged_tensor(
            list(self.ids), ids.reshape(-1), torch.ones(ids.numel()), count, [count] * len(self.ids)
        )
        dense, labels = torch.from_numpy(self.dense[rows]).float(), torch.from_numpy(self.labels[rows]).float()
        if labels.dim() == 1:
            return Batch(dense, features, labels, torch.ones(count))
        weights = torch.stack([torch.ones(count), labels[:, 0]], dim=1)
        return Batch(dense, features, labels, weights, present=torch.ones(count, dtype=torch.bool))

    def dataset(self) -> Dataset:
        """As `prepare` would describe them; ids are given by descending frequency."""
        features = [_feature(name, ids) for name, ids in self.ids.items()]
        splits = {"train": Split([], len(self.labels), int(self.labels.sum()))}
        dense = [f"int_{index}" for index in range(self.dense.shape[1])]
        return Dataset("drawn", "label", dense, features, splits, len(self.labels), len(self.labels), 0, "none")


def _feature(name: str, ids: np.ndarray) -> SparseFeature:
    shares = np.cumsum(np.sort(np.bincount(ids)[1:])[::-1]) / len(ids)
    ranks = sorted({*(2**power for power in range(20) if 2**power < len(shares)), len(shares)})
    curve = FrequencyCurve(ranks, [float(shares[rank - 1]) for rank in ranks])
    return SparseFeature(name, int(ids.max()) + 1, False, 1.0, curve)


def by_frequency(ids: np.ndarray) -> np.ndarray:
    """The same ids, named anew: 1 is the most frequent."""
    _, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    names = np.empty(len(counts), dtype=np.int64)
    names[np.argsort(-counts, kind="stable")] = np.arange(1, len(counts) + 1)
    return names[inverse]


def user_item_rows(config: UserItemConfig) -> Rows:
    taste, random = make_taste(config), np.random.default_rng(7)
    users, items = sample_pairs(config, random, config.num_rows)
    truth = taste.probabilities(users, items)
    columns = {
        "user_id": users,
        "user_group": taste.user_groups[users],
        "item_id": items,
        "item_genre": taste.item_genres[items],
    }
    ids = {name: by_frequency(column) for name, column in columns.items()}
    return Rows(np.zeros((len(users), 0)), ids, random.random(len(users)) < truth, truth)


def conversion_rows(config: ConversionsConfig) -> Rows:
    """Without conversions where there was no click."""
    funnel, random = make_funnel(config), np.random.default_rng(7)
    drawn = funnel.sample(config, random, config.num_rows)
    truth = funnel.probabilities(drawn)
    columns = {
        "user_id": drawn.users,
        "user_group": drawn.groups,
        "item_id": drawn.items,
        "item_category": drawn.categories,
    }
    ids = {name: by_frequency(column) for name, column in columns.items()}
    return Rows(np.zeros((config.num_rows, 0)), ids, sample_labels(random, truth), truth)


def click_rows(config: SyntheticConfig) -> Rows:
    random = np.random.default_rng(7)
    counts, missing, ids = sample_features(config, random, config.num_rows)
    dense = prepared_dense(counts, missing)
    truth = sigmoid(make_teacher(config).logits(dense, ids))
    columns = {f"cat_{index}": by_frequency(column) for index, column in enumerate(ids)}
    return Rows(dense, columns, random.random(config.num_rows) < truth, truth)


def fit(
    config: ModelConfig,
    rows: Rows,
    *,
    dim: int = 8,
    epochs: int = 3,
    lr: float = 0.02,
    scale: float = 0.1,
    seed: int = 0,
    targets: list[Target] | None = None,
) -> torch.nn.Module:
    """The trained task, by Adam on everything."""
    default = TableConfig(embedding_dim=dim, init=InitConfig("normal", scale))
    dataset = rows.dataset()
    tables = resolve_tables({"default": default}, dataset)
    config.check_tables(tables, len(dataset.dense_features))
    model = build_model(config, tables, len(dataset.dense_features), seed=seed, targets=targets)
    task = make_task(config, model, tables, targets)
    task.model.embedding_bag_collection.to_empty(device="cpu")
    initialize_tables(task, seed)
    optimizer = torch.optim.Adam(task.parameters(), lr=lr)
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        order = random.permutation(len(rows.labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            optimizer.zero_grad()
            loss, _ = task(rows.batch(order[start : start + BATCH]))
            loss.backward()
            optimizer.step()
    return task.eval()


def share_of_lift(config: ModelConfig, rows: Rows, **settings: float) -> float:
    """Trained on nine tenths of the rows: (AUC - 0.5) of the last tenth over that of the true probabilities."""
    cut = len(rows.labels) * 9 // 10
    held_out = rows.part(slice(cut, None))
    task = fit(config, rows.part(slice(cut)), **settings)
    with torch.no_grad():
        _, prediction = task(held_out.batch(slice(None)))
    best = auc(held_out.truth, held_out.labels)
    share = (auc(prediction.logits.numpy(), held_out.labels) - 0.5) / (best - 0.5)
    print(f"{config.kind} {getattr(config, 'variant', '')}: {share:.3f} of the lift of {best:.4f}")
    return share
