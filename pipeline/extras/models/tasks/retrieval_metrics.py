"""Measure exact recall@k, NDCG@k and MRR of users' and items' vectors against all items of the
split.

The catalogue is every item of the split's rows, and of their histories if the model reads one. Each
clicked row finds the position of its item among all items by score. The unknown item (id 0) cannot
be retrieved: it is in no catalogue, and a click on it is a miss.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipeline.runtime.process.distributed import DistributedContext

UNKNOWN_ITEM = 0
SCORES_AT_ONCE = 1 << 24  # numbers in one block of scores, 64 MiB


class RetrievalPrediction(NamedTuple):
    """Hold detached tensors: losses [B] (0 if a row is not a positive), users and items [B, D]
    float32, item_ids [B].

    history: ids [B, L] and vectors [B, L, D] of further items of the row, which are in the catalogue.
    seen [B, L]: ids of items that are not ranked for the row, because the user has seen them.
    """

    loss: torch.Tensor  # scalar
    losses: torch.Tensor
    labels: torch.Tensor
    sample_weights: torch.Tensor
    users: torch.Tensor
    items: torch.Tensor
    item_ids: torch.Tensor
    history: tuple[torch.Tensor, torch.Tensor] | None = None
    seen: torch.Tensor | None = None


class RetrievalLossWindow:
    """Measure the training loss per clicked row over all ranks since the last compute(), and the
    share of clicked rows.
    """

    def __init__(self, context: DistributedContext) -> None:
        self._context = context
        self._sums = torch.zeros(3, dtype=torch.float64)  # losses, positives, rows

    def update(self, prediction: RetrievalPrediction) -> None:
        weights = prediction.sample_weights
        parts = [prediction.losses.sum(), (prediction.labels * weights).sum(), weights.sum()]
        self._sums += torch.stack([part.double() for part in parts]).cpu()

    def compute(self) -> dict[str, float]:
        """Collective: return the metrics, equal on every rank."""
        sums = self._sums.to(self._context.device)
        if self._context.world_size > 1:
            dist.all_reduce(sums)
        self._sums = torch.zeros(3, dtype=torch.float64)
        loss, positives, rows = sums.tolist()
        return {
            "loss": loss / positives if positives else math.nan,
            "label_rate": positives / rows if rows else math.nan,
        }


class RetrievalMetrics:
    """Keep each clicked row's user vector, and each item's vector once: 4 D bytes each for D
    columns.
    """

    def __init__(self, context: DistributedContext, recall_at: list[int]) -> None:
        self._context, self._recall_at = context, recall_at
        self._seen = torch.zeros(0, dtype=torch.bool)
        self._items: list[torch.Tensor] = []
        self._item_ids: list[torch.Tensor] = []
        self._users: list[torch.Tensor] = []
        self._wanted: list[torch.Tensor] = []
        self._not_ranked: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._num_samples = 0

    def update(self, prediction: RetrievalPrediction) -> None:
        real = prediction.sample_weights > 0
        ids, items = prediction.item_ids[real].cpu(), prediction.items[real].cpu()
        clicked = prediction.labels[real].cpu() > 0
        self._users.append(prediction.users[real].cpu()[clicked])
        self._wanted.append(ids[clicked])
        seen = ids[:, None][:, :0] if prediction.seen is None else prediction.seen[real].cpu()
        self._not_ranked.append(seen[clicked])
        self._weights.append(prediction.sample_weights[real].double().cpu()[clicked])
        self._num_samples += len(ids)
        self._add_items(ids, items)
        if prediction.history is not None:
            more_ids, more = (part[real].flatten(0, 1).cpu() for part in prediction.history)
            self._add_items(more_ids[more_ids > UNKNOWN_ITEM], more[more_ids > UNKNOWN_ITEM])

    def _add_items(self, ids: torch.Tensor, items: torch.Tensor) -> None:
        distinct, first = _first_positions(ids)
        if len(distinct) and int(distinct[-1]) >= len(self._seen):
            longer = torch.zeros(2 * int(distinct[-1]) + 1, dtype=torch.bool)
            longer[: len(self._seen)] = self._seen
            self._seen = longer
        new = (distinct > UNKNOWN_ITEM) & ~self._seen[distinct]
        self._seen[distinct[new]] = True
        self._item_ids.append(distinct[new])
        self._items.append(items[first[new]])

    def compute(self) -> dict[str, float]:
        """Collective: return the metrics, equal on every rank.

        recall_at_k: the share of clicked rows, by weight, whose item is among the k best; items
        with equal scores count as half above and half below. ndcg_at_k: the mean of 1 / log2(1 +
        position) for positions up to k, 0 for others. mrr: the mean of 1 / position. NaN without a
        clicked row.
        """
        ids, items = self._catalogue()
        positions = [
            _positions(*of_users, ids, items)
            for of_users in zip(self._users, self._wanted, self._not_ranked, strict=True)
        ]
        local, weights = (
            torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64) for parts in (positions, self._weights)
        )
        sums = [weights[local <= k].sum() for k in self._recall_at]
        sums += [(weights / torch.log2(1 + local))[local <= k].sum() for k in self._recall_at]
        sums += [(weights / local).sum(), weights.sum(), torch.tensor(len(local)), torch.tensor(self._num_samples)]
        total = torch.stack([value.double() for value in sums]).to(self._context.device)
        if self._context.world_size > 1:
            dist.all_reduce(total)
        *sums_at, reciprocal, weight, num_clicked, num_samples = total.tolist()
        names = [f"{name}_at_{k}" for name in ("recall", "ndcg") for k in self._recall_at]
        found = {name: _share(part, weight) for name, part in zip(names, sums_at, strict=True)}
        return {
            **found,
            "mrr": _share(reciprocal, weight),
            "num_clicked": int(num_clicked),
            "catalogue_items": len(ids),
            "num_samples": int(num_samples),
        }

    def _catalogue(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Collective: return ids ascending [M] and their vectors [M, D].

        If several ranks have an item, use the first rank's.
        """
        ids = torch.cat(self._item_ids) if self._item_ids else torch.empty(0, dtype=torch.int64)
        items = torch.cat(self._items) if self._items else torch.empty(0, 1)
        ids, items = _gather(ids, self._context), _gather(items, self._context)
        distinct, first = _first_positions(ids)
        return distinct, items[first]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _first_positions(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct ids, ascending, and the index of the first occurrence of each."""
    distinct, position = torch.unique(ids, return_inverse=True)
    first = torch.full((len(distinct),), len(ids), dtype=torch.int64)
    return distinct, first.scatter_reduce(0, position, torch.arange(len(ids)), "amin")


def _positions(
    users: torch.Tensor, wanted: torch.Tensor, not_ranked: torch.Tensor, ids: torch.Tensor, items: torch.Tensor
) -> torch.Tensor:
    """Return [P] float64: the position (from 1) of each user's clicked item among all items by
    score, without the items of the user's row of `not_ranked` [P, L]; infinite if the catalogue
    lacks the item.
    """
    positions = torch.full((len(users),), math.inf, dtype=torch.float64)
    known = torch.nonzero(wanted > UNKNOWN_ITEM).flatten()
    for rows in known.split(max(1, SCORES_AT_ONCE // max(1, len(ids)))):
        if not len(rows):
            continue
        scores = users[rows] @ items.T
        own = scores.gather(1, torch.searchsorted(ids, wanted[rows])[:, None])
        left_out = not_ranked[rows]
        row, number = torch.nonzero((left_out > UNKNOWN_ITEM) & (left_out != wanted[rows, None]), as_tuple=True)
        scores[row, torch.searchsorted(ids, left_out[row, number])] = -math.inf
        above, equal = (scores > own).sum(dim=1), (scores == own).sum(dim=1) - 1
        positions[rows] = 1 + above.double() + equal.double() / 2
    return positions


def _gather(local: torch.Tensor, context: DistributedContext) -> torch.Tensor:
    """Collective: return all ranks' [n, ...] concatenated, in host memory of every rank."""
    if context.world_size == 1:
        return local
    shape = torch.tensor([len(local), *local.shape[1:]], device=context.device)
    shapes = [torch.zeros_like(shape) for _ in range(context.world_size)]
    dist.all_gather(shapes, shape)
    longest, width = (
        max(int(each[0]) for each in shapes),
        [max(int(each[i]) for each in shapes) for i in range(1, len(shape))],
    )
    padded = torch.zeros(longest, *width, dtype=local.dtype, device=context.device)
    if len(local):
        padded[: len(local)] = local.to(context.device)
    parts = [torch.empty_like(padded) for _ in shapes]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(size[0])].cpu() for part, size in zip(parts, shapes, strict=True)])
