"""Turn a batch into a loss and predictions, as TorchRec's train pipelines call a model."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pipeline.data.batch import Batch


class Prediction(NamedTuple):
    """Detached tensors of shape [batch], float32; sample_weights are 0.0 on padding rows."""

    loss: torch.Tensor  # scalar
    logits: torch.Tensor
    labels: torch.Tensor
    sample_weights: torch.Tensor


class NonFiniteLossError(RuntimeError):
    """The loss of a step is NaN or infinite on at least one rank; no rank has updated anything."""


class GuardedLoss(nn.Module):
    """Binary cross-entropy with logits that never lets a non-finite loss reach the tables.

    The tables' optimizer runs inside backward, so a bad loss must be stopped before it: all ranks agree on
    a flag, and where it is set the loss returned is a leaf of its own, whose backward touches no parameter.
    The same all-reduce carries the ranks' wish to stop, so that all end at the same step.
    `max_in_a_row` such losses are skipped, the next raises NonFiniteLossError on every rank; 0 skips none.
    """

    def __init__(self, max_in_a_row: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        self.max_in_a_row, self.scale = max_in_a_row, scale
        self.num_skipped = self._in_a_row = 0
        self.stop_wanted = False  # set it on any rank, from a signal handler too
        self.stop_agreed = False  # the same on every rank once that step's loss is there

    def forward(
        self, logits: torch.Tensor, labels: torch.Tensor, sample_weights: torch.Tensor
    ) -> tuple[torch.Tensor, Prediction]:
        """Collective in training mode."""
        logits = logits.reshape(-1).float()
        loss = F.binary_cross_entropy_with_logits(logits, labels, weight=sample_weights)
        prediction = Prediction(loss.detach(), logits.detach(), labels, sample_weights)
        if not self.training:
            return loss, prediction
        is_finite, goes_on = _true_on_all_ranks(loss.detach().isfinite(), not self.stop_wanted)
        self.stop_agreed = not goes_on
        if is_finite:
            self._in_a_row = 0
            return loss * self.scale, prediction
        self._in_a_row += 1
        if self._in_a_row > self.max_in_a_row:
            raise NonFiniteLossError(
                f"the loss is {loss.item()} on this rank and not finite on at least one, {self._in_a_row} time(s) in a "
                f"row with {self.max_in_a_row} allowed; this batch has updated nothing. Look for NaN labels or dense "
                "values, lower the learning rates or warm up (schedule=...), or set trainer.non_finite_loss=skip"
            )
        self.num_skipped += 1
        nothing = torch.zeros_like(logits.detach())  # weight 0: metrics must not see the NaN either
        return torch.zeros_like(loss).requires_grad_(), Prediction(loss.detach(), nothing, nothing, nothing)


def _true_on_all_ranks(finite: torch.Tensor, goes_on: bool) -> list[bool]:
    flags = torch.stack([finite, torch.tensor(goes_on, device=finite.device)]).to(torch.int32)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return [bool(flag) for flag in flags.tolist()]


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
