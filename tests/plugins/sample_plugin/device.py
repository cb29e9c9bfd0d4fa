"""An accelerator of another maker in one file: what is not said here is plain TorchRec."""

from __future__ import annotations

from pipeline.config.registry import register
from pipeline.devices.base import Device


@register("device", "sample_accelerator")
class SampleAccelerator(Device):
    device_type = "xpu"
    backend = "xccl"
    not_here = "comms.backend=xccl needs an accelerator of another maker"
    table_kernels = ("dense", "fused")
