"""Losses within groups of rows, such as the items of one request: pairwise, listwise and JRC.

Rows of a group are compared if they are in one stream of one batch (data.read.streams). A rank has
whole streams, so a step is the same for any number of ranks, and no rank needs rows of another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from pipeline.data.read.batch import Batch


class ListRows(NamedTuple):
    """The rows of a rank by stream: [streams, rows] each; `same` is [streams, rows, rows].

    same: both rows have one group, and the second row counts. A row of weight 2 is as two rows.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    same: torch.Tensor

    @staticmethod
    def of(logits: torch.Tensor, batch: Batch, rows_per_stream: int) -> ListRows:
        assert batch.groups is not None
        parts = (logits, batch.labels, batch.sample_weights, batch.groups)
        logits, labels, weights, groups = (part.reshape(-1, rows_per_stream) for part in parts)
        grouped = (groups != 0) & (weights > 0)
        same = (groups[:, :, None] == groups[:, None, :]) & grouped[:, None, :]
        return ListRows(logits, labels, weights, same & grouped[:, :, None])


def pairwise(rows: ListRows) -> torch.Tensor:
    """BPR and RankNet: for each positive row the mean of log(1 + exp(negative - positive)) over the
    negative rows of its group (Rendle et al., UAI 2009). 0 without a negative row."""
    negatives = rows.same * ((1.0 - rows.labels) * rows.weights)[:, None, :]
    losses = (negatives * F.softplus(rows.logits[:, None, :] - rows.logits[:, :, None])).sum(2)
    return rows.labels * rows.weights * losses / negatives.sum(2).clamp(min=torch.finfo(losses.dtype).tiny)


def listwise(rows: ListRows) -> torch.Tensor:
    """For each positive row the softmax cross-entropy among the rows of its group."""
    return rows.labels * rows.weights * _minus_log_share(rows, rows.logits)


def jrc(rows: ListRows) -> torch.Tensor:
    """The ranking part of JRC (arXiv 2208.06164): among the rows of the group, the
    softmax cross-entropy of positive rows by their positive logit, of negative rows by their
    negative one. Models here have one logit z, so the two are z / 2 and -z / 2."""
    half = rows.logits / 2
    shares = rows.labels * _minus_log_share(rows, half) + (1.0 - rows.labels) * _minus_log_share(rows, -half)
    return rows.weights * shares


def _minus_log_share(rows: ListRows, logits: torch.Tensor) -> torch.Tensor:
    """Return -log(exp(logit) / sum of weight * exp(logit) over the group); 0 without a group."""
    itself = torch.eye(logits.shape[1], dtype=torch.bool, device=logits.device)
    counted = (logits + rows.weights.clamp(min=torch.finfo(logits.dtype).tiny).log())[:, None, :]
    total = counted.masked_fill(~(rows.same | itself), float("-inf")).logsumexp(2)
    return (total - logits) * rows.same.any(2)


RANKINGS = {"pairwise": pairwise, "listwise": listwise, "jrc": jrc}
