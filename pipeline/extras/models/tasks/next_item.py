"""Train models that predict the next item of a sequence, by a softmax for each position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.registry import register
from pipeline.data.read.batch import Batch
from pipeline.embeddings.table import Table, position_features
from pipeline.extras.models.next_items import NextItemConfig
from pipeline.extras.models.tasks.retrieval import (
    NO_ITEM,
    RetrievalTask,
    first_ids,
    gather_rows,
    hardest_cross_entropy,
    own_rank,
)
from pipeline.extras.models.tasks.retrieval_metrics import RetrievalPrediction


@register("task", "next_item")
class NextItemTask(RetrievalTask):
    """Compute for each position of a positive row the softmax cross-entropy of the next item among
    the items of the global batch, or of the corpus. A row's loss is the sum over its positions.

    Items of the same row are not negatives, because the user chose them too.
    """

    def __init__(self, config: NextItemConfig, tables: list[Table]) -> None:
        super().__init__(config, tables)
        positions = next(each for table in tables for each in table.positions if each.feature == config.history)
        self._positions = position_features(positions)
        self._every_position, self._exclude_history = config.every_position, config.exclude_history

    def forward(self, vectors: tuple[torch.Tensor, ...], batch: Batch) -> tuple[torch.Tensor, RetrievalPrediction]:
        """vectors: see NextItem. Collective in training mode."""
        users, items, sampled = (part.float() for part in vectors)
        labels, weights = batch.labels, batch.sample_weights
        history = ids_by_position(batch.sparse_features, self._positions)[: len(labels)]
        wanted = first_ids(batch.sparse_features, self._item_feature)
        wanted, sampled_ids = wanted.split([len(labels), len(sampled)])
        count = (history != NO_ITEM).sum(dim=1, keepdim=True)
        losses, seen = torch.zeros_like(labels), history if self._exclude_history else None
        if self.training:
            ids = F.pad(history, (0, 1), value=NO_ITEM).scatter(1, count, wanted[:, None])
            is_read = ids != NO_ITEM
            if not self._every_position:
                is_read = torch.arange(ids.shape[1], device=ids.device) == count
            ids = ids.masked_fill((weights[:, None] == 0) | ~is_read, NO_ITEM)
            negatives = self._negatives(items, ids, sampled, sampled_ids)
            losses = self._of_rows(users, items, ids, (labels * weights)[:, None] * is_read, negatives)
            users = users[:, 0]
        loss, own = losses.mean(), items[torch.arange(len(count), device=count.device), count[:, 0]]
        users, items, own = users.detach(), items.detach(), own.detach()
        further = (history, items[:, :-1])
        return loss, RetrievalPrediction(
            loss.detach(), losses.detach(), labels, weights, users, own, wanted, further, seen
        )

    def _negatives(
        self, items: torch.Tensor, ids: torch.Tensor, sampled: torch.Tensor, sampled_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Collective: return the vectors [N, D] of all ranks' candidates, their ids [N], and the numbers of
        their rows in the global batch [N]; NO_ITEM for sampled items.
        """
        rows = torch.full_like(sampled_ids, NO_ITEM)
        if self._kind != "corpus":
            own = torch.arange(len(ids), device=ids.device) + own_rank() * len(ids)
            rows = torch.cat([own.repeat_interleave(ids.shape[1]), rows])
            sampled, sampled_ids = torch.cat([items.flatten(0, 1), sampled]), torch.cat([ids.flatten(), sampled_ids])
        vectors, of_vectors, rows = gather_rows(sampled), gather_rows(sampled_ids), gather_rows(rows)
        kept = torch.nonzero(of_vectors != NO_ITEM).flatten()  # most positions are padding
        return vectors[kept], of_vectors[kept], rows[kept]

    def _of_rows(
        self,
        users: torch.Tensor,
        items: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        negatives: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return the losses of rows [B].

        users and items: [B, L, D]. ids: [B, L] of the items. weights: [B, L] of the losses.
        """
        candidates, candidate_ids, candidate_rows = negatives
        at = torch.nonzero(weights.flatten() != 0).flatten()
        wanted, rows = ids.flatten()[at], at // ids.shape[1]
        of_users = users.flatten(0, 1)[at] / self._temperature
        scores = of_users @ candidates.T
        positives = (of_users * items.flatten(0, 1)[at]).sum(dim=1, keepdim=True)
        if self._correction is not None and self._kind == "in_batch":
            scores, positives = scores - self._correction(candidate_ids), positives - self._correction(wanted)[:, None]
        elif self._correction is not None:
            scores = scores - self._correction(candidate_ids, torch.tensor(len(candidate_ids) - 1))
        hidden = (candidate_ids == wanted[:, None]) | (candidate_rows == rows[:, None] + own_rank() * len(ids))
        scores = torch.cat([positives, scores.masked_fill(hidden, float("-inf"))], dim=1)
        first = torch.zeros_like(at)
        if self._hard_negatives is None:
            losses = F.cross_entropy(scores, first, reduction="none")
        else:
            losses = hardest_cross_entropy(scores, first, self._hard_negatives)
        return losses.new_zeros(len(ids)).index_add(0, rows, losses * weights.flatten()[at])


def ids_by_position(sparse_features: KeyedJaggedTensor, names: list[str]) -> torch.Tensor:
    """Return [B, positions] int64: the id at each position, or NO_ITEM. `names` are adjacent keys with
    at most one id in a row.
    """
    keys, offsets = sparse_features.keys(), sparse_features.offset_per_key()
    first = keys.index(names[0])
    end = first + len(names)
    assert keys[first:end] == names
    present = sparse_features.lengths().view(len(keys), -1)[first:end] > 0
    ids = torch.full(present.shape, NO_ITEM, dtype=torch.int64, device=present.device)
    return ids.masked_scatter(present, sparse_features.values()[offsets[first] : offsets[end]].long()).T
