"""Train narrow stacks of linear layers with relu by kernels that go through all layers of a block of samples at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

import numpy as np
import torch
import torchrec.modules.mlp
from torch import nn

from pipeline.devices.cpu.kernel_pool import can_read, kernels, on_all_threads, record
from pipeline.models.layers.mlp import MLP

KERNELS = "pipeline.devices.cpu.kernels.stack"
MOST_WEIGHTS = 1 << 16  # of a stack: more leave the second cache, and oneDNN multiplies wide layers faster
LEAST_GROUP, MOST_GROUPS = 2, 32  # blocks whose gradients are summed together, and groups of a batch
LEAST_LINES = 128  # rows of gradients: fewer are not worth a thread
Array = np.ndarray[Any, Any]


class Shape:
    """What the kernels ask about a stack; `sizes`: of the inputs and of each layer's outputs."""

    def __init__(self, sizes: Sequence[int], has_relu: Sequence[bool]) -> None:
        self.sizes = np.array(sizes, np.uint64)
        self.floors = np.array([0.0 if each else -np.inf for each in has_relu], np.float32)
        padded = [-(-size // 16) * 16 for size in sizes]
        self.acts_per_row = self.num_biases = sum(padded[1:])
        self.num_packed = sum(wide * down for wide, down in pairwise(padded))
        self.lengths = [each for wide, down in pairwise(sizes) for each in (wide * down, down)]  # weights and biases
        self.num_weights, self.num_lines = sum(self.lengths), sum(sizes[1:]) + len(has_relu)
        self.out_features = sizes[-1]
        self.shapes = [each for wide, down in pairwise(sizes) for each in ((down, wide), (down,))]


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, inputs: torch.Tensor, shape: Shape, in_bf16: bool, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.shape, ctx.in_bf16 = shape, in_bf16
        if type(inputs) is not torch.Tensor:
            out = inputs.new_empty(len(inputs), shape.out_features, dtype=torch.float32)
            record("layer_stack", _factors(in_bf16), inputs, *weights, out)
            ctx.save_for_backward(inputs, *weights)
            return out
        inputs = inputs.contiguous()
        out, acts, ctx.back = _run_forward(inputs, shape, in_bf16, weights)
        ctx.save_for_backward(inputs, acts)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        inputs, *saved = ctx.saved_tensors
        for_inputs, shape = ctx.needs_input_grad[0], ctx.shape
        if type(inputs) is not torch.Tensor:
            to_inputs, parts = torch.empty_like(inputs if for_inputs else inputs[:0]), map(torch.empty_like, saved)
            record("layer_stack_backward", _factors(ctx.in_bf16), inputs, *saved, to_inputs)
        else:
            to_inputs, gradients = _run_backward(gradient, inputs, saved[0], ctx.back, shape, for_inputs)
            parts = map(torch.Tensor.view, gradients.split_with_sizes(shape.lengths), shape.shapes)
        return to_inputs if for_inputs else None, None, None, *parts


def _run_forward(
    inputs: torch.Tensor, shape: Shape, in_bf16: bool, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, Array]:
    """The outputs of contiguous inputs, and what backward needs: all layers' outputs, and the weights as it multiplies by them."""
    module = kernels(KERNELS)
    assert module is not None
    rows, count = int(module.ROWS), len(inputs)
    blocks = -(-count // rows)
    forth, back, biases = _packed(module, shape, in_bf16, weights)
    acts = torch.empty(blocks * rows * shape.acts_per_row)
    out = torch.empty(count, shape.out_features)
    kernel = module.forward_bf16 if in_bf16 else module.forward
    arguments = (
        _flat(inputs),
        forth,
        biases,
        shape.sizes,
        shape.floors,
        acts.numpy(),
        _flat(out),
        np.uint64(count),
    )
    on_all_threads(kernel, arguments, blocks, LEAST_GROUP)
    return out, acts, back


def _run_backward(
    gradient: torch.Tensor, inputs: torch.Tensor, acts: torch.Tensor, back: Array, shape: Shape, for_inputs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the inputs, of none unless they are wanted, and of all weights and biases in one row."""
    module = kernels(KERNELS)
    assert module is not None
    count = len(inputs)
    blocks = -(-count // int(module.ROWS))
    groups = min(-(-blocks // LEAST_GROUP), MOST_GROUPS)
    sums = np.empty(groups * (shape.num_packed + shape.num_biases), np.float32)
    to_inputs = torch.empty_like(inputs if for_inputs else inputs[:0])
    kernel = module.backward_bf16 if back.dtype == np.uint32 else module.backward
    arguments = (
        _flat(gradient.float().contiguous()), _flat(inputs), back, shape.sizes, shape.floors, acts.numpy(), sums,
        _flat(to_inputs), np.uint64(count), np.uint64(groups),
    )  # fmt: skip
    on_all_threads(kernel, arguments, groups, 1)
    gradients = torch.empty(shape.num_weights)
    to_add = sums, shape.sizes, np.uint64(groups), gradients.numpy()
    on_all_threads(module.add_groups, to_add, shape.num_lines, LEAST_LINES)
    return to_inputs, gradients


def _factors(in_bf16: bool) -> torch.Tensor:
    """In what a recorded stack multiplies: the first of its tensors."""
    return torch.empty(0, dtype=torch.bfloat16 if in_bf16 else torch.float32)


def _packed(module: Any, shape: Shape, in_bf16: bool, weights: Sequence[torch.Tensor]) -> tuple[Array, Array, Array]:
    """The weights as the kernels multiply by them forward and backward, and the biases."""
    flat = torch.cat([weight.detach().reshape(-1) for weight in weights]).numpy()
    per, kind = (2, np.uint32) if in_bf16 else (1, np.float32)
    forth, back = np.empty(shape.num_packed // per, kind), np.empty(shape.num_packed // per, kind)
    biases = np.empty(shape.num_biases, np.float32)
    module.pack(flat, shape.sizes, np.uint64(per), forth, back, biases)
    return forth, back, biases


def _flat(values: torch.Tensor) -> Array:
    """All numbers of a contiguous tensor in one row; bf16 as uint16."""
    values = values.detach()
    return (values if values.dtype == torch.float32 else values.view(torch.uint16)).numpy().reshape(-1)


class FastStack:
    """In place of a module's forward: [B, I] -> [B, O] in fp32, by the kernels while it trains, else as before."""

    def __init__(self, module: nn.Module, layers: Sequence[tuple[nn.Linear, bool]]) -> None:
        """layers: each with whether relu follows."""
        self._forward = module.forward
        self._inside = [child for child in module.modules() if child is not module]
        self._layers = [layer for layer, _ in layers]
        sizes = [layers[0][0].in_features, *(layer.out_features for layer, _ in layers)]
        self._shape = Shape(sizes, [is_relu for _, is_relu in layers])

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        in_bf16 = _is_bf16()
        if not _takes_part(inputs, in_bf16) or any(child._forward_hooks for child in self._inside):
            return self._forward(inputs)  # type: ignore[no-any-return]
        weights = [layer._parameters[name] for layer in self._layers for name in ("weight", "bias")]
        return _Stack.apply(inputs, self._shape, in_bf16, *weights)  # type: ignore[no-any-return,no-untyped-call]


def stack_kernels(sizes: Sequence[int], batch: int, in_bf16: bool) -> dict[str, Callable[[], object]]:
    """Calls of the kernels on a stack of such widths, of the inputs first, and a batch; none where this CPU lacks the instructions."""
    layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
    if (
        not runs_here(in_bf16)
        or sum(weight.numel() for layer in layers for weight in layer.parameters()) > MOST_WEIGHTS
    ):
        return {}
    shape = Shape(sizes, [index < len(layers) - 1 for index in range(len(layers))])
    weights = [weight.detach() for layer in layers for weight in (layer.weight, layer.bias)]
    inputs, gradient = torch.randn(batch, sizes[0]), torch.randn(batch, sizes[-1])
    _, acts, back = _run_forward(inputs, shape, in_bf16, weights)
    return {
        "layer_stack": lambda: _run_forward(inputs, shape, in_bf16, weights),
        "layer_stack_backward": lambda: _run_backward(gradient, inputs, acts, back, shape, True),
    }


def _is_bf16() -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


def _takes_part(inputs: torch.Tensor, in_bf16: bool) -> bool:
    """Not where nothing is trained."""
    if not torch.is_grad_enabled() or not can_read(inputs, "layer_stack"):
        return False
    kinds = (torch.float32, torch.bfloat16) if in_bf16 else (torch.float32,)
    return inputs.dtype in kinds and inputs.dim() == 2 and len(inputs) > 0


def runs_here(in_bf16: bool) -> bool:
    """Whether this CPU has the kernels' instructions."""
    intrinsics = kernels("pipeline.devices.cpu.kernels.layer_intrinsics")
    if intrinsics is None or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return not in_bf16 or bool(intrinsics.multiplies_bf16())


def speed_up_stacks(model: nn.Module, in_bf16: bool) -> int:
    """Replace the forward of each narrow stack in `model`, where the CPU has the instructions; of how many."""
    if not runs_here(in_bf16):
        return 0
    count, inside = 0, set[int]()
    for each in model.modules():  # parents before their children
        layers = [] if id(each) in inside else stack_of(each)
        weights = [weight for layer, _ in layers for weight in (layer.weight, layer.bias)]
        if layers and all(weight is not None and weight.dtype == torch.float32 for weight in weights):
            inside.update(id(child) for child in each.modules())
            if sum(weight.numel() for weight in weights) <= MOST_WEIGHTS:
                each.forward = FastStack(each, layers)  # type: ignore[method-assign,assignment]
                count += 1
    return count


def stack_of(module: nn.Module) -> list[tuple[nn.Linear, bool]]:
    """The linear layers that a module runs one after the other, each with whether relu follows; none of any other module."""
    if type(module) is MLP:
        return module.linear_layers()
    if type(module) is torchrec.modules.mlp.MLP and isinstance(module._mlp, nn.Sequential):
        layers = [layer for layer in module._mlp if _is_relu_layer(layer)]
        return [(layer._linear, True) for layer in layers] if len(layers) == len(module._mlp) else []
    if type(module) is nn.Sequential and len(module) == 2 and type(module[1]) is nn.Linear:
        first = stack_of(module[0])
        return [*first, (module[1], False)] if first and first[-1][1] else []
    return []


def _is_relu_layer(layer: nn.Module) -> TypeGuard[torchrec.modules.mlp.Perceptron]:
    return type(layer) is torchrec.modules.mlp.Perceptron and layer._activation_fn is torch.relu_
