"""Generated histories as prepare would encode them, without files, and a model of theirs trained by Adam."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.model import ModelConfig
from pipeline.config.tables import InitConfig, TableConfig
from pipeline.data.dataset import Dataset, FrequencyCurve, SequenceFeature, SparseFeature, Split
from pipeline.data.quality import auc
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.embeddings.table import Table
from pipeline.embeddings.tables import resolve_tables
from pipeline.extras.generate.histories import Behaviour, make_interest, sample_behaviour
from pipeline.extras.generate.kinds import HistoriesConfig
from pipeline.models.build import build_model
from pipeline.models.tasks.task import TaskModel, make_task
from pipeline.sharding.torchrec.table_init import initialize_tables

ONE_HOT = ("item_id", "category")
SEQUENCES = {"history": "item_id", "history_category": "category", "history_dwell": None}
READ = {"sequences": list(SEQUENCES), "targets": ["item_id", "category"]}


@dataclass(frozen=True)
class Histories:
    config: HistoriesConfig
    rows: Behaviour
    categories: NDArray[np.int64]
    labels: NDArray[np.bool_]
    truth: NDArray[np.float64]

    def dataset(self) -> Dataset:
        config = self.config
        sizes = {
            "item_id": config.num_items + 1,
            "category": config.num_categories + 1,
            "history_dwell": config.num_dwells + 1,
        }
        features = [
            SparseFeature(name, sizes[name], False, 1.0, FrequencyCurve([sizes[name]], [1.0])) for name in ONE_HOT
        ]
        for name, shares in SEQUENCES.items():
            size = sizes[shares or name]
            about = SequenceFeature(config.max_length, "last", None if name == "history" else "history", shares)
            features.append(
                SparseFeature(name, size, True, config.max_length / 2, FrequencyCurve([size], [1.0]), sequence=about)
            )
        splits = {"train": Split([], len(self.labels), 1)}
        return Dataset("histories", "label", [], features, splits, len(self.labels), len(self.labels), 0, "none")

    def batch(self, chosen: slice | NDArray[np.int64]) -> Batch:
        """Ids count from 1, as of a vocabulary; keys in the data set's order."""
        targets, lengths, present = self.rows.targets[chosen], self.rows.lengths[chosen], self.rows.present[chosen]
        items, dwells = self.rows.items[chosen], self.rows.dwells[chosen]
        lists = [each[present] + 1 for each in (items, self.categories[items], dwells)]
        values = [targets + 1, self.categories[targets] + 1, *lists]
        ones = np.ones(len(targets), np.int32)
        all_lengths = np.concatenate([ones, ones, *([lengths.astype(np.int32)] * 3)])
        sparse = keyed_jagged_tensor(
            [*ONE_HOT, *SEQUENCES],
            torch.from_numpy(np.concatenate(values)),
            torch.from_numpy(all_lengths),
            len(targets),
            [len(each) for each in values],
        )
        labels = torch.from_numpy(self.labels[chosen].astype(np.float32))
        return Batch(torch.empty(len(targets), 0), sparse, labels, torch.ones(len(targets)))


def generate(config: HistoriesConfig) -> Histories:
    interest, random = make_interest(config), np.random.default_rng(7)
    rows = sample_behaviour(config, interest, random, config.num_rows)
    truth = interest.probabilities(rows)
    return Histories(config, rows, interest.categories, random.random(config.num_rows) < truth, truth)


def tables_of(
    config: ModelConfig, dataset: Dataset, dim: int = 8, pooling: str = "mean", scale: float = 0.1
) -> list[Table]:
    default = TableConfig(embedding_dim=dim, init=InitConfig("normal", scale), pooling=pooling)
    return resolve_tables({"default": default}, dataset, sequences=config.sequence_inputs)


def build_task(config: ModelConfig, tables: list[Table], seed: int = 0) -> TaskModel:
    """With its tables in memory, whole."""
    config.check_tables(tables, 0)
    task = make_task(config, build_model(config, tables, 0, seed=seed), tables)
    task.model.embedding_bag_collection.to_empty(device="cpu")
    for module in task.modules():
        if hasattr(module, "embedding_bags"):
            module.to_empty(device="cpu")
    initialize_tables(task, seed)
    return task


def share_of_lift(
    config: ModelConfig, found: Histories, *, batch: int = 512, epochs: int = 3, lr: float = 0.01, dim: int = 8
) -> float:
    """Trained on nine tenths of the rows: (AUC - 0.5) of the last tenth over that of the true probabilities."""
    tables = tables_of(config, found.dataset(), dim)
    task, split = build_task(config, tables), IdSplitter(tables)
    optimizer = torch.optim.Adam(task.parameters(), lr=lr)
    cut, random = len(found.labels) * 9 // 10, np.random.default_rng(0)

    def taken(chosen: slice | NDArray[np.int64]) -> Batch:
        rows = found.batch(chosen)
        rows.sparse_features = split(rows.sparse_features)
        return rows

    for _ in range(epochs):
        order = random.permutation(cut)
        for start in range(0, cut - batch + 1, batch):
            optimizer.zero_grad()
            loss, _ = task(taken(order[start : start + batch]))
            loss.backward()
            optimizer.step()
    task.eval()
    with torch.no_grad():
        _, prediction = task(taken(slice(cut, None)))
    labels = found.labels[cut:]
    best = auc(found.truth[cut:], labels)
    share = (auc(prediction.logits.numpy(), labels) - 0.5) / (best - 0.5)
    print(f"{config.kind}: {share:.4f} of the lift of {best:.4f}")
    return float(share)
