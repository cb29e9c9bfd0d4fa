"""Define the interface of a device. The base class trains with plain TorchRec on an accelerator.

A new device inherits Device, registers itself, and overrides what differs. The methods use torch's
module of the device (torch.cuda, torch.xpu), so a subclass needs little code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEventAvg
    from torch.profiler import ProfilerActivity

    from pipeline.devices.cpu.host_exchange import HostExchange
    from pipeline.runtime.process.distributed import DistributedContext


class Device:
    """Describe the device of one rank. Class attributes describe its kind, without hardware."""

    device_type: ClassVar[str]  # torch's name: torch.device(device_type, index)
    backend: ClassVar[str]  # the backend of the process group
    not_here: ClassVar[str]  # the error if the backend is asked for and the host has no such device
    plain: type[Device] | None = None  # the same device without this package's kernels

    # Step. Whether a batch is pinned in host memory and copied to the device by a separate stream.
    copies_batches: ClassVar[bool] = True
    # Whether the host issues operations without waiting. Reading a number waits for all of them.
    is_asynchronous: ClassVar[bool] = True
    # Whether our layers, lookups and exchanges replace those of TorchRec, FBGEMM and DDP.
    has_kernels: ClassVar[bool] = False
    # Whether the layers of DLRM are TorchRec's, so that none of this package is left.
    has_torchrec_layers: ClassVar[bool] = False
    # Tables. Whether FBGEMM has every optimizer, unequal bags, and all settings of an update.
    fbgemm_is_complete: ClassVar[bool] = True
    # Planning. TorchRec's compute kernels, and whether tables are in memory of the device (HBM).
    table_kernels: ClassVar[tuple[str, ...]] = ("dense", "fused", "fused_uvm", "fused_uvm_caching")
    has_own_memory: ClassVar[bool] = True
    # Numbers in a row of a shard. FBGEMM's CUDA kernels check max_D <= 2048 (fbgemm 1.9).
    max_shard_width: ClassVar[int | None] = 2048
    # Latencies of collectives, used if the config of the hardware has none. Source: NCCL's tuner
    # (NVIDIA/nccl src/graph/tuning.cc), Ring with LL128: base, a step over NVLink, a step over the
    # network.
    latencies_us: ClassVar[Mapping[str, float]] = {
        "collective_launch_us": 10.0,
        "intra_host_latency_us": 1.9,
        "inter_host_latency_us": 4.0,
    }
    # How reports describe the memory figure, and the times of the profiler.
    memory_figure: ClassVar[str] = "max_memory_allocated"
    profiled_time: ClassVar[str] = "device time"

    def __init__(self, index: int = 0) -> None:
        self.index = index

    @classmethod
    def is_available(cls) -> bool:
        return bool(torch.get_device_module(cls.device_type).is_available())

    @classmethod
    def why_absent(cls) -> str:
        """Return one line that says why torch sees no device of this kind."""
        return "torch gives no reason"

    @classmethod
    def check_absence(cls) -> None:
        """Raise ConfigError if the host has a device of this kind but torch does not see it."""

    @classmethod
    def index_of(cls, local_rank: int) -> int:
        """Return the index of a rank's device. Raises ConfigError if there are too few."""
        return local_rank

    def needs_claim(self, num_ranks: int) -> bool:
        """Return whether several ranks of a host may be using the same device by mistake."""
        return False

    def claim(self, store: dist.Store, local_rank: int) -> None:
        """Claim the device for this rank. Raises ConfigError if another rank has it."""

    @property
    def torch_device(self) -> torch.device:
        return self.at(self.index)

    def at(self, index: int) -> torch.device:
        """Return the device of the rank with this index on its host."""
        return torch.device(self.device_type, index)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device_type)

    def start(self) -> None:
        """Make this device torch's default device. Call it before the process group is made."""
        self._module.set_device(self.torch_device)

    def synchronize(self) -> None:
        """Wait until the device has finished all issued operations."""
        self._module.synchronize(self.torch_device)

    def record_event(self) -> torch.Event:
        """Return an event that completes after all operations that the current stream has so far."""
        event: torch.Event = self._module.current_stream().record_event()
        return event

    # The step

    def pipeline(self, asked: str, world_size: int) -> str:
        """Return the name of the train pipeline: sparse_dist, base, or plain (without copies and overlap)."""
        return "sparse_dist" if asked == "auto" else asked

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=dtype)

    def check_precision(self, precision: str) -> None:
        """Raise ConfigError if this device cannot train in `precision` (trainer.precision)."""
        if precision == "tf32":
            raise ConfigError(f"trainer.precision=tf32 needs an NVIDIA GPU, not {self.device_type}; use fp32 or bf16")

    def use_tf32(self, enabled: bool) -> None:
        """Let products of fp32 matrices round their inputs to TF32. Other devices have no TF32."""

    def limit_compiler(self) -> None:
        """Limit the compiler's resources. Call it before torch.compile."""

    # Tables, layers, exchanges

    def exchange(self, context: DistributedContext, timeout_s: float) -> HostExchange | None:
        """Collective: return the HostExchange of the ranks of one host, or None if this device has none."""
        return None

    # Memory

    def count_here(self) -> int:
        """Return the number of devices of this kind on this host; 0 if a rank does not need a device of its own."""
        return int(self._module.device_count())

    def memory_bytes(self) -> int:
        """Return the memory of one device of this host."""
        return int(self._module.get_device_properties(self._module.current_device()).total_memory)

    def memory_gb_per_s(self) -> float:
        """Return the peak memory bandwidth; 0.0 if torch cannot report it."""
        return 0.0

    def card_name(self) -> str:
        """Return torch's name of the device, or an empty string if there is none."""
        return (
            str(self._module.get_device_properties(self._module.current_device()).name) if self.is_available() else ""
        )

    def keep_freed_memory(self, num_ranks: int) -> None:
        """Keep the memory that a step frees, so that the next step uses it again. num_ranks: the ranks of this host."""

    def peak_memory_bytes(self) -> int:
        """Return the peak memory of this rank since it started."""
        return int(self._module.max_memory_allocated(self.torch_device))

    def watch_memory(self) -> Callable[[], int]:
        """Return a function that returns this rank's peak memory use since this call."""
        return self.peak_memory_bytes

    # Random numbers

    def fork_rng(self) -> AbstractContextManager[None]:
        """Restore torch's generators (of the host and of this device) when the context ends."""
        return torch.random.fork_rng(devices=[self.index], device_type=self.device_type)

    def random_state(self) -> torch.Tensor | None:
        """Return the state of the device's random generator; None if the device uses only the host's generator."""
        state: torch.Tensor = self._module.get_rng_state(self.torch_device)
        return state

    def restore_random_state(self, state: torch.Tensor) -> None:
        self._module.set_rng_state(state, self.torch_device)

    # The profiler

    def profiler_activities(self) -> list[ProfilerActivity]:
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU, getattr(ProfilerActivity, self.device_type.upper())]

    def own_time_us(self, event: FunctionEventAvg) -> float:
        """Return the microseconds of a profiler event, without the time of the events that it
        calls.

        Only kernels count. Operations that launch kernels, and the user's ranges, report the time
        of the kernels again.
        """
        is_kernel = event.device_type.name == self.device_type.upper() and not event.is_user_annotation
        return float(event.self_device_time_total) if is_kernel else 0.0


def in_host_memory(tensors: torch.Tensor | Iterable[torch.Tensor]) -> bool:
    """Return whether numpy and CPU kernels can read the tensors."""
    each = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return all(tensor.device.type == "cpu" for tensor in each)


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes products of this tensor, or None without autocast."""
    device_type = tensor.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
