"""Update the rows of replicated tables that a batch touched, by torch's operations on any device.

torch's Adam would also move untouched rows by their old momentum, and its weight decay would shrink
every row at every step. The optimizer of a sharded table changes only the rows of the batch.
Replicated tables follow the same rule (update_rule.py), so that a run does not depend on its plan.
On CPU flat_update.py does this in one kernel call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipeline.sharding.torchrec.update_rule import ADAGRAD, ADAM, ROWWISE_ADAGRAD, ROWWISE_ADAM, UpdateRule

# Kind -> its states; True: one number per row, as [rows, 1].
STATES: dict[int, dict[str, bool]] = {
    ADAGRAD: {"sum": False},
    ROWWISE_ADAGRAD: {"sum": True},
    ADAM: {"exp_avg": False, "exp_avg_sq": False},
    ROWWISE_ADAM: {"exp_avg": False, "exp_avg_sq": True},
}


class TouchedRows(torch.optim.Optimizer):
    """Optimize one group with a variable rate.

    `rules[i]`, all of one kind, is the rule of `weights[i]`, [rows, dim] in fp32.
    """

    def __init__(self, weights: Sequence[nn.Parameter], rules: Sequence[UpdateRule], lr: float) -> None:
        super().__init__(list(weights), {"lr": lr})
        self.rules, self.num_steps = list(rules), 0
        for weight, rule in zip(weights, rules, strict=True):
            for name, by_row in STATES.get(rule.kind, {}).items():
                shape = (len(weight), 1) if by_row else weight.shape
                self.state[weight][name] = torch.zeros(shape, dtype=torch.float32, device=weight.device)

    def updates_all(self, weight: nn.Parameter) -> bool:
        """Return whether a step also updates the rows of this table that the batch does not
        touch.
        """
        (group,) = self.param_groups
        return any(rule.all_rows for one, rule in zip(group["params"], self.rules, strict=True) if one is weight)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        self.num_steps += 1
        (group,) = self.param_groups
        for weight, rule in zip(group["params"], self.rules, strict=True):
            if weight.grad is not None:
                _update(weight, weight.grad, self.state[weight], rule, group["lr"], self.num_steps)


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
