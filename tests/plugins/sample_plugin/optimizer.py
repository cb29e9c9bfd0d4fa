"""An optimizer of dense layers in one file."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.config.optimizers import DenseOptimizerConfig, Optimizer
from pipeline.config.registry import register


@register("optimizer", "signed_momentum")
class SignedMomentum(Optimizer):
    def dense(self, weights: list[Any], config: DenseOptimizerConfig) -> torch.optim.Optimizer:
        return Signed(weights, {"lr": config.lr, "beta": config.beta1})


class Signed(torch.optim.Optimizer):
    """Steps of lr along the sign of a running mean of gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["mean"] = torch.zeros_like(weight)
                state["mean"].lerp_(weight.grad, 1 - group["beta"])
                weight.sub_(state["mean"].sign(), alpha=group["lr"])
