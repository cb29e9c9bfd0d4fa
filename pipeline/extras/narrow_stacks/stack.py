"""Train narrow stacks of linear layers with relu by kernels that run a block of samples through all
layers.

With two threads, torch wakes the second thread for each of some sixty small operations. Waking
takes longer than the operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeGuard

import numpy as np
import torch
import torchrec.modules.mlp
from torch import nn

from pipeline.devices.base import autocast_dtype
from pipeline.devices.cpu.kernel_pool import can_read, kernels, on_all_threads

KERNELS = "pipeline.extras.narrow_stacks.kernels"
# in a stack; more do not fit the second-level cache, and oneDNN multiplies wide layers faster
MAX_WEIGHTS = 1 << 16
MIN_GROUP, MAX_GROUPS = 2, 32  # blocks whose gradients are summed together; groups of a batch
Array = np.ndarray[Any, Any]


class Shape:
    """Describe a stack. sizes: the width of the inputs, then of each layer's outputs."""

    def __init__(self, sizes: Sequence[int], has_relu: Sequence[bool]) -> None:
        floors = np.array([0.0 if each else -np.inf for each in has_relu], np.float32)
        self.sizes = sizes
        self.of_kernels = np.array(sizes, np.uint64), floors
        self.padded = [-(-size // 16) * 16 for size in sizes]
        self.num_biases = sum(self.padded[1:])
        self.num_packed = sum(wide * down for wide, down in pairwise(self.padded))


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, shape: Shape, *weights: torch.Tensor) -> torch.Tensor:
        module: Any = kernels(KERNELS)
        inputs, count = inputs.contiguous(), len(inputs)
        blocks = -(-count // int(module.ROWS))
        flat = torch.cat([weight.detach().reshape(-1) for weight in weights]).numpy()
        forth, ctx.back = np.empty(shape.num_packed, np.float32), np.empty(shape.num_packed, np.float32)
        biases = np.empty(shape.num_biases, np.float32)
        module.pack(flat, shape.of_kernels[0], forth, ctx.back, biases)
        acts, out = torch.empty(blocks * int(module.ROWS) * shape.num_biases), torch.empty(count, shape.sizes[-1])
        arguments = _flat(inputs), (forth, biases), shape.of_kernels, acts.numpy(), _flat(out), np.uint64(count)
        on_all_threads(module.forward, arguments, blocks, MIN_GROUP)
        ctx.shape = shape
        ctx.save_for_backward(inputs, acts)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        module: Any = kernels(KERNELS)
        (inputs, acts), shape = ctx.saved_tensors, ctx.shape
        blocks = -(-len(inputs) // int(module.ROWS))
        groups = min(-(-blocks // MIN_GROUP), MAX_GROUPS)
        sums = torch.empty(groups, shape.num_packed + shape.num_biases)
        to_inputs = torch.empty_like(inputs if ctx.needs_input_grad[0] else inputs[:0])
        given = _flat(gradient.contiguous()), _flat(inputs), acts.numpy(), np.uint64(len(inputs))
        arguments = given, ctx.back, shape.of_kernels, _flat(sums), _flat(to_inputs), np.uint64(groups)
        on_all_threads(module.backward, arguments, groups, 1)
        parts, at = [], 0
        total = sums.sum(0)
        for (wide, down), (into, outs) in zip(pairwise(shape.padded), pairwise(shape.sizes), strict=True):
            parts.append(total[at : at + wide * down].view(down, wide)[:outs, :into].contiguous())
            parts.append(total[at + wide * down :][:outs])
            at += wide * down + down
        return to_inputs if ctx.needs_input_grad[0] else None, None, *parts


def _flat(values: torch.Tensor) -> Array:
    return values.detach().numpy().reshape(-1)


class FastStack:
    """Replace a module's forward [B, I] -> [B, O] with the kernels during training in fp32."""

    def __init__(self, module: nn.Module, layers: Sequence[tuple[nn.Linear, bool]]) -> None:
        """layers: the linear layers, each with whether relu follows."""
        self._forward = module.forward
        self._inside = [child for child in module.modules() if child is not module]
        self._layers = [layer for layer, _ in layers]
        sizes = [layers[0][0].in_features, *(layer.out_features for layer, _ in layers)]
        self._shape = Shape(sizes, [is_relu for _, is_relu in layers])

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        is_fp32 = inputs.dtype == torch.float32 and autocast_dtype(inputs) is None
        fits = is_fp32 and inputs.dim() == 2 and len(inputs) > 0
        is_plain = not fits or not torch.is_grad_enabled() or not can_read(inputs)
        if is_plain or any(child._forward_hooks for child in self._inside):
            return self._forward(inputs)
        weights = [layer._parameters[name] for layer in self._layers for name in ("weight", "bias")]
        return _Stack.apply(inputs, self._shape, *weights)


def speed_up_stacks(model: nn.Module) -> int:
    """Replace the forward of each narrow stack in `model`, if the CPU has the instructions. Return how many."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or kernels(KERNELS) is None:
        return 0
    count, inside = 0, set[int]()
    for each in model.modules():  # parents before their children
        layers = [] if id(each) in inside else stack_of(each)
        weights = [weight for layer, _ in layers for weight in (layer.weight, layer.bias)]
        if layers and all(weight is not None and weight.dtype == torch.float32 for weight in weights):
            inside.update(id(child) for child in each.modules())
            if sum(weight.numel() for weight in weights) <= MAX_WEIGHTS:
                each.forward = FastStack(each, layers)
                count += 1
    return count


def stack_of(module: nn.Module) -> list[tuple[nn.Linear, bool]]:
    """Return the linear layers that a module runs in sequence, each with whether relu follows; the
    list is empty if the module is not such a stack.
    """
    if hasattr(module, "linear_layers"):  # models.layers.mlp.MLP
        return module.linear_layers()  # type: ignore[operator]
    if type(module) is torchrec.modules.mlp.MLP and isinstance(module._mlp, nn.Sequential):
        layers = [layer for layer in module._mlp if _is_relu_layer(layer)]
        return [(layer._linear, True) for layer in layers] if len(layers) == len(module._mlp) else []
    if type(module) is nn.Sequential and len(module) == 2 and type(module[1]) is nn.Linear:
        first = stack_of(module[0])
        return [*first, (module[1], False)] if first and first[-1][1] else []
    return []


def _is_relu_layer(layer: nn.Module) -> TypeGuard[torchrec.modules.mlp.Perceptron]:
    return type(layer) is torchrec.modules.mlp.Perceptron and layer._activation_fn is torch.relu_
