"""Keep a loss that is not finite from the tables, and carry what the ranks have to agree on at each step.

The ranks' messages (stop, input failed, bad rows) go with the flag of the loss in one all-reduce.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeline.data.read.batch import Batch
from pipeline.runtime.errors import TrainingError
from pipeline.sharding.collectives.host_exchange import all_reduce

MAX_SUSPECTS = 5  # rows named on each rank when the loss is not finite


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
    """A task whose loss, where it is not finite, never reaches the tables: forward(outputs, batch) -> (loss, prediction).

    The tables' optimizer runs inside backward, so a bad loss must be stopped before it: all ranks agree on
    a flag, and where it is set the loss returned is a leaf of its own, whose backward touches no parameter.
    The same all-reduce carries the ranks' wish to stop, so that all end at the same step, a reader's failure, and the
    number of rows that were quarantined.
    `max_in_a_row` such losses are skipped, the next raises NonFiniteLossError on every rank; 0 skips none.
    """

    def __init__(self, task: nn.Module, max_in_a_row: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        self.task = task
        self.max_in_a_row, self.scale = max_in_a_row, scale
        self.num_skipped = self.in_a_row = 0
        self.stop_wanted = False  # set it on any rank, from a signal handler too
        self.stop_agreed = False  # the same on every rank once that step's loss is there
        self.input_failed = False  # likewise: this rank's reader has failed, and its batches are empty
        self.input_failure_agreed = False
        self.num_bad_rows = 0  # of all ranks, over all training batches

    def forward(self, outputs: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
        """Collective in training mode: the scaled loss and the prediction, or what touches nothing."""
        loss, prediction = self.task(outputs, batch)
        if not self.training:
            return loss, prediction
        bad_rows = torch.count_nonzero(batch.sample_weights == 0)  # training batches have no padding
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
            raise self._error(prediction)
        self.num_skipped += 1
        return self._nothing(prediction)

    def _nothing(self, prediction: Any) -> tuple[torch.Tensor, Any]:
        # Weight 0: metrics must not see the NaN either.
        nothing = {name: torch.zeros_like(getattr(prediction, name)) for name in prediction._fields if name != "loss"}
        loss = torch.zeros_like(prediction.loss).requires_grad_()
        return loss, prediction._replace(**nothing)

    def _error(self, prediction: Any) -> NonFiniteLossError:
        losses = self.task.losses(prediction)  # type: ignore[operator]
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
