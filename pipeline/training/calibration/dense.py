"""Time the dense layers' operations: matrix products, batched products, operations by bytes, and optimizers' updates."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise, product
from typing import TypeVar

import torch
import torch.nn.functional as F

from pipeline.config.optimizers import all_optimizers, find_optimizer
from pipeline.config.training import DenseOptimizerConfig
from pipeline.devices.cpu.products import gradient_of_inputs, gradient_of_weight, is_for_onednn, outputs
from pipeline.models.layers.stack import MOST_WEIGHTS, stack_kernels
from pipeline.planner.step_time.measurements import Number
from pipeline.training.calibration.clock import Bench

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST_FLOPS = 6e9
BLOCK_NUMBERS = 1 << 16
WIDTHS = (1, 8, 13, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SIZES = tuple(int(4**power) for power in (3, 5, 6, 7, 8, 9, 10, 11))  # numbers
BatchShape = tuple[int, int, int]
T = TypeVar("T")


def measure_dense(bench: Bench, seconds: float, seed: int) -> None:
    """About `seconds` in all. Shapes are drawn by the seed, so ranks that measure at once, and passes, measure the same."""
    layers, stacks, dots = (random.Random(f"{seed} {kind}") for kind in ("layers", "stacks", "dots"))
    shapes = enumerate(bench.within(0.5 * seconds, _with_dtypes(_linear_shapes(layers)), least=12))
    for number, ((batch, out, into), dtype) in shapes:
        _time_linear(bench, batch, out, into, dtype, number % 4 == 0)
    for (batch, sizes), dtype in bench.within(0.1 * seconds, _with_dtypes(_stack_shapes(stacks)), least=8):
        _time_stack(bench, batch, sizes, dtype)
    for (batch, rows, dim), dtype in bench.within(0.25 * seconds, _with_dtypes(_dot_shapes(dots)), least=8):
        _time_dots(bench, batch, rows, dim, dtype)
    for (name, call), dtype in bench.within(0.2 * seconds, product(BY_BYTES.items(), DTYPES), least=10**6):
        for size in SIZES if name not in SLOW else SIZES[:-2]:
            _time_by_bytes(bench, name, call, size, dtype)
    updates = product(_dense_optimizers(), SIZES[1:7], NUM_TENSORS)
    for name, numbers, tensors in bench.within(0.1 * seconds, updates, least=10**6):
        _time_optimizer(bench, name, numbers, tensors)


def _with_dtypes(shapes: Iterator[T]) -> Iterator[tuple[T, str]]:
    return ((shape, dtype) for shape in shapes for dtype in DTYPES)


def _linear_shapes(draw: random.Random) -> Iterator[BatchShape]:
    """Batch, outputs, inputs of a layer, as recommendation models have them: most are multiples of 16."""
    while True:
        batch = 2 ** draw.randint(6, 13) if draw.random() < 0.7 else int(2 ** draw.uniform(6, 13))
        out, into = (draw.choice(WIDTHS) if draw.random() < 0.7 else int(2 ** draw.uniform(2, 11.5)) for _ in range(2))
        if 2 * batch * out * into <= MOST_FLOPS:
            yield batch, out, max(into, 4)


def _dot_shapes(draw: random.Random) -> Iterator[BatchShape]:
    """Batch, rows, columns of DLRM's products of a sample's rows with each other; first those that torch multiplies without a library."""
    yield 2 ** draw.randint(6, 12), 5, 8
    while True:
        batch, rows = 2 ** draw.randint(6, 12), draw.choice((5, 8, 9, 12, 14, 16, 17, 20, 22, 24, 26, 27, 32, 40))
        yield batch, rows, draw.choice((8, 16, 32, 64, 128))


def _stack_shapes(draw: random.Random) -> Iterator[tuple[int, list[int]]]:
    """Batch, and the widths of a narrow stack's inputs and layers, each about half of the one before, or one output at the end."""
    while True:
        batch = draw.choice((64, 128, 256, 512, 1024, 2048, 4096))
        into = draw.choice((13, 16, 32, 64)) if draw.random() < 0.5 else int(2 ** draw.uniform(5, 11))
        first = draw.choice((16, 32, 64, 128, 256, 512))
        sizes = [into, *(max(first >> shift, 8) for shift in range(draw.choice((1, 2, 3))))]
        sizes += draw.choice(([], [1], [1], [draw.choice((8, 16, 32, 64))]))
        if sum(wide * down + down for wide, down in pairwise(sizes)) <= MOST_WEIGHTS:
            yield batch, sizes


