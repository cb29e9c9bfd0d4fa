"""Multiply fp32 linear layers by oneDNN on CPUs where torch's own BLAS uses half of their width.

torch multiplies fp32 matrices by MKL, which runs AVX2 code on AMD's CPUs though they have AVX-512. oneDNN, which torch brings along for
bf16, does not look at the vendor: 1.8 to 2.4 times as fast there (docs/performance.md). On Intel's CPUs MKL stays. oneDNN's
products have the same bits on any number of threads.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.mlp import Perceptron

LEAST_WIDTH = 8  # columns: narrower products are bound by memory, where oneDNN is no faster


@cache
def onednn_multiplies_faster() -> bool:
    """By the CPU's vendor and width alone, not by a measurement: a job that goes on computes the same numbers."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    info = Path("/proc/cpuinfo")
    return info.is_file() and "AuthenticAMD" in info.read_text(errors="replace")


def outputs(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_relu: bool = False
) -> torch.Tensor:
    """inputs [B, I] times weight [O, I] transposed, plus bias [O]: [B, O]."""
    if _is_for_onednn(inputs, weight):
        return _multiply(inputs, weight, bias, is_relu)
    values = F.linear(inputs, weight, bias)
    return values.relu_() if is_relu else values


def gradient_of_inputs(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[B, O] times [O, I]: [B, I]."""
    return _multiply(gradient, weight.t()) if _is_for_onednn(gradient, weight) else gradient @ weight


def gradient_of_weight(gradient: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """[B, O] transposed times [B, I]: [O, I]. The narrower one is transposed in memory, by oneDNN's wrapper."""
    if not _is_for_onednn(gradient, inputs):
        return gradient.t() @ inputs
    if 2 * inputs.shape[1] < gradient.shape[1]:
        return _multiply(inputs.t(), gradient.t()).t()
    return _multiply(gradient.t(), inputs.t())


def _is_for_onednn(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.dtype == second.dtype == torch.float32
        and min(*first.shape, *second.shape) >= LEAST_WIDTH
        and onednn_multiplies_faster()
    )


def _multiply(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, is_relu: bool = False
) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
        inputs, weight, bias, "relu" if is_relu else "none", [], ""
    )
    return product


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
    if torch.compiler.is_compiling() or type(inputs) is not torch.Tensor or inputs.dtype != torch.float32:
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
