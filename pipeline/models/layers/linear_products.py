"""Train fp32 linear layers by oneDNN on CPUs where that is faster than torch's own products (runtime.kernels.products)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.mlp import Perceptron

from pipeline.runtime.kernels.optional import kernels
from pipeline.runtime.kernels.products import (
    RECORDED,
    gradient_of_inputs,
    gradient_of_weight,
    onednn_multiplies_faster,
    outputs,
    takes_turned,
)
from pipeline.runtime.process.kernel_pool import is_recorded, on_all_threads

KERNELS = "pipeline.runtime.kernels.gradient_kernels"
FEWEST, MOST = 1 << 15, 1 << 19  # numbers that are cast on one thread here: fewer are by torch as well
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
        return masked, None, masked.sum(0, dtype=torch.float32) if sums else None
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
    """All numbers of a contiguous tensor in one row, bf16 as uint16; none of None."""
    if values is None:
        return NOTHING
    values = values.detach()
    return (values if values.dtype == torch.float32 else values.view(torch.uint16)).numpy().reshape(-1)


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """values.to(dtype), between fp32 and bf16; of some 100,000 numbers on this thread alone, for which torch would wake another."""
    module = kernels(KERNELS)
    if module is None or values.dtype == dtype or not FEWEST < values.numel() <= MOST or not values.is_contiguous():
        return values.to(dtype)
    out = torch.empty_like(values, dtype=dtype)
    module.cast(_flat(values), _flat(out))
    return out


class _CastLinear(torch.autograd.Function):
    """The same in bf16, as autocast has it, but that the bias's gradient is summed in fp32."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_relu: bool
    ) -> torch.Tensor:
        narrow, factors = _cast(inputs, torch.bfloat16), _cast(weight, torch.bfloat16)
        values = outputs(narrow, factors, None if bias is None else _cast(bias, torch.bfloat16), is_relu)
        ctx.save_for_backward(narrow, factors, values if is_relu else None)
        ctx.dtype = inputs.dtype
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        inputs, weight, values = ctx.saved_tensors
        wants_inputs, wants_weight, wants_bias, _ = ctx.needs_input_grad
        gradient, _, total = folded(gradient.to(torch.bfloat16).contiguous(), values, False, wants_bias)
        return (
            (gradient @ weight).to(ctx.dtype) if wants_inputs else None,
            _cast(gradient.t() @ inputs, torch.float32) if wants_weight else None,
            total,
            None,
        )


def linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, is_relu: bool = False
) -> torch.Tensor:
    """[..., I] -> [..., O], by whichever is faster here; with relu in the same pass."""
    product = _product(inputs, weight)
    if product is None:
        values = F.linear(inputs, weight, bias)
        return torch.relu_(values) if is_relu else values
    flat = inputs if inputs.dim() == 2 else inputs.reshape(-1, inputs.shape[-1])
    values = product.apply(flat, weight, bias, is_relu)  # type: ignore[no-untyped-call]
    return values if inputs.dim() == 2 else values.view(*inputs.shape[:-1], len(weight))


def _product(inputs: torch.Tensor, weight: torch.Tensor) -> type[_Linear | _CastLinear] | None:
    """None while torch.export, torch.compile or torch.fx traces, and where torch's own way is as fast: autocast's without gradients among them."""
    is_plain = type(inputs) is torch.Tensor
    if torch.compiler.is_compiling() or not (is_plain or is_recorded(RECORDED)) or inputs.device.type != "cpu":
        return None
    if torch.is_autocast_enabled("cpu"):
        fits = torch.get_autocast_dtype("cpu") == torch.bfloat16 and inputs.dtype in (torch.float32, torch.bfloat16)
        trains = torch.is_grad_enabled() and weight.requires_grad and weight.dtype == torch.float32
        return _CastLinear if is_plain and fits and trains else None
    return _Linear if inputs.dtype == torch.float32 and onednn_multiplies_faster() else None


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
        self._network = network

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        network, crossed = self._network, input
        in_one_type = input.dtype == torch.float32 and not torch.is_autocast_enabled(input.device.type)
        for down, up, bias in zip(network.V_kernels, network.W_kernels, network.bias, strict=True):
            inner = linear(crossed, down)
            if in_one_type:
                crossed = torch.addcmul(crossed, input, linear(inner, up, bias))
            else:  # autocast's product is bf16, the sum with the bias is not
                crossed = input * (linear(inner, up) + bias) + crossed
        return crossed


def relu_of(layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    """relu of what the layer gives [B, O], in one pass where it has a FastLinear."""
    if isinstance(layer.forward, FastLinear):
        return linear(inputs, layer.weight, layer.bias, is_relu=True)
    return torch.relu_(layer(inputs))


def speed_up_linear_layers(model: nn.Module, in_bf16: bool = False) -> int:
    """Replace the forward of each linear layer in `model`, where that is faster on this CPU; of how many."""
    if not (kernels(KERNELS) if in_bf16 else onednn_multiplies_faster()):
        return 0
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
    for layer in layers:
        layer.forward = FastLinear(layer)  # type: ignore[method-assign,assignment]
    for module in model.modules():
        if type(module) is Perceptron and module._activation_fn is torch.relu_:
            module.forward = FastPerceptron(module)  # type: ignore[method-assign,assignment]
        if type(module) is LowRankCrossNet:
            module.forward = FastCross(module)  # type: ignore[method-assign,assignment]
    return len(layers)
