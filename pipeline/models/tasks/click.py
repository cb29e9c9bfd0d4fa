"""Turn a batch into a loss and predictions, as TorchRec's train pipelines call a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pipeline.data.read.batch import Batch
from pipeline.runtime.errors import TrainingError
from pipeline.sharding.collectives.host_exchange import all_reduce

MAX_SUSPECTS = 5  # rows named on each rank when the loss is not finite


class Prediction(NamedTuple):
    """Detached tensors of shape [batch], float32; sample_weights are 0.0 on padding rows."""

    loss: torch.Tensor  # scalar
    logits: torch.Tensor
    labels: torch.Tensor
    sample_weights: torch.Tensor


class NonFiniteLossError(TrainingError):
    """The loss of a step is NaN or infinite on at least one rank; no rank has updated anything.

    rows: of this rank's batch, the first of the `num_at_fault` whose loss is not finite; where there is none, those
    with the largest loss.
    """

    def __init__(
        self, message: str, rows: list[int], losses: list[float], num_at_fault: int, num_in_a_row: int
    ) -> None:
        super().__init__(message)
        self.rows, self.losses, self.num_at_fault, self.num_in_a_row = rows, losses, num_at_fault, num_in_a_row


class GuardedLoss(nn.Module):
    """Binary cross-entropy with logits that never lets a non-finite loss reach the tables.

    The tables' optimizer runs inside backward, so a bad loss must be stopped before it: all ranks agree on
    a flag, and where it is set the loss returned is a leaf of its own, whose backward touches no parameter.
    The same all-reduce carries the ranks' wish to stop, so that all end at the same step, a reader's failure, and the
    number of rows that were quarantined.
    `max_in_a_row` such losses are skipped, the next raises NonFiniteLossError on every rank; 0 skips none.
    """

    def __init__(self, max_in_a_row: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        self.max_in_a_row, self.scale = max_in_a_row, scale
        self.num_skipped = self.in_a_row = 0
        self.stop_wanted = False  # set it on any rank, from a signal handler too
        self.stop_agreed = False  # the same on every rank once that step's loss is there
        self.input_failed = False  # likewise: this rank's reader has failed, and its batches are empty
        self.input_failure_agreed = False
        self.num_bad_rows = 0  # of all ranks, over all training batches

    def forward(
        self, logits: torch.Tensor, labels: torch.Tensor, sample_weights: torch.Tensor
    ) -> tuple[torch.Tensor, Prediction]:
        """Collective in training mode."""
        logits = logits.reshape(-1).float()
        loss = F.binary_cross_entropy_with_logits(logits, labels, weight=sample_weights)
        prediction = Prediction(loss.detach(), logits.detach(), labels, sample_weights)
        if not self.training:
            return loss, prediction

        def losses() -> torch.Tensor:
            return F.binary_cross_entropy_with_logits(
                prediction.logits, labels, weight=sample_weights, reduction="none"
            )

        return self.guard(loss, prediction, losses)

    def guard(
        self, loss: torch.Tensor, prediction: Any, losses: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, Any]:
        """Collective: the scaled loss and the prediction, or what touches nothing; `losses` gives each row's, [batch]."""
        bad_rows = torch.count_nonzero(prediction.sample_weights == 0)  # training batches have no padding
        non_finite, stop, failed, bad = _summed(
            [~loss.detach().isfinite(), self.stop_wanted, self.input_failed, bad_rows], loss.device
        )
        self.stop_agreed, self.input_failure_agreed = stop > 0, failed > 0
        if self.input_failure_agreed:
            return self._nothing(prediction)
        self.num_bad_rows += bad
        if not non_finite:
            self.in_a_row = 0
            return loss * self.scale, prediction
        self.in_a_row += 1
        if self.in_a_row > self.max_in_a_row:
            raise self._error(prediction, losses())
        self.num_skipped += 1
        return self._nothing(prediction)

    def _nothing(self, prediction: Any) -> tuple[torch.Tensor, Any]:
        # Weight 0: metrics must not see the NaN either.
        nothing = {name: torch.zeros_like(getattr(prediction, name)) for name in prediction._fields if name != "loss"}
        loss = torch.zeros_like(prediction.loss).requires_grad_()
        return loss, prediction._replace(**nothing)

    def _error(self, prediction: Any, losses: torch.Tensor) -> NonFiniteLossError:
        at_fault = torch.nonzero(~losses.isfinite()).flatten()
        rows = at_fault[:MAX_SUSPECTS]
        if not len(rows):
            rows = losses.topk(min(MAX_SUSPECTS, len(losses))).indices
        message = (
            f"the loss is {prediction.loss.item()} on this rank and not finite on at least one, {self.in_a_row} time(s) "
            f"in a row with {self.max_in_a_row} allowed; this batch has updated nothing. Look for NaN labels or dense "
            "values, lower the learning rates or warm up (schedule=...), or set trainer.non_finite_loss=skip or rollback"
        )
        return NonFiniteLossError(message, rows.tolist(), losses[rows].tolist(), len(at_fault), self.in_a_row)


def _summed(flags: list[torch.Tensor | bool], device: torch.device) -> list[int]:
    """Collective: each flag's, or count's, sum over all ranks."""
    sums = torch.stack([torch.as_tensor(flag, dtype=torch.int64, device=device) for flag in flags])
    if dist.is_initialized() and dist.get_world_size() > 1:
        all_reduce(sums)
    return [int(value) for value in sums.tolist()]


class CTRTask(nn.Module):
    """Click-through-rate prediction: forward(batch) -> (loss, Prediction). `bf16` autocasts all but the loss."""

    def __init__(
        self, model: nn.Module, precision: str = "fp32", max_non_finite_in_a_row: int = 0, loss_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = GuardedLoss(max_non_finite_in_a_row, loss_scale)
        self._bf16 = precision == "bf16"

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Prediction]:
        # Two branches, not a flag to autocast: TorchRec traces this with torch.fx, where batch has no device yet.
        if self._bf16:
            device_type = "cuda" if next(self.model.parameters()).is_cuda else "cpu"
            with torch.autocast(device_type, dtype=torch.bfloat16):
                logits = self.model(batch.dense_features, batch.sparse_features)
        else:
            logits = self.model(batch.dense_features, batch.sparse_features)
        return self.loss(logits, batch.labels, batch.sample_weights)
