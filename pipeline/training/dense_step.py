"""Step Adam over all dense parameters by one CPU kernel for each type of gradients, without what torch does around it.

torch's step() gathers and groups tensors by device and asks torch.compile for a graph break: several times as long as the
kernel takes over a small model's layers. For fp32 gradients the kernel, its arguments and its numbers are torch's. Weights
with a copy in bf16 (pipeline.models.layers.bf16_weights) have bf16 gradients; a kernel of our own reads these, does the same
arithmetic, bit for bit, and writes the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from pipeline.devices.base import in_host_memory
from pipeline.devices.cpu.kernel_pool import kernels, on_all_threads
from pipeline.models.layers.bf16_weights import Bf16Copy

KERNELS = {torch.optim.Adam: torch._fused_adam_, torch.optim.AdamW: torch._fused_adamw_}
COPIES_KERNELS = "pipeline.devices.cpu.kernels.adam"
BLOCK, LEAST_BLOCKS = 1 << 14, 4  # numbers; blocks that are worth a thread
Array = np.ndarray[Any, Any]


class FusedAdamStep:
    """Of an optimizer that fits(); its state and its learning rate stay where they are."""

    def __init__(self, optimizer: torch.optim.Optimizer, copies: Sequence[Bf16Copy] = ()) -> None:
        """`copies`: of some of the optimizer's weights, where can_step_copies()."""
        self._optimizer, self._kernel = optimizer, KERNELS[type(optimizer)]
        self._copies = list(copies)

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        """Adam or AdamW of one group of fp32 parameters on CPU, as torch's own fused step takes them, and without hooks."""
        if type(optimizer) not in KERNELS or len(optimizer.param_groups) != 1:
            return False
        (group,) = optimizer.param_groups
        plain = group["fused"] and not any(group[name] for name in ("amsgrad", "maximize", "differentiable"))
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        on_cpu = in_host_memory(group["params"]) and all(weight.dtype == torch.float32 for weight in group["params"])
        return bool(plain and on_cpu and not hooks)

    @torch.no_grad()
    def step(self) -> None:
        """One update of all weights that have a gradient, those with a copy in bf16 by their copies' gradients; steps are counted as torch does."""
        (group,), state = self._optimizer.param_groups, self._optimizer.state
        copies = [copy for copy in self._copies if copy.gradient() is not None]
        stepped = {id(copy.weight) for copy in copies}
        weights = [weight for weight in group["params"] if weight.grad is not None and id(weight) not in stepped]
        steps = [state[weight]["step"] for weight in (*weights, *(copy.weight for copy in copies))]
        if steps:
            torch._foreach_add_(steps, 1)
        if copies:
            _step_copies(copies, group, state, is_adamw=self._kernel is torch._fused_adamw_)
        for copy in self._copies if len(copies) < len(self._copies) else []:
            if id(copy.weight) not in stepped:
                copy.forget()
        if not weights:
            return
        states = [state[weight] for weight in weights]
        beta1, beta2 = group["betas"]
        self._kernel(
            weights, [weight.grad for weight in weights], [each["exp_avg"] for each in states],
            [each["exp_avg_sq"] for each in states], [], steps[: len(weights)], amsgrad=False, lr=group["lr"], beta1=beta1,
            beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip


def can_step_copies(beta1: float) -> bool:
    """Below a half torch computes the first moment another way."""
    return beta1 > 0.5 and kernels(COPIES_KERNELS) is not None


def _step_copies(copies: Sequence[Bf16Copy], group: dict[str, Any], state: dict[Any, Any], is_adamw: bool) -> None:
    module = kernels(COPIES_KERNELS)
    assert module is not None
    rows, gradients, numbers, known = [], [], [], {}
    for copy in copies:
        weight, gradient = copy.weight, copy.gradient()
        assert gradient is not None and weight.is_contiguous()
        gradients.append(gradient.contiguous())  # kept until the kernel has run
        own = state[weight]
        tensors = (weight, gradients[-1], own["exp_avg"], own["exp_avg_sq"], copy.numbers())
        rows.append([tensor.data_ptr() for tensor in tensors])
        step = float(own["step"])
        if step not in known:
            known[step] = _numbers(group, step, is_adamw)
        numbers.append(known[step])
    blocks = _blocks(tuple(copy.weight.numel() for copy in copies))
    arguments = blocks, np.array(rows, np.uint64), np.array(numbers, np.float32)
    with torch.profiler.record_function("Adam, bf16 copies"):
        on_all_threads(module.step_weights, arguments, len(blocks), LEAST_BLOCKS)
    for copy, gradient in zip(copies, gradients, strict=True):
        copy.weight.grad = gradient  # for hooks that read it


def _numbers(group: dict[str, Any], step: float, is_adamw: bool) -> list[float]:
    """In the order of adam_kernels.SHARE and what follows it, by torch's formulas."""
    (beta1, beta2), lr, decay = group["betas"], float(group["lr"]), group["weight_decay"]
    size, root = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    l2, keep = (0.0, 1 - lr * decay) if is_adamw else (decay, 1.0)
    return [1 - beta1, beta2, 1 - beta2, root, group["eps"], size, l2, keep]


@lru_cache(maxsize=8)  # which weights have gradients seldom changes from step to step
def _blocks(counts: tuple[int, ...]) -> Array:
    """[n, 3]: a weight, a block's first number, and how many it has."""
    found = []
    for weight, count in enumerate(counts):
        first = np.arange(0, count, BLOCK)
        found.append(np.stack([np.full_like(first, weight), first, np.minimum(count - first, BLOCK)], axis=1))
    return np.concatenate(found)
