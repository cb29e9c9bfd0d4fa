"""Train fp32 linear layers by oneDNN on CPUs where that is faster than torch's own products (devices.cpu.products)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.mlp import Perceptron

from pipeline.devices.base import autocast_dtype
from pipeline.devices.cpu.kernel_pool import can_read, kernels, on_all_threads
from pipeline.devices.cpu.products import (
    RECORDED,
    gradient_of_inputs,
    gradient_of_weight,
    onednn_multiplies_faster,
    outputs,
    takes_turned,
)

KERNELS = "pipeline.devices.cpu.kernels.gradients"
NOTHING, LINES = np.empty(0, np.float32), np.arange(16, dtype=np.uint32)


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
        wants_inputs, wants_weight, wants_bias, _ = ctx.needs_input_grad
        turns = wants_weight and takes_turned(gradient, inputs)
        gradient, turned, total = folded(gradient.contiguous(), values, turns, wants_bias)
        return (
            gradient_of_inputs(gradient, weight) if wants_inputs else None,
            gradient_of_weight(gradient, inputs, turned) if wants_weight else None,
            total,
            None,
        )


def folded(
    gradient: torch.Tensor, values: torch.Tensor | None, turns: bool, sums: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """gradient [B, O] through the relu that gave `values`; the same transposed, if it `turns`, and its sum over samples [O], if it `sums`.

    Samples are summed in blocks, and these in their order, whatever the number of threads.
    """
    module = kernels(KERNELS)
    count, width = gradient.shape
    if module is None or not gradient.numel() or type(gradient) is not torch.Tensor:
        masked = gradient if values is None else torch.ops.aten.threshold_backward(gradient, values, 0)
        return masked, None, masked.sum(0) if sums else None
    if values is None and not turns and not sums:
        return gradient, None, None
    masked = gradient if values is None else torch.empty_like(gradient)
    turned = gradient.new_empty(width, count) if turns else None
    blocks = -(-count // int(module.ROWS))
    partial = torch.empty(blocks, width) if sums else None
    arrays = (_flat(gradient), _flat(values), _flat(masked), _flat(turned), _flat(partial), LINES)
    on_all_threads(module.fold, (*arrays, np.uint64(count), np.uint64(width)), blocks, 1)
    return masked, turned, None if partial is None else partial.sum(0)


def _flat(values: torch.Tensor | None) -> np.ndarray[Any, Any]:
    """All numbers of a contiguous tensor in one row; none of None."""
    return NOTHING if values is None else values.detach().numpy().reshape(-1)


def linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, is_relu: bool = False
) -> torch.Tensor:
    """[..., I] -> [..., O], by whichever is faster here; with relu in the same pass."""
    if not _is_for_us(inputs):
        values = F.linear(inputs, weight, bias)
        return torch.relu_(values) if is_relu else values
    flat = inputs if inputs.dim() == 2 else inputs.reshape(-1, inputs.shape[-1])
    values = _Linear.apply(flat, weight, bias, is_relu)  # type: ignore[no-untyped-call]
    return values if inputs.dim() == 2 else values.view(*inputs.shape[:-1], len(weight))


def _is_for_us(inputs: torch.Tensor) -> bool:
    """Not under autocast, whose products are oneDNN's already."""
    is_fp32 = can_read(inputs, RECORDED) and inputs.dtype == torch.float32
    return is_fp32 and autocast_dtype(inputs) is None and onednn_multiplies_faster()


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


class FastCross:
    """In place of the forward of TorchRec's low-rank cross network: [B, width] -> [B, width]."""

    def __init__(self, network: LowRankCrossNet) -> None:
        self.network = network

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        network, crossed = self.network, input
        in_one_type = input.dtype == torch.float32 and autocast_dtype(input) is None
        for (down, up), bias in zip(self.factors(input), network.bias, strict=True):
            inner = linear(crossed, down)
            if in_one_type:
                crossed = torch.addcmul(crossed, input, linear(inner, up, bias))
            else:  # autocast's product is bf16, the sum with the bias is not
                crossed = input * (linear(inner, up) + bias) + crossed
        return crossed

    def factors(self, input: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each layer: what maps down, and what maps up again."""
        return list(zip(self.network.V_kernels, self.network.W_kernels, strict=True))


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


def speed_up_crosses(model: nn.Module) -> int:
    """Replace the forward of each of TorchRec's low-rank cross networks in `model`, in fp32 and bf16; of how many."""
    networks = [module for module in model.modules() if type(module) is LowRankCrossNet]
    for network in networks:
        network.forward = FastCross(network)  # type: ignore[method-assign,assignment]
    return len(networks)
