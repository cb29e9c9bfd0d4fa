"""Multiply matrices on the CPU faster than torch: linear layers by oneDNN, dot products by a kernel.

torch multiplies fp32 matrices by MKL, which runs AVX2 code on AMD's CPUs even if they have AVX-512.
oneDNN is part of torch and does not check the vendor: it is 1.8 to 2.4 times as fast there
(docs/explain/performance.md). Intel's CPUs keep MKL. oneDNN's products have the same bits on any
number of threads.

DLRM multiplies the rows of each sample with each other (arXiv 1906.00091, 2.1.3). torch's batched
product of small matrices takes several times as long as its arithmetic and computes each pair
twice. The kernel multiplies in fp32; rows and products are fp32 or bf16.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.devices.base import autocast_dtype
from pipeline.devices.cpu.kernel_pool import can_read, kernels, on_all_threads

if TYPE_CHECKING:
    from torchrec.modules.crossnet import LowRankCrossNet

MIN_WIDTH = 8  # columns; memory bandwidth limits narrower products, so oneDNN is not faster
# multiplications; below this, the overhead of oneDNN's wrapper exceeds MKL's time
MIN_PRODUCTS = 1 << 20


@cache
def onednn_multiplies_faster() -> bool:
    """Return whether oneDNN is faster, by the CPU's vendor and vector width, so that a resume has equal bits."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    info = Path("/proc/cpuinfo")
    return info.is_file() and "AuthenticAMD" in info.read_text(errors="replace")


def outputs(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_relu: bool = False
) -> torch.Tensor:
    """Multiply inputs [B, I] by the transposed weight [O, I] and add the bias [O]. Return [B, O]."""
    if is_for_onednn(inputs, weight, inputs.shape[-1]):
        return _multiply(inputs, weight, bias, is_relu)
    values = F.linear(inputs, weight, bias)
    return values.relu_() if is_relu else values


def gradient_of_inputs(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply gradient [B, O] by weight [O, I]. Return [B, I]."""
    if not is_for_onednn(gradient, weight, len(weight)):
        return gradient @ weight
    return _multiply(gradient, weight.t())


def gradient_of_weight(gradient: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Multiply the transposed gradient [B, O] by inputs [B, I]. Return [O, I].

    oneDNN's wrapper transposes one factor in memory; this function lets it transpose the narrower
    factor.
    """
    if not is_for_onednn(gradient, inputs, len(inputs)):
        return gradient.t() @ inputs
    if 2 * inputs.shape[1] < gradient.shape[1]:
        return _multiply(inputs.t(), gradient.t()).t()
    return _multiply(gradient.t(), inputs.t())


def is_for_onednn(first: torch.Tensor, second: torch.Tensor, inner: int) -> bool:
    """Return whether oneDNN multiplies two matrices. inner: the length of the dimension that is summed over."""
    return (
        first.dtype == second.dtype == torch.float32
        and first.device.type == second.device.type == "cpu"
        and min(*first.shape, *second.shape) >= MIN_WIDTH
        and first.numel() * second.numel() >= MIN_PRODUCTS * inner
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
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return outputs(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        wants_inputs, wants_weight, wants_bias = ctx.needs_input_grad
        gradient = gradient.contiguous()
        return (
            gradient_of_inputs(gradient, weight) if wants_inputs else None,
            gradient_of_weight(gradient, inputs) if wants_weight else None,
            gradient.sum(0) if wants_bias else None,
        )


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Apply a linear layer [..., I] -> [..., O] by the faster library; by torch unless inputs are plain fp32."""
    if not _takes_onednn(inputs):
        return F.linear(inputs, weight, bias)
    values = _Linear.apply(inputs.reshape(-1, inputs.shape[-1]), weight, bias)
    return values.view(*inputs.shape[:-1], len(weight))


def _takes_onednn(inputs: torch.Tensor) -> bool:
    is_fp32 = can_read(inputs) and inputs.dtype == torch.float32
    return is_fp32 and autocast_dtype(inputs) is None and onednn_multiplies_faster()


class FastLinear:
    """Replace the forward of a linear layer: [..., I] -> [..., O]."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return linear(inputs, self._layer.weight, self._layer.bias)


class FastCross:
    """Replace the forward of TorchRec's low-rank cross network in fp32."""

    def __init__(self, network: LowRankCrossNet) -> None:
        self._forward, self._network = network.forward, network

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        network, crossed = self._network, input
        if not _takes_onednn(input):
            return self._forward(input)
        for down, up, bias in zip(network.V_kernels, network.W_kernels, network.bias, strict=True):
            crossed = torch.addcmul(crossed, input, linear(linear(crossed, down), up, bias))
        return crossed


def speed_up_linear_layers(model: nn.Module) -> int:
    """Replace the forward of each linear layer and cross network if oneDNN is faster on this CPU. Return how many."""
    if not onednn_multiplies_faster():
        return 0
    # imported here, because serving uses this module without TorchRec
    from torchrec.modules.crossnet import LowRankCrossNet

    kinds = {nn.Linear: FastLinear, LowRankCrossNet: FastCross}
    modules = [module for module in model.modules() if type(module) in kinds]
    for module in modules:
        module.forward = kinds[type(module)](module)  # type: ignore[assignment,arg-type]
    return len(modules)


KERNELS = "pipeline.devices.cpu.kernels.dots"
DTYPES = (torch.float32, torch.bfloat16)


def multiplies_rows(rows: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernel supports these rows. dtype: the type of the products."""
    return dtype in DTYPES and can_read(rows) and kernels(KERNELS) is not None


def dots(rows: torch.Tensor, lead: int) -> torch.Tensor:
    """Map rows [B, n, D] to [B, lead + n (n - 1) / 2]: first `lead` numbers, then the products of all pairs."""
    batch, num_rows, dim = rows.shape
    out = rows.new_empty(batch, lead + num_rows * (num_rows - 1) // 2)
    sizes = map(np.uint64, (num_rows, dim, lead))
    on_all_threads(_module().dots, (_flat(rows), *sizes, _flat(out)), batch)
    return out


def dots_backward(gradient: torch.Tensor, rows: torch.Tensor, lead: int) -> torch.Tensor:
    """Return the gradient of rows [B, n, D], with the dtype of the rows."""
    batch, num_rows, dim = rows.shape
    out = torch.empty_like(rows)
    sizes = map(np.uint64, (num_rows, dim, lead))
    arguments = (_flat(gradient.contiguous()), _flat(rows), *sizes, _flat(out))
    on_all_threads(_module().dots_backward, arguments, batch)
    return out


def _module() -> Any:
    return kernels(KERNELS)


def _flat(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the numbers of a contiguous tensor as a 1-D array; bf16 as uint16."""
    return (values if values.dtype == torch.float32 else values.view(torch.uint16)).numpy().reshape(-1)
