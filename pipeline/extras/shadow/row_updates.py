"""Implement FBGEMM's optimizers of rows (fbgemm_gpu/codegen/genscript/optimizers.py).

A state tensor is flat, in HBM or UVM. A table's part begins at the table's offset, and has one
number per row, or as many as the row.
"""

from __future__ import annotations

import re
from typing import Any

import torch

_DEVICE = 0  # FBGEMM's EmbeddingLocation
_L2, _DECOUPLED = 1, (2, 5)  # FBGEMM's WeightDecayMode: NONE is 0


class _State:
    """The state of one table's rows in a state tensor of a call (momentum1, momentum2, row_counter)."""

    def __init__(self, call: dict[str, Any], name: str, feature: int, dim: int) -> None:
        on_device = int(call[f"{name}_placements"][feature]) == _DEVICE
        flat = call[f"{name}_dev" if on_device else f"{name}_uvm"].detach().view(-1)
        begin = int(call[f"{name}_offsets"][feature])
        self.rows = flat[begin : begin + (len(flat) - begin) // dim * dim].view(-1, dim)

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows[ids].float()

    def write(self, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        self.rows[ids] = values.to(self.rows.dtype)
        return values


def update_rows(
    name: str, call: dict[str, Any], feature: int, ids: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """Return the new weights [ids, dim] and write the new state. name: of the backward operation."""
    found = re.search(r"backward_codegen_(\w+?)_(un)?weighted(_vbe)?(_gwd)?_exact_cuda", name)
    assert found is not None, name
    optimizer = found.group(1)
    if found.group(4) or optimizer not in _UPDATES:
        raise NotImplementedError(f"the shadow GPU has no formula for {name}; they are in row_updates.py")
    learning_rate = float(call["learning_rate_tensor"])

    def state(which: str, dim: int) -> _State:
        return _State(call, which, feature, dim)

    return _UPDATES[optimizer](call, state, ids, weights, grad, learning_rate)


def _sgd(call: Any, state: Any, ids: Any, weights: Any, grad: Any, lr: float) -> torch.Tensor:
    return weights - lr * grad


def _adagrad(call: Any, state: Any, ids: Any, weights: Any, grad: Any, lr: float) -> torch.Tensor:
    sums = state("momentum1", weights.shape[1])
    total = sums.write(ids, sums.read(ids) + grad.square())
    return weights - lr * grad / (total.sqrt() + call["eps"])


def _rowwise_adagrad(call: Any, state: Any, ids: Any, weights: Any, grad: Any, lr: float) -> torch.Tensor:
    decay, mode, max_norm = call["weight_decay"], call["weight_decay_mode"], call["max_norm"]
    sums = state("momentum1", 1)
    decayed = grad + decay * weights if mode == _L2 else grad
    total = sums.write(ids, sums.read(ids) + decayed.square().mean(1, keepdim=True))
    step = lr / (total.sqrt() + call["eps"])
    kept = {_L2: 1 - step * decay, **dict.fromkeys(_DECOUPLED, 1 - lr * decay)}.get(mode, 1.0)
    weights = kept * weights - step * grad
    if max_norm > 0:
        norm = weights.norm(dim=1, keepdim=True)
        weights = torch.where(norm > max_norm, weights * (max_norm / norm), weights)
    return weights


def _moments(call: Any, state: Any, ids: Any, grad: Any, rowwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Adam's averages of the gradient and of its square. With `rowwise`, the second average is per row."""
    beta1, beta2, dim = call["beta1"], call["beta2"], grad.shape[1]
    first, second = state("momentum1", dim), state("momentum2", 1 if rowwise else dim)
    square = grad.square().mean(1, keepdim=True) if rowwise else grad.square()
    mean = first.write(ids, first.read(ids) * beta1 + (1 - beta1) * grad)
    return mean, second.write(ids, second.read(ids) * beta2 + (1 - beta2) * square)


def _adam_direction(call: Any, mean: Any, square: Any, steps: Any) -> torch.Tensor:
    unbiased = mean / (1 - call["beta1"] ** steps)
    return unbiased / ((square / (1 - call["beta2"] ** steps)).sqrt() + call["eps"])


def _adam(call: Any, state: Any, ids: Any, weights: Any, grad: Any, lr: float) -> torch.Tensor:
    mean, square = _moments(call, state, ids, grad, rowwise=False)
    steps: Any = int(call["iter"])
    if call["use_rowwise_bias_correction"]:
        counts = state("row_counter", 1)
        steps = counts.write(ids, counts.read(ids) + 1)
    return weights - lr * (_adam_direction(call, mean, square, steps) + call["weight_decay"] * weights)


def _partial_rowwise_adam(call: Any, state: Any, ids: Any, weights: Any, grad: Any, lr: float) -> torch.Tensor:
    mean, square = _moments(call, state, ids, grad, rowwise=True)
    direction = _adam_direction(call, mean, square, int(call["iter"]))
    return weights - lr * (direction + call["weight_decay"] * weights)


def _lamb(call: Any, state: Any, ids: Any, weights: Any, grad: Any, lr: float, rowwise: bool = False) -> torch.Tensor:
    mean, square = _moments(call, state, ids, grad, rowwise)
    direction = _adam_direction(call, mean, square, int(call["iter"])) + call["weight_decay"] * weights
    ratio = weights.norm(dim=1, keepdim=True) / direction.norm(dim=1, keepdim=True)
    return weights - lr * ratio * direction


def _partial_rowwise_lamb(call: Any, state: Any, ids: Any, weights: Any, grad: Any, lr: float) -> torch.Tensor:
    return _lamb(call, state, ids, weights, grad, lr, rowwise=True)


def _lars_sgd(call: Any, state: Any, ids: Any, weights: Any, grad: Any, lr: float) -> torch.Tensor:
    decay, velocity = call["weight_decay"], state("momentum1", weights.shape[1])
    norm, slope = weights.norm(dim=1, keepdim=True), grad.norm(dim=1, keepdim=True)
    rate = lr * call["eta"] * norm / (slope + decay * norm)
    step = velocity.write(ids, call["momentum"] * velocity.read(ids) + rate * (grad + decay * weights))
    return weights - step


_UPDATES = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "partial_rowwise_adam": _partial_rowwise_adam,
    "lamb": _lamb,
    "partial_rowwise_lamb": _partial_rowwise_lamb,
    "lars_sgd": _lars_sgd,
}
