"""Train item retrieval: each clicked row's item against the items of the global batch, or items
sampled from the corpus (extras/models/tasks/negatives.py). Measure recall@k, NDCG@k and MRR.

Negatives come from all ranks, so that a step is the same for any number of ranks: item vectors are
gathered, and their gradients are summed and returned to their ranks. With a batch of 8192 and
vectors of 32 columns that is 1 MiB per rank and step.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.registry import register
from pipeline.data.read.batch import Batch, ExtraRows
from pipeline.devices.cpu.host_exchange import all_gather, num_exchanging_ranks, reduce_scatter
from pipeline.embeddings.table import Table
from pipeline.extras.models.negatives import corpus_of
from pipeline.extras.models.next_items import NextItemConfig
from pipeline.extras.models.tasks.item_rows import NO_ITEM
from pipeline.extras.models.tasks.negatives import ExpectedCount, LogFrequency, sampled_rows
from pipeline.extras.models.tasks.retrieval_metrics import (
    SCORES_AT_ONCE,
    RetrievalLossWindow,
    RetrievalMetrics,
    RetrievalPrediction,
)
from pipeline.extras.models.user_item import TwoTowerConfig
from pipeline.models.tasks.task import Measure
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.runtime.process.distributed import DistributedContext


@register("task", "retrieval")
class RetrievalTask(nn.Module):
    """Compute the softmax cross-entropy of each positive row's item among the items of the global
    batch (Yi et al., RecSys 2019, section 3), or an estimate of it among all items from sampled
    items (model.negatives).

    A candidate with the same item as the row is not a negative. Items of rows with weight 0 are not
    candidates.
    """

    no_export = ""
    exports = "towers"

    @staticmethod
    def extra_rows(resolved: ResolvedJob, rank: int) -> ExtraRows | None:
        config = cast("TwoTowerConfig | NextItemConfig", resolved.job.model)
        return sampled_rows(config.negatives, config.item_features, resolved, rank)

    def __init__(self, config: TwoTowerConfig | NextItemConfig, tables: list[Table]) -> None:
        super().__init__()
        self._item_feature, self._temperature = config.item_features[0], config.temperature
        self._recall_at, self._hard_negatives = list(config.recall_at), config.hard_negatives
        self._kind, self._num_hard = config.negatives.kind, config.negatives.hard.count
        # vectors of all items [num_items, D], without gradient (extras/models/tasks/item_index.py)
        self.item_index: torch.Tensor | None = None
        self._correction: nn.Module | None = None
        if config.log_q_correction and self._kind == "in_batch":
            self._correction = LogFrequency(corpus_of(self._item_feature, tables, "model.log_q_correction"))
        elif config.log_q_correction:
            self._correction = ExpectedCount(config.negatives, self._item_feature, tables)

    def forward(
        self, vectors: tuple[torch.Tensor, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, RetrievalPrediction]:
        """vectors: users [B, D], and items [B + sampled items, D]. Collective in training mode.

        In evaluation the loss is 0, because the negatives of a batch do not represent all items.
        """
        users, items = (part.float() for part in vectors)
        labels, sample_weights = batch.labels, batch.sample_weights
        ids = first_ids(batch.sparse_features, self._item_feature)
        losses = torch.zeros_like(labels)
        if self.training:
            weights = labels * sample_weights
            # Rows without a click have no loss. A NaN weight is kept, so that the guard against NaN
            # sees it.
            rows = torch.nonzero(weights != 0).flatten()
            clicked = self._losses(users, items, ids, sample_weights, rows) * weights[rows]
            losses = losses.index_put((rows,), clicked)
        loss, own = losses.mean(), slice(len(users))
        return loss, RetrievalPrediction(
            loss.detach(), losses.detach(), labels, sample_weights, users.detach(), items.detach()[own], ids[own]
        )

    def losses(self, prediction: RetrievalPrediction) -> torch.Tensor:
        """Return the loss of each row [B]."""
        return prediction.losses

    def training_measure(self, context: DistributedContext, batch_size: int, window_samples: int) -> Measure:
        return RetrievalLossWindow(context)

    def evaluation_measure(self, context: DistributedContext, batch_size: int) -> Measure:
        return RetrievalMetrics(context, self._recall_at)

    def _losses(
        self,
        users: torch.Tensor,
        items: torch.Tensor,
        ids: torch.Tensor,
        sample_weights: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Collective: return the losses [P] of `rows` [P] of this rank's batch."""
        users = users[rows] / self._temperature
        rest = (ids, sample_weights, rows)
        if self._kind == "in_batch":
            return self._softmax(*self._in_batch(users, items, *rest))
        if self.item_index is None:
            return self._softmax(*self._sampled(users, items, *rest))
        # The vectors of hard negatives are constants. An item that is always a hard negative would
        # never be moved away from a user, so items get the gradient of the estimate without them.
        of_users = self._softmax(*self._sampled(users, items.detach(), *rest, self.item_index))
        of_items = self._softmax(*self._sampled(users.detach(), items, *rest))
        return of_users + of_items - of_items.detach()

    def _softmax(self, scores: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return the losses [P] for scores [P, N] and the column of the row's item [P]."""
        if self._hard_negatives is None:
            return F.cross_entropy(scores, own, reduction="none")
        return hardest_cross_entropy(scores, own, self._hard_negatives)

    def _in_batch(
        self, users: torch.Tensor, items: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Collective: return the scores [P, N] of all items of the global batch, -inf if one is
        neither the row's item nor a negative, and the column of the row's item [P].
        """
        own = rows + own_rank() * len(items)
        candidates, candidate_ids, weights = gather_rows(items), gather_rows(ids), gather_rows(weights)
        scores = users @ candidates.T
        if self._correction is not None:
            scores = scores - self._correction(candidate_ids)
        hidden = (candidate_ids == ids[rows, None]) | (weights == 0)
        hidden.scatter_(1, own[:, None], False)
        return scores.masked_fill(hidden, float("-inf")), own

    def _sampled(
        self,
        users: torch.Tensor,
        items: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        rows: torch.Tensor,
        index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Collective: return the scores [P, 1 + N] of the row's item and of all negatives, and the
        column 0 of the row's item [P]. `index`: the vectors to find hard negatives in.

        The row's item is always a candidate, so its score has no correction (Khrylchenko et al.,
        RecSys 2025). Hard negatives have none for the same reason, and the sampled negatives stand
        for the other items only.
        """
        begin = len(weights) if self._kind == "corpus" else 0
        counted = torch.cat([ids[: len(weights)].masked_fill(weights == 0, NO_ITEM), ids[len(weights) :]])
        candidates, candidate_ids = gather_rows(items[begin:]), gather_rows(counted[begin:])
        scores = users @ candidates.T
        if self._correction is not None:
            num_negatives = (candidate_ids != NO_ITEM).sum() - 1  # without the row's item
            scores = scores - self._correction(candidate_ids, num_negatives)
        hidden = (candidate_ids == ids[rows, None]) | (candidate_ids == NO_ITEM)
        others = []
        if index is not None:
            hard, is_hard = hardest_items(index, users, ids[rows], candidate_ids, self._num_hard)
            hidden = hidden | is_hard
            others.append((users[:, None] * index[hard - 1]).sum(dim=2))
        positives = (users * items[rows]).sum(dim=1, keepdim=True)
        scores = torch.cat([positives, scores.masked_fill(hidden, float("-inf")), *others], dim=1)
        return scores, torch.zeros_like(rows)


def hardest_cross_entropy(scores: torch.Tensor, own: torch.Tensor, count: int) -> torch.Tensor:
    """Return [P]: the softmax cross-entropy of each row's candidate against the `count` other
    candidates with the highest scores.

    scores: [P, N], -inf if a candidate is not a negative. own: [P], the index of the row's
    candidate.
    """
    positive = scores.gather(1, own[:, None])
    others = scores.scatter(1, own[:, None], float("-inf")).topk(min(count, scores.shape[1] - 1), dim=1).values
    return torch.cat([positive, others], dim=1).logsumexp(dim=1) - positive[:, 0]


@torch.no_grad()
def hardest_items(
    index: torch.Tensor, users: torch.Tensor, own: torch.Tensor, candidate_ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids [P, count] of the items with the highest scores for each user, without the
    user's item `own` [P], and which of the candidates [N] are among them [P, N].

    index: the vectors of items 1, 2, ... [num_items, D]. users: [P, D].
    """
    num_items = len(index)
    # 0: a row without an item, or an item that a stream has added since the index was computed
    own, candidate_ids = (torch.where((ids < 0) | (ids > num_items), 0, ids) for ids in (own, candidate_ids))
    found = [candidate_ids.new_empty(0, count)]
    among = [torch.zeros(0, len(candidate_ids), dtype=torch.bool, device=users.device)]
    for block, items in zip(*(each.split(max(1, SCORES_AT_ONCE // num_items)) for each in (users, own)), strict=True):
        scores = torch.cat([block.new_full((len(block), 1), float("-inf")), block @ index.T], dim=1)
        best = scores.scatter_(1, items[:, None], float("-inf")).topk(count, dim=1).indices
        found.append(best)
        among.append(torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)[:, candidate_ids])
    return torch.cat(found), torch.cat(among)


def first_ids(sparse_features: KeyedJaggedTensor, feature: str) -> torch.Tensor:
    """Return [B] int64: the first id of each row, or NO_ITEM."""
    bags = sparse_features[feature]
    values, starts, lengths = bags.values(), bags.offsets()[:-1].long(), bags.lengths()
    if not len(values):
        return torch.full_like(starts, NO_ITEM)
    return torch.where(lengths > 0, values[starts.clamp(max=len(values) - 1)], NO_ITEM)


def gather_rows(local: torch.Tensor) -> torch.Tensor:
    """Collective: return every rank's [B, ...] concatenated.

    Gradients of all ranks return to the rank of the row.
    """
    if num_exchanging_ranks() == 1:
        return local
    return _Gathered.apply(local)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor) -> torch.Tensor:
        return all_gather(local).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        world = dist.get_world_size()
        return reduce_scatter(gradient.unflatten(0, (world, len(gradient) // world)))


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
