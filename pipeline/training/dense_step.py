"""Step torch's Adam over all dense parameters by its one CPU kernel, without what torch does around it.

torch's step() gathers and groups tensors by device and asks torch.compile for a graph break: several times as long as the
kernel takes over a small model's layers. The kernel, its arguments and its numbers are torch's.
"""

from __future__ import annotations

import torch

KERNELS = {torch.optim.Adam: torch._fused_adam_, torch.optim.AdamW: torch._fused_adamw_}


class FusedAdamStep:
    """Of an optimizer that fits(); its state and its learning rate stay where they are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._kernel = optimizer, KERNELS[type(optimizer)]

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        """Adam or AdamW of one group of fp32 parameters on CPU, as torch's own fused step takes them, and without hooks."""
        if type(optimizer) not in KERNELS or len(optimizer.param_groups) != 1:
            return False
        (group,) = optimizer.param_groups
        plain = group["fused"] and not any(group[name] for name in ("amsgrad", "maximize", "differentiable"))
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        on_cpu = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in group["params"])
        return bool(plain and on_cpu and not hooks)

    @torch.no_grad()
    def step(self) -> None:
        (group,), state = self._optimizer.param_groups, self._optimizer.state
        weights = [weight for weight in group["params"] if weight.grad is not None]
        if not weights:
            return
        states = [state[weight] for weight in weights]
        steps = [each["step"] for each in states]
        torch._foreach_add_(steps, 1)
        beta1, beta2 = group["betas"]
        self._kernel(
            weights, [weight.grad for weight in weights], [each["exp_avg"] for each in states],
            [each["exp_avg_sq"] for each in states], [], steps, amsgrad=False, lr=group["lr"], beta1=beta1, beta2=beta2,
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
