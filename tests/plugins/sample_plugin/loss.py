"""A loss of regression labels in one file: the absolute error."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.config.registry import register


@register("loss", "absolute")
@dataclass(frozen=True)
class Absolute:
    scale: float = 1.0

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.scale * abs(outputs - labels)
