"""Train item retrieval: each clicked row's item against the items of the global batch.

Measure recall@k and MRR.

Negatives come from all ranks, so that a step is the same for any number of ranks: item vectors are
gathered, and their gradients are summed and returned to their ranks. With a batch of 8192 and
vectors of 32 columns that is 1 MiB per rank and step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.registry import register
from pipeline.data.read.batch import Batch
from pipeline.devices.cpu.host_exchange import all_gather, num_exchanging_ranks, reduce_scatter
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.extras.models.tasks.retrieval_metrics import RetrievalLossWindow, RetrievalMetrics, RetrievalPrediction
from pipeline.extras.models.user_item import TwoTowerConfig
from pipeline.models.tasks.task import Measure
from pipeline.runtime.process.distributed import DistributedContext

NO_ITEM = -1  # the id of padding and quarantined rows


@register("task", "retrieval")
class RetrievalTask(nn.Module):
    """Compute the softmax cross-entropy of each positive row's item among the items of the global
    batch (Yi et al., RecSys 2019, section 3).

    A candidate with the same item as the row is not a negative. Items of rows with weight 0 are not
    candidates.
    """

    no_export = ""
    exports = "towers"

    def __init__(self, config: TwoTowerConfig, tables: list[Table]) -> None:
        super().__init__()
        self._item_feature, self._temperature = config.item_features[0], config.temperature
        self._recall_at, self._hard_negatives = list(config.recall_at), config.hard_negatives
        frequencies = None
        if config.log_q_correction:
            frequencies = next(table.frequencies for table in tables if self._item_feature in table.feature_names)
        self._log_frequency = LogFrequency(frequencies) if frequencies else None

    def forward(
        self, vectors: tuple[torch.Tensor, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, RetrievalPrediction]:
        """vectors: users and items [B, D]. Collective in training mode.

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
        loss = losses.mean()
        return loss, RetrievalPrediction(
            loss.detach(), losses.detach(), labels, sample_weights, users.detach(), items.detach(), ids
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
        candidates = gather_rows(items)
        candidate_ids, weights = gather_rows(ids), gather_rows(sample_weights)
        scores = (users[rows] / self._temperature) @ candidates.T
        if self._log_frequency is not None:
            scores = scores - self._log_frequency(candidate_ids)
        own = rows + _rank() * len(users)
        hidden = (candidate_ids == ids[rows, None]) | (weights == 0)
        hidden.scatter_(1, own[:, None], False)
        scores = scores.masked_fill(hidden, float("-inf"))
        if self._hard_negatives is None:
            return F.cross_entropy(scores, own, reduction="none")
        return hardest_cross_entropy(scores, own, self._hard_negatives)


def hardest_cross_entropy(scores: torch.Tensor, own: torch.Tensor, count: int) -> torch.Tensor:
    """Return [P]: the softmax cross-entropy of each row's candidate against the `count` other
    candidates with the highest scores.

    scores: [P, N], -inf if a candidate is not a negative. own: [P], the index of the row's
    candidate.
    """
    positive = scores.gather(1, own[:, None])
    others = scores.scatter(1, own[:, None], float("-inf")).topk(min(count, scores.shape[1] - 1), dim=1).values
    return torch.cat([positive, others], dim=1).logsumexp(dim=1) - positive[:, 0]


def first_ids(sparse_features: KeyedJaggedTensor, feature: str) -> torch.Tensor:
    """Return [B] int64: the first id of each row, or NO_ITEM."""
    bags = sparse_features[feature]
    values, starts, lengths = bags.values(), bags.offsets()[:-1].long(), bags.lengths()
    if not len(values):
        return torch.full_like(starts, NO_ITEM)
    return torch.where(lengths > 0, values[starts.clamp(max=len(values) - 1)], NO_ITEM)


class LogFrequency(nn.Module):
    """Map item ids to the log of each item's share of the training rows, from the frequency curve
    of its table.

    Ids are sorted by descending frequency and start at 1. Between the points of the curve, log
    share is linear in log rank, as under a power law. The unknown item (0) counts as the rarest
    item.
    """

    _centres: torch.Tensor
    _density: torch.Tensor

    def __init__(self, frequencies: RowFrequencies) -> None:
        super().__init__()
        rows = torch.tensor(frequencies.rows, dtype=torch.float64)
        shares = torch.tensor(frequencies.shares, dtype=torch.float64)
        widths = rows.diff()
        centres = ((rows[:-1] + 1) * rows[1:]).sqrt().log()
        density = (shares.diff() / widths).clamp(min=1e-12).log()
        self.register_buffer("_centres", centres.float(), persistent=False)
        self.register_buffer("_density", density.float(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        centres, density = self._centres.to(ids.device), self._density.to(ids.device)
        if len(centres) == 1:
            return density.expand(len(ids))
        log_rank = ids.clamp(min=1).float().log()
        log_rank = torch.where(ids == 0, centres[-1], log_rank).clamp(centres[0], centres[-1])
        right = torch.searchsorted(centres, log_rank).clamp(1, len(centres) - 1)
        share = (log_rank - centres[right - 1]) / (centres[right] - centres[right - 1])
        return torch.lerp(density[right - 1], density[right], share)


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


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
