"""Certify a two-tower's artifact: its recall compared with the trained model, and its index
compared with exact search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.serving import RetrievalConfig
from pipeline.extras.models.tasks.item_rows import NO_ITEM
from pipeline.extras.models.tasks.retrieval_metrics import RetrievalMetrics, RetrievalPrediction
from pipeline.extras.retrieval.index import ItemIndex, Vectors, exact_search
from pipeline.extras.retrieval.tower import own_columns
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.serving.artifact.manifest import RetrievalParts
from pipeline.serving.artifact.reference import Sample, SampleBatch
from pipeline.serving.artifact.trained_step import TrainedStep
from pipeline.serving.scoring.dense_program import Program

SPLIT = "validation"
MAX_QUERIES = 1000  # users for which the index's answers are compared with exact search
CERTIFIED_K = 100
NUMBERS = ("recall_at_", "mrr")


@dataclass(frozen=True)
class Towers:
    """Compute the vectors of a sample's rows.

    `pooled` looks up the rows of a batch; each tower's program takes the columns of its tower.
    """

    trained: TrainedStep
    parts: RetrievalParts
    pooled: Callable[[SampleBatch], torch.Tensor]
    user: Program
    item: Program

    def of(self, batch: SampleBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the vectors of users and of items, [batch, dim] float32 each."""
        dims = dict(zip(self.trained.keys, self.trained.model_dims, strict=True))
        with torch.no_grad():
            rows = batch.rows(self.pooled)
            users = self.user(batch.dense, own_columns(rows, self.trained.keys, dims, self.parts.user_features))
            none = batch.dense[:, :0]
            items = self.item(none, own_columns(rows, self.trained.keys, dims, self.parts.item_features))
        return users.reshape(-1, self.parts.dim), items.reshape(-1, self.parts.dim)


@dataclass(frozen=True)
class Measured:
    """The results. `numbers`: the metrics of an evaluation.

    `users` [clicked, dim]: the users of rows with a click; `items` are the items that they clicked.

    `vectors` [rows, 2 dim]: the vectors of all rows that are not padding.
    """

    numbers: dict[str, float]
    users: Vectors
    wanted: NDArray[np.int64]
    vectors: Vectors


def measure(towers: Towers, sample: Sample, recall_at: Sequence[int]) -> Measured:
    metrics = RetrievalMetrics(DistributedContext(0, 1, 0, 1, torch.device("cpu"), "gloo"), list(recall_at))
    users, wanted, vectors = [], [], []
    number = [feature.name for feature in towers.trained.features].index(towers.parts.item_feature)
    for batch in sample.batches:
        of_users, of_items = towers.of(batch)
        ids = _first_ids(batch, number)
        labels, weights = batch.labels[:, 0].float(), batch.sample_weights[:, 0].float() * batch.real
        nothing = torch.zeros(len(labels))
        metrics.update(RetrievalPrediction(nothing.mean(), nothing, labels, weights, of_users, of_items, ids))
        clicked = (weights > 0) & (labels > 0)
        users.append(of_users[clicked])
        wanted.append(ids[clicked])
        vectors.append(torch.cat([of_users, of_items], dim=1)[batch.real])
    return Measured(metrics.compute(), torch.cat(users).numpy(), torch.cat(wanted).numpy(), torch.cat(vectors).numpy())


def _first_ids(batch: SampleBatch, number: int) -> torch.Tensor:
    """Return [batch]: the first id of the feature with that number, as
    models.tasks.retrieval.first_ids does; NO_ITEM if a row has no id.
    """
    size = len(batch.labels)
    ends = batch.offsets[number * size : (number + 1) * size + 1]
    if not len(batch.values):
        return torch.full((size,), NO_ITEM)
    return torch.where(ends.diff() > 0, batch.values[ends[:-1].clamp(max=len(batch.values) - 1)].long(), NO_ITEM)


def compare(model: Measured, artifact: Measured) -> dict[str, Any]:
    """Return the certificate of a split: the artifact's recall compared with the model's recall."""
    numbers = [name for name in model.numbers if name.startswith(NUMBERS)]
    far = np.abs(model.vectors - artifact.vectors)
    return {
        "rows": len(model.vectors),
        "num_clicked": int(model.numbers["num_clicked"]),
        "catalogue_items": int(model.numbers["catalogue_items"]),
        "model": {name: model.numbers[name] for name in numbers},
        "artifact": {name: artifact.numbers[name] for name in numbers},
        "max_vector_difference": float(far.max(initial=0.0)),
    }


def certify_index(
    index: ItemIndex, vectors: Vectors, ids: NDArray[np.int64], measured: Measured, recall_at: Sequence[int]
) -> dict[str, Any]:
    """Return the index's recall compared with exact search for validation users, and how often it
    finds the clicked item.

    vectors [num_items, dim] and ids [num_items], ascending, describe the items.
    """
    users, wanted = measured.users[:MAX_QUERIES], measured.wanted[:MAX_QUERIES]
    k = min(CERTIFIED_K, len(vectors))
    if not len(users):
        return {"queries": 0, "k": k, "recall": 1.0, "clicked": {}}
    most = min(max([k, *recall_at]), len(vectors))
    _, exact = exact_search(users, torch.from_numpy(vectors), k)
    _, found = index.search(users, most)
    hits = [len(np.intersect1d(a[:k], b)) for a, b in zip(found, exact, strict=True)]
    is_wanted = np.where(found >= 0, ids[found], NO_ITEM) == np.maximum(wanted, 1)[:, None]
    is_wanted &= wanted[:, None] > 0
    clicked = {f"recall_at_{number}": float(is_wanted[:, :number].any(axis=1).mean()) for number in recall_at}
    return {"queries": len(users), "k": k, "recall": sum(hits) / exact.size, "clicked": clicked}


def excesses(certificate: dict[str, Any], limits: RetrievalConfig) -> list[str]:
    """Return one line for each exceeded limit, with the measured value and the limit."""
    lines = []
    for split, about in certificate["splits"].items():
        for name, before in about["model"].items():
            fall = before - about["artifact"][name]
            if fall > limits.max_recall_decrease:
                lines.append(
                    f"{split}: {name} falls by {fall:.3g}, more than "
                    f"retrieval.max_recall_decrease={limits.max_recall_decrease:g}"
                )
    index = certificate["index"]
    if index["recall"] < limits.min_index_recall:
        lines.append(
            f"index {index['kind']} finds {index['recall']:.4f} of the {index['k']} best items, "
            f"less than retrieval.min_index_recall={limits.min_index_recall:g}: raise "
            "retrieval.search, retrieval.build_search or retrieval.neighbours, or set "
            "retrieval.index=exact"
        )
    return lines
