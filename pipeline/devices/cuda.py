"""Train on NVIDIA GPUs, and on AMD's, which torch also calls cuda, by FBGEMM's and TorchRec's code."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

from pipeline.config.registry import register
from pipeline.devices.base import Device
from pipeline.devices.cpu.process import GPU_FILE
from pipeline.runtime.errors import ConfigError


@register("device", "cuda")
class Cuda(Device):
    device_type = "cuda"
    backend = "nccl"
    not_here = "comms.backend=nccl needs an NVIDIA GPU, but torch sees none"

    @classmethod
    def index_of(cls, local_rank: int) -> int:
        """Return the index of the rank's GPU. If the process sees only one GPU, return it (see
        claim).

        Raises ConfigError if this host has more ranks than GPUs.
        """
        count = torch.cuda.device_count()
        if local_rank < count:
            return local_rank
        if count == 1:
            return 0
        raise ConfigError(
            f"LOCAL_RANK={local_rank} needs {local_rank + 1} GPUs and this process sees {count}{_visible()}; "
            f"start at most {count} rank(s) on a host, or use hardware=cpu"
        )

    @classmethod
    def why_absent(cls) -> str:
        """Return one line that says why torch.cuda.is_available() is False."""
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:  # a CPU build raises AssertionError
            return str(error).strip().splitlines()[0]
        return "torch gives no reason"

    @classmethod
    def check_absence(cls) -> None:
        """Refuse to train on the CPU of a GPU host if torch fails to see the GPU.

        An empty CUDA_VISIBLE_DEVICES hides GPUs on purpose. Raises ConfigError with torch's reason.
        """
        if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not GPU_FILE.exists():
            return
        raise ConfigError(
            f"this host has an NVIDIA GPU ({GPU_FILE}) but torch {torch.__version__} sees none{_visible()}: "
            f"{cls.why_absent()}; `python -m pipeline doctor` shows the fix. To train on the CPU, set hardware=cpu "
            "(or comms.backend=gloo)"
        )

    def check_precision(self, precision: str) -> None:
        """Accept every precision, because cuBLAS computes in fp32 on GPUs without TF32."""

    def use_tf32(self, enabled: bool) -> None:
        torch.backends.cuda.matmul.allow_tf32 = enabled

    def memory_gb_per_s(self) -> float:
        """Return the peak GB/s: two transfers per clock (kHz) over the complete bus."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return float(2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8 / 1e9)

    def needs_claim(self, num_ranks: int) -> bool:
        return num_ranks > 1 and torch.cuda.device_count() == 1

    def claim(self, store: dist.Store, local_rank: int) -> None:
        """Check that no other rank uses this GPU, if each task sees one (Slurm's
        --gpus-per-task=1).

        CUDA_VISIBLE_DEVICES does not show it, because Slurm's cgroups renumber GPUs. Raises
        ConfigError.
        """
        gpu = torch.cuda.get_device_properties(0).uuid
        if store.add(f"gpu/{socket.gethostname()}/{gpu}", 1) > 1:
            raise ConfigError(
                f"LOCAL_RANK={local_rank} and another rank of {socket.gethostname()} see 1 GPU each, and it is the "
                f"same GPU{_visible()}; start 1 rank on this host, or give each task a separate GPU "
                "(Slurm: --gpus-per-task=1)"
            )


def _visible() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