def _time_stack(bench: Bench, batch: int, sizes: list[int], dtype: str) -> None:
    shape: dict[str, Number] = {"dtype": dtype, "b": batch, "sizes": " ".join(map(str, sizes))}
    for name, run in stack_kernels(sizes, batch, dtype == "bf16").items():
        bench.time(name, shape, run)


def _time_linear(bench: Bench, batch: int, out: int, into: int, dtype: str, by_both: bool) -> None:
    """A layer's three products: its outputs, the gradient of its inputs, and that of its weights.

    by_both: by torch's own library too where layers take oneDNN, for not all that multiplies is a layer.
    """
    inputs, weights, gradient = _normal(dtype, batch, into), _normal(dtype, out, into), _normal(dtype, batch, out)
    bias = _normal(dtype, out)
    products: dict[str, tuple[BatchShape, bool, Callable[[], object], Callable[[], object]]] = {
        "nt": (
            (batch, out, into), is_for_onednn(inputs, weights, into),
            lambda: outputs(inputs, weights, bias), lambda: F.linear(inputs, weights, bias),
        ),
        "nn": (
            (batch, into, out), is_for_onednn(gradient, weights, out),
            lambda: gradient_of_inputs(gradient, weights), lambda: gradient @ weights,
        ),
        "tn": (
            (out, into, batch), is_for_onednn(gradient, inputs, batch),
            lambda: gradient_of_weight(gradient, inputs), lambda: gradient.t() @ inputs,
        ),
    }  # fmt: skip
    for layout, ((m, n, k), by_onednn, chosen, torchs) in products.items():
        shape: dict[str, Number] = {"dtype": dtype, "layout": layout, "m": m, "n": n, "k": k}
        bench.time("gemm", {**shape, "library": "onednn"} if by_onednn else shape, chosen)
        if by_onednn and by_both:
            bench.time("gemm", shape, torchs)


def _time_dots(bench: Bench, batch: int, rows: int, dim: int, dtype: str) -> None:
    values, products = _normal(dtype, batch, rows, dim), _normal(dtype, batch, rows, rows)
    shape: dict[str, Number] = {"dtype": dtype, "b": batch, "m": rows}
    bench.time("bmm", {**shape, "layout": "nt", "n": rows, "k": dim}, lambda: torch.bmm(values, values.transpose(1, 2)))
    bench.time("bmm", {**shape, "layout": "nn", "n": dim, "k": rows}, lambda: torch.bmm(products, values))
    _time_own_kernels(bench, values, products, dtype)


def _time_own_kernels(bench: Bench, values: torch.Tensor, products: torch.Tensor, dtype: str) -> None:
    """Ours, which pick the pairs above the diagonal, or multiply the rows too."""
    from pipeline.models.layers.interaction import dots_kernels, pairs_kernel

    batch, rows, dim = values.shape
    for name, run in dots_kernels(values).items():
        bench.time(name, {"dtype": dtype, "b": batch, "m": rows, "k": dim}, run)
    call, num_bytes = pairs_kernel(products)
    if call is not None:
        bench.time("take", {"dtype": dtype, "bytes": num_bytes}, call)


