"""Train fp32 linear layers by oneDNN on CPUs where that is faster than torch's own products (runtime.kernels.products)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.mlp import Perceptron

from pipeline.runtime.kernels.products import (
    RECORDED,
    gradient_of_inputs,
    gradient_of_weight,
    onednn_multiplies_faster,
    outputs,
)
from pipeline.runtime.process.kernel_pool import is_recorded


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_relu: bool
    ) -> torch.Tensor:
        values = outputs(inputs, weight, bias, is_relu)
        ctx.save_for_backward(inputs, weight, values if is_relu else None)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        inputs, weight, values = ctx.saved_tensors
        gradient = gradient.contiguous()
        if values is not None:
            gradient = torch.ops.aten.threshold_backward(gradient, values, 0)
        wants_inputs, wants_weight, wants_bias, _ = ctx.needs_input_grad
        return (
            gradient_of_inputs(gradient, weight) if wants_inputs else None,
            gradient_of_weight(gradient, inputs) if wants_weight else None,
            gradient.sum(0) if wants_bias else None,
            None,
        )


def linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, is_relu: bool = False
) -> torch.Tensor:
    """[..., I] -> [..., O], by whichever is faster here; with relu in the same pass."""
    if not onednn_multiplies_faster() or not _takes_part(inputs):
        values = F.linear(inputs, weight, bias)
        return torch.relu_(values) if is_relu else values
    flat = inputs if inputs.dim() == 2 else inputs.reshape(-1, inputs.shape[-1])
    values = _Linear.apply(flat, weight, bias, is_relu)  # type: ignore[no-untyped-call]
    return values if inputs.dim() == 2 else values.view(*inputs.shape[:-1], len(weight))


def _takes_part(inputs: torch.Tensor) -> bool:
    """Not under autocast, whose products are bf16, nor while torch.export, torch.compile or torch.fx traces."""
    is_plain = type(inputs) is torch.Tensor or is_recorded(RECORDED)
    if torch.compiler.is_compiling() or not is_plain or inputs.dtype != torch.float32:
        return False
    return inputs.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


class FastLinear:
    """In place of a linear layer's forward: [..., I] -> [..., O]."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return linear(inputs, self._layer.weight, self._layer.bias)


class FastPerceptron:
    """In place of the forward of TorchRec's layer with relu: [B, I] -> [B, O]."""

    def __init__(self, layer: Perceptron) -> None:
        self._layer = layer

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return relu_of(self._layer._linear, input)


def relu_of(layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    """relu of what the layer gives [B, O], in one pass where it has a FastLinear."""
    if isinstance(layer.forward, FastLinear):
        return linear(inputs, layer.weight, layer.bias, is_relu=True)
    return torch.relu_(layer(inputs))


def speed_up_linear_layers(model: nn.Module) -> int:
    """Replace the forward of each linear layer in `model`, where that is faster on this CPU; of how many."""
    if not onednn_multiplies_faster():
        return 0
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
    for layer in layers:
        layer.forward = FastLinear(layer)  # type: ignore[method-assign,assignment]
    for module in model.modules():
        if type(module) is Perceptron and module._activation_fn is torch.relu_:
            module.forward = FastPerceptron(module)  # type: ignore[method-assign,assignment]
    return len(layers)
