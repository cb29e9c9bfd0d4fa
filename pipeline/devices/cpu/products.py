"""Multiply fp32 matrices by oneDNN on CPUs where torch's own BLAS uses half of their width.

torch multiplies fp32 matrices by MKL, which runs AVX2 code on AMD's CPUs though they have AVX-512. oneDNN, which torch brings along for
bf16, does not look at the vendor: 1.8 to 2.4 times as fast there (docs/explain/performance.md). On Intel's CPUs MKL stays. oneDNN's
products have the same bits on any number of threads.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from pipeline.devices.cpu.kernel_pool import record

RECORDED = "onednn_mm"  # its name where products are recorded
LEAST_WIDTH = 8  # columns: narrower products are bound by memory, where oneDNN is no faster
MUCH = 16  # times as wide is a gradient whose inputs are transposed in its place
LEAST_PRODUCTS = 1 << 20  # of numbers: below, a call of oneDNN's wrapper takes longer than MKL does


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
    if is_for_onednn(inputs, weight, inputs.shape[-1]):
        if type(inputs) is not torch.Tensor:
            return _record(inputs, weight.t())
        return _multiply(inputs, weight, bias, is_relu)
    values = F.linear(inputs, weight, bias)
    return values.relu_() if is_relu else values


def gradient_of_inputs(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[B, O] times [O, I]: [B, I]."""
    if not is_for_onednn(gradient, weight, len(weight)):
        return gradient @ weight
    return _record(gradient, weight) if type(gradient) is not torch.Tensor else _multiply(gradient, weight.t())


def takes_turned(gradient: torch.Tensor, inputs: torch.Tensor) -> bool:
    """Whether gradient_of_weight wants the gradient transposed in memory as well."""
    return is_for_onednn(gradient, inputs, len(inputs)) and MUCH * inputs.shape[1] >= gradient.shape[1]


def gradient_of_weight(
    gradient: torch.Tensor, inputs: torch.Tensor, turned: torch.Tensor | None = None
) -> torch.Tensor:
    """[B, O] transposed times [B, I]: [O, I]; turned [O, B]: the gradient transposed, where it lies there already.

    The narrower one is transposed in memory, by oneDNN's wrapper where it is not `turned`: on one thread, and slowly.
    """
    if not is_for_onednn(gradient, inputs, len(inputs)):
        return gradient.t() @ inputs
    if type(gradient) is not torch.Tensor:
        return _record(gradient.t(), inputs)
    if turned is None and 2 * inputs.shape[1] < gradient.shape[1]:
        return _multiply(inputs.t(), gradient.t()).t()
    return _multiply(gradient.t() if turned is None else turned, inputs.t())


def is_for_onednn(first: torch.Tensor, second: torch.Tensor, inner: int) -> bool:
    """Whether these are multiplied by it. `inner`: the dimension that is summed over, of both."""
    return (
        first.dtype == second.dtype == torch.float32
        and first.device.type == second.device.type == "cpu"
        and min(*first.shape, *second.shape) >= LEAST_WIDTH
        and first.numel() * second.numel() >= LEAST_PRODUCTS * inner
        and onednn_multiplies_faster()
    )


def _record(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[M, K] times [K, N] of fake tensors, where is_recorded(RECORDED): [M, N]."""
    out = first.new_empty(first.shape[0], second.shape[1])
    record(RECORDED, first, second, out)
    return out


def _multiply(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, is_relu: bool = False
) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
        inputs, weight, bias, "relu" if is_relu else "none", [], ""
    )
    return product
