"""Predict operations from a data sheet's peaks, for a machine that was not measured.

The shares of a peak that are reached are assumptions from the literature for any machine. They are
not fitted to results: 75 % of the peak of products is what
torch.distributed._tools.runtime_estimator assumes; 79 % of the memory's bandwidth is what arXiv
2201.07821 measured for copies.

The host's time is a number of calls, each with the time that the authors of arXiv 2201.07821
measured in eager DLRM training (github.com/owensgroup/ml_perf_model, commit 5b2522a0: the charts of
analysis/notebooks/overheads_study.ipynb, and analysis/utils.py for T4). Of the five operations with
one kernel in those charts, ReluBackward0 is the median.

    it launches a kernel   T1 + T2 + T4 + T3 = 7.7 + 16.3 + 4 + 8.6 us   ReluBackward0
    it launches none       T1 + T5 = 7.7 + 4.4 us                        aten::view
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.extras.step_time.recorded_layers import PRODUCTS, Operation
from pipeline.extras.step_time.work import product_flops
from pipeline.planner.hardware import BYTES_PER_MS, Hardware
from pipeline.runtime.errors import ConfigError

SHARE_OF_FLOPS, SHARE_OF_BANDWIDTH = 0.75, 0.79
TF32 = 0.5  # of the peak in bf16: A100 156 of 312 TFLOPS, H100 494 of 989, by their data sheets
BLOCK = 64  # a product's rows and columns come in whole blocks of a GPU's tensor cores
MIN_GPU_US = 2.0  # of any kernel
ISSUE_US = 37.0  # of a call that launches a kernel, by a host that runs PyTorch eagerly
NO_KERNEL = 12.0 / ISSUE_US  # of a call that launches none: a view, an allocation, host tensors
# (calls that launch a kernel, calls that do not) of a step of our loop, in addition to the layers'
# own, and of each sharding type: benchmarks/gpu_host.json, rows of "ours", mean of its presets.
STEP_CALLS, SHARDING_CALLS = (47, 75), (30, 62)


class DataSheetTimes:
    """Predict times from a data sheet. Raises ConfigError if the hardware's config has no peak of products."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware, self._is_gpu = hardware, not hardware.on_cpu
        for name in ("tflops_fp32", "tflops_bf16"):
            if not getattr(hardware, name):
                raise ConfigError(
                    f"hardware={hardware.name} does not set {name}, so the layers' time cannot be "
                    f"predicted; set hardware.{name}=<TFLOPS "
                    "of the data sheet, dense>, calibrate it (python -m pipeline calibrate), or set planner.predict_step=false"
                )

    @property
    def assumptions(self) -> str:
        return (
            f"assumed are {100 * SHARE_OF_FLOPS:.0f} % of peak products, {100 * SHARE_OF_BANDWIDTH:.0f} % of memory bandwidth"
            + (f", {ISSUE_US:g} us of the host per launch" if self._is_gpu and self._hardware.issue_us is None else "")
        )

    def host_ms(self, layers: Sequence[Operation], num_shardings: int) -> float:
        """Return the milliseconds in which a GPU's host issues a step: hardware.issue_us per
        launch; 0 under CUDA graphs.
        """
        launched = sum(each.has_kernel for each in layers)
        launches = launched + STEP_CALLS[0] + num_shardings * SHARDING_CALLS[0]
        others = len(layers) - launched + STEP_CALLS[1] + num_shardings * SHARDING_CALLS[1]
        each = ISSUE_US if self._hardware.issue_us is None else self._hardware.issue_us
        return (launches + NO_KERNEL * others) * each / 1e3 if self._is_gpu else 0.0

    def operation_us(self, operation: Operation) -> float:
        if not operation.has_kernel:
            return 0.0
        hardware = self._hardware
        memory = hardware.memory_gb_per_s * BYTES_PER_MS * SHARE_OF_BANDWIDTH
        moved = operation.in_bytes + operation.out_bytes
        if operation.name.startswith("optimizer:"):
            # weights, gradients and two states are read, all except gradients are written
            moved = 7 * operation.in_bytes
        us = moved / memory * 1e3
        if operation.name in PRODUCTS:
            assert hardware.tflops_fp32 and hardware.tflops_bf16  # checked by the constructor
            peaks = {"bf16": hardware.tflops_bf16, "fp16": hardware.tflops_bf16, "tf32": hardware.tflops_bf16 * TF32}
            peak = peaks.get(operation.dtype, hardware.tflops_fp32)
            block = BLOCK if self._is_gpu and len(operation.shapes[0]) == 2 else 8
            us = max(us, product_flops(operation, block, block) / (peak * 1e6 * SHARE_OF_FLOPS))
        return max(us, MIN_GPU_US if self._is_gpu else 0.0)
