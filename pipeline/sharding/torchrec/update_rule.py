"""Define how a step updates a table's rows, and update replicated tables by this rule on any
device.

By default (optimizer.sparse.update_rows) a rule is lazy: it changes the rows that a batch touches,
and leaves other rows and their moments unchanged. torch's Adam would also move untouched rows, and
its weight decay would shrink every row. Adam's bias correction uses the step of the run, as
torch.optim.SparseAdam and FBGEMM do. eps is added after the correction, as in torch.optim.AdamW and
FBGEMM. SparseAdam adds it before, which makes its eps larger in the first steps by 1 / sqrt(1 -
beta2 ** step). A row counts as touched if the sum of its gradients is not all zero (in a table
sharded by columns: the sum of the shard's part), because the gradient of a replicated table
contains no more information. SparseAdam and FBGEMM also update rows whose gradient is exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline.config.optimizers import SparseOptimizerConfig, find_optimizer

# The numbers used in devices/cpu/kernels/optimizer.py, which imports Numba.
SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, ROWWISE_ADAM = range(5)


@dataclass(frozen=True)
class UpdateRule:
    """Hold the settings of the tables' optimizer that do not change from step to step.

    l2: l2 * weights is added to the gradient of a touched row. decay: lr * decay * weights is
    subtracted from a touched row, as in AdamW. clip_value, clip_norm: limits of the numbers, then
    of the norm, of the gradient of a row (or a shard's part of it), before l2; 0 means no limit.
    all_rows: untouched rows are updated with a gradient of 0, as by torch.optim.Adam.
    """

    kind: int
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    l2: float = 0.0
    decay: float = 0.0
    clip_value: float = 0.0
    clip_norm: float = 0.0
    all_rows: bool = False

    @classmethod
    def of(cls, config: SparseOptimizerConfig, l2: float = 0.0, num_rows: int = 0) -> UpdateRule:
        """Return the rule of a table; None if the optimizer has none. l2, num_rows: those of the complete table."""
        entry = find_optimizer(config.name)
        assert entry.cpu_kernel is not None
        decay = config.weight_decay if config.decouples else 0.0
        return cls(
            entry.cpu_kernel, config.eps, config.beta1, config.beta2, l2 + (config.weight_decay - decay), decay,
            config.gradient_clip_value or 0.0, config.gradient_clip_norm or 0.0, config.updates_all(num_rows),
        )  # fmt: skip

    @property
    def is_lazy(self) -> bool:
        """Return whether an untouched row would change if it were updated with a gradient of 0."""
        return bool(self.kind >= ADAM or self.l2 or self.decay)

    @property
    def extras(self) -> str:
        """Return the settings that FBGEMM ignores on CPU, with their values; empty if there are none."""
        values = {
            "weight_decay or tables.*.l2": self.l2 or self.decay,
            "gradient_clip_value": self.clip_value,
            "gradient_clip_norm": self.clip_norm,
        }
        return ", ".join(f"{name}={value:g}" for name, value in values.items() if value)

    def numbers(self, lr: float, step: int) -> np.ndarray[Any, Any]:
        """Return the float32 numbers of step `step` (the first is 1), in the order of kernels.optimizer.LR."""
        first, second = 1 - self.beta1**step, 1 - self.beta2**step
        return np.array(
            [lr, self.eps, self.beta1, 1 - self.beta1, 1 / first, self.beta2, 1 - self.beta2, 1 / second,
             1 - lr * self.decay, self.clip_value, self.clip_norm],
            dtype=np.float32,
        )  # fmt: skip


# Kind -> its states; True: one number per row, as [rows, 1].
STATES: dict[int, dict[str, bool]] = {
    ADAGRAD: {"sum": False},
    ROWWISE_ADAGRAD: {"sum": True},
    ADAM: {"exp_avg": False, "exp_avg_sq": False},
    ROWWISE_ADAM: {"exp_avg": False, "exp_avg_sq": True},
}


class TouchedRows(torch.optim.Optimizer):
    """Optimize groups of tables, each [rows, dim] fp32. All rules are of one kind."""

    def __init__(self, groups: list[dict[str, Any]], rules: Mapping[nn.Parameter, UpdateRule], lr: float) -> None:
        super().__init__(groups, {"lr": lr})
        self.rules, self.num_steps = rules, 0
        for weight, rule in rules.items():
            for name, by_row in STATES.get(rule.kind, {}).items():
                shape = (len(weight), 1) if by_row else weight.shape
                self.state[weight][name] = torch.zeros(shape, dtype=torch.float32, device=weight.device)

    def updates_all(self, weight: nn.Parameter) -> bool:
        """Return whether a step also updates this table's untouched rows."""
        return self.rules[weight].all_rows

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        self.num_steps += 1
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    rule, state = self.rules[weight], self.state[weight]
                    _update(weight, weight.grad, state, rule, group["lr"], self.num_steps)


def _update(
    weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], rule: UpdateRule, lr: float, step: int
) -> None:
    touched = (gradient != 0).any(dim=1, keepdim=True)  # a row with NaN is not equal to 0
    if rule.all_rows:
        touched = torch.ones_like(touched)
    if rule.clip_value:
        gradient = gradient.clamp(-rule.clip_value, rule.clip_value)
    if rule.clip_norm:
        norm = gradient.norm(dim=1, keepdim=True)
        gradient = torch.where(norm > rule.clip_norm, gradient * (rule.clip_norm / norm), gradient)
    if rule.l2:
        gradient = gradient + rule.l2 * weight
    square = gradient.square()
    fresh, direction = dict(state), gradient
    if rule.kind in (ADAGRAD, ROWWISE_ADAGRAD):
        fresh["sum"] = state["sum"] + (square if rule.kind == ADAGRAD else square.mean(dim=1, keepdim=True))
        direction = gradient / (fresh["sum"].sqrt() + rule.eps)
    elif rule.kind in (ADAM, ROWWISE_ADAM):
        square = square if rule.kind == ADAM else square.mean(dim=1, keepdim=True)
        fresh["exp_avg"] = rule.beta1 * state["exp_avg"] + (1 - rule.beta1) * gradient
        fresh["exp_avg_sq"] = rule.beta2 * state["exp_avg_sq"] + (1 - rule.beta2) * square
        root = (fresh["exp_avg_sq"] / (1 - rule.beta2**step)).sqrt()
        direction = fresh["exp_avg"] / (1 - rule.beta1**step) / (root + rule.eps)
    for name, values in fresh.items():
        state[name].copy_(torch.where(touched, values, state[name]))
    if rule.decay:
        direction = direction + rule.decay * weight
    weight.sub_(torch.where(touched, lr * direction, 0.0))
