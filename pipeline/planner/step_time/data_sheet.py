"""Predict operations from a data sheet's peaks, where a machine was not measured.

The shares of a peak that arrive are assumptions for any machine, from the literature, and fitted to no result: 75 % of the
peak of products is what torch.distributed._tools.runtime_estimator assumes, 79 % of the memory's bandwidth is what
arXiv 2201.07821 measured of copies.
"""

from __future__ import annotations

import math

from pipeline.planner.hardware import BYTES_PER_MS, Hardware
from pipeline.planner.step_time.by_bytes import NOTHING
from pipeline.planner.step_time.record import PRODUCTS, Operation
from pipeline.runtime.errors import ConfigError

SHARE_OF_FLOPS, SHARE_OF_BANDWIDTH = 0.75, 0.79
BLOCK = 64  # a product's rows and columns come in whole blocks of a GPU's tensor cores
LEAST_GPU_US = 2.0  # of any kernel
ISSUE_US = 8.0  # of an operation, by a host that runs PyTorch eagerly


class DataSheetTimes:
    """Raises ConfigError where the hardware's config does not say its peak of products."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware, self._is_gpu = hardware, hardware.compute_device == "cuda"
        for name in ("tflops_fp32", "tflops_bf16"):
            if not getattr(hardware, name):
                raise ConfigError(
                    f"hardware={hardware.name} does not say {name}, so the layers' time cannot be predicted; set hardware.{name}=<TFLOPS "
                    "of the data sheet, dense>, calibrate it (python -m pipeline.calibrate), or set planner.predict_step=false"
                )

    @property
    def assumptions(self) -> str:
        return (
            f"assumed are {100 * SHARE_OF_FLOPS:.0f} % of peak products, {100 * SHARE_OF_BANDWIDTH:.0f} % of memory bandwidth"
            + (
                f", {ISSUE_US:g} us of the host an operation"
                if self._is_gpu and self._hardware.issue_us is None
                else ""
            )
        )

    def issue_ms(self, operations: float) -> float:
        """Of the host, where it only issues: hardware.issue_us each; 0 under CUDA graphs."""
        each = ISSUE_US if self._hardware.issue_us is None else self._hardware.issue_us
        return operations * each / 1e3 if self._is_gpu else 0.0

    def operation_us(self, operation: Operation) -> float:
        if operation.is_view or operation.name in NOTHING:
            return 0.0
        hardware = self._hardware
        memory = (hardware.hbm_gb_per_s if self._is_gpu else hardware.ddr_gb_per_s) * BYTES_PER_MS * SHARE_OF_BANDWIDTH
        moved = operation.in_bytes + operation.out_bytes
        if operation.name.startswith("optimizer:"):
            moved = 7 * operation.in_bytes  # weights, gradients and two states are read, all but gradients written
        us = moved / memory * 1e3
        if operation.name in PRODUCTS:
            peak = hardware.tflops_bf16 if operation.dtype in ("bf16", "fp16") else hardware.tflops_fp32
            assert peak  # the constructor has looked
            us = max(us, self._flops(operation) / (peak * 1e6 * SHARE_OF_FLOPS))
        return max(us, LEAST_GPU_US if self._is_gpu else 0.0)

    def _flops(self, operation: Operation) -> float:
        first, second = operation.shapes[-2:] if len(operation.shapes) > 2 else operation.shapes
        block = BLOCK if self._is_gpu and len(first) == 2 else 8
        rows, columns = (math.ceil(size / block) * block for size in (first[-2], second[-1]))
        return 2.0 * (first[0] if len(first) == 3 else 1) * rows * columns * first[-1]
