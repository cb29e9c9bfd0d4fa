"""Update replicated tables by row-wise Adagrad in a few launches a width, on devices without our kernels."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.optim import RowWiseAdagrad


class RowWiseAdagradAtOnce(RowWiseAdagrad):
    """TorchRec's RowWiseAdagrad by the same formula and with the same state, without decay.

    TorchRec's calls seven operations a table, which its host cannot issue in time for small tables on a GPU.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            by_width: dict[int, list[torch.Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    by_width.setdefault(weight.shape[1], []).append(weight)
            for weights in by_width.values():
                self._update(weights, group["lr"], group["eps"])

    def _update(self, weights: list[torch.Tensor], lr: float, eps: float) -> None:
        sizes, states = [len(weight) for weight in weights], [self.state[weight] for weight in weights]
        torch._foreach_add_([state["step"] for state in states], 1.0)
        gradients = torch.cat([weight.grad for weight in weights])  # type: ignore[misc]
        sums = [state["sum"] for state in states]
        torch._foreach_add_(sums, gradients.square().mean(dim=1, keepdim=True).split(sizes))
        updates = gradients / torch.cat(sums).sqrt_().add_(eps)
        torch._foreach_add_(weights, updates.split(sizes), alpha=-lr)