def _normal(dtype: str, *shape: int) -> torch.Tensor:
    """Numbers from one short block, over and over: to draw millions would take longer than to multiply them."""
    count = math.prod(shape)
    return _block(dtype).repeat(-(-count // BLOCK_NUMBERS))[:count].view(shape)


@cache
def _block(dtype: str) -> torch.Tensor:
    return torch.randn(BLOCK_NUMBERS).to(DTYPES[dtype])


def _columns(size: int) -> int:
    return min(size, 64)


def _elements(size: int, dtype: str) -> list[torch.Tensor]:
    shape = (max(size // _columns(size), 1), _columns(size))
    return [_normal(dtype, *shape) for _ in range(2)]


# Name -> (call on two matrices, bytes moved by a byte of one). What a model runs is matched to these by step_time.kernels.
BY_BYTES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], float]] = {
    "add": (torch.add, 3.0),
    "inplace": (lambda a, b: torch.relu_(a), 2.0),
    "copy": (lambda a, b: a.copy_(b), 2.0),
    "cast": (lambda a, b: a.to(torch.float32 if a.dtype == torch.bfloat16 else torch.bfloat16), 2.0),
    "math": (lambda a, b: torch.sigmoid(a), 2.0),
    "where": (lambda a, b: torch.ops.aten.threshold_backward(a, b, 0), 3.0),
    "cat": (lambda a, b: torch.cat([a, b], dim=1), 2.0),
    "sum_rows": (lambda a, b: a.sum(0), 1.0),
    "sum": (lambda a, b: a.sum(), 1.0),
    "sum_columns": (lambda a, b: a.sum(1), 1.0),
    "fill": (lambda a, b: torch.zeros_like(a), 1.0),
    "sum_middle": (lambda a, b: a.view(-1, 4, 16).sum(1), 1.0),
    "spread": (lambda a, b: a.view(-1, 4, 16) * b.view(-1, 4, 16)[:, :1], 2.0),
    "softmax": (lambda a, b: torch.softmax(a, 1), 2.0),
    "norm": (lambda a, b: torch.layer_norm(a, (a.shape[1],)), 2.0),
    "dropout": (lambda a, b: a.bernoulli_(0.8), 2.0),
    "batch_norm": (lambda a, b: _batch_norm(a), 2.0),
    "batch_norm_backward": (lambda a, b: _batch_norm_backward(a, b), 2.0),
}


SLOW = ("dropout", "batch_norm", "batch_norm_backward")  # beyond the sizes measured they take in proportion


def _batch_norm(values: torch.Tensor) -> object:
    weight = torch.ones(values.shape[1])
    return torch.native_batch_norm(values, weight, weight, torch.zeros_like(weight), weight, True, 0.1, 1e-5)


def _batch_norm_backward(values: torch.Tensor, gradient: torch.Tensor) -> object:
    weight = torch.ones(values.shape[1])
    return torch.ops.aten.native_batch_norm_backward(
        gradient, values, weight, weight, weight, weight, weight, True, 1e-5, [True, True, True]
    )


def _time_by_bytes(
    bench: Bench, name: str, call: tuple[Callable[[torch.Tensor, torch.Tensor], object], float], size: int, dtype: str
) -> None:
    first, second = _elements(size, dtype)
    run, factor = call
    num_bytes = int(factor * first.numel() * first.element_size())
    shape: dict[str, Number] = {"dtype": dtype, "bytes": num_bytes}
    bench.time(name, shape, lambda: run(first, second))


def _dense_optimizers() -> list[str]:
    return sorted(name for name, entry in all_optimizers().items() if entry.trains_layers() and name in STANDARD)


STANDARD = ("sgd", "adagrad", "adam", "adamw")
NUM_TENSORS = (4, 16)


def _time_optimizer(bench: Bench, name: str, numbers: int, tensors: int) -> None:
    """An update of so many parameters, of `numbers` numbers in all."""
    weights = [torch.nn.Parameter(torch.rand(max(numbers // tensors, 1))) for _ in range(tensors)]
    for weight in weights:
        weight.grad = torch.rand_like(weight)
    optimizer = find_optimizer(name).dense(weights, DenseOptimizerConfig(name=name))
    bench.time("optimizer", {"name": name, "numbers": numbers, "tensors": tensors}, optimizer.step)
