"""Losses of regression labels: `data.columns.labels.<name>.loss={kind: huber, delta: 2}`.

A loss is called with outputs and labels, [rows] each, and returns the loss of each row. Predictions
keep the label's unit, so exported models need no change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.runtime.errors import check_above, check_below_one

if TYPE_CHECKING:
    import torch


@register("loss", "huber")
@dataclass(frozen=True)
class Huber:
    """Squared error / 2 up to `delta`, above it a line of slope `delta` (Huber 1964)."""

    delta: float = 1.0

    def __post_init__(self) -> None:
        check_above("labels.loss.delta", self.delta, 0.0)

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import huber_loss

        return huber_loss(outputs, labels, reduction="none", delta=self.delta)


@register("loss", "log")
@dataclass(frozen=True)
class SquaredLog:
    """Squared error of sign(x) * log(1 + |x|): relative errors count, as for times and prices."""

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (_signed_log(outputs) - _signed_log(labels)).square()


def _signed_log(values: torch.Tensor) -> torch.Tensor:
    # not values.sign() * values.abs().log1p(), whose gradient at 0 is 0 in torch
    positive = values * (values >= 0)
    return positive.log1p() - (positive - values).log1p()


@register("loss", "quantile")
@dataclass(frozen=True)
class Quantile:
    """Pinball loss: its best prediction is the label's quantile `at` (Koenker and Bassett 1978)."""

    at: float = 0.5

    def __post_init__(self) -> None:
        check_above("labels.loss.at", self.at, 0.0)
        check_below_one("labels.loss.at", self.at)

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        missing = labels - outputs
        return self.at * missing + (-missing).relu()
