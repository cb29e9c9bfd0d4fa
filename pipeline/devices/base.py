"""Say what a device decides, and answer it as plain TorchRec does on an accelerator.

A new device starts here: inherit Device, register it, and override what is different. Methods that touch
the device go through torch's module for it (torch.cuda, torch.xpu), so a subclass seldom needs code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEventAvg
    from torch.profiler import ProfilerActivity

    from pipeline.devices.cpu.host_exchange import HostExchange
    from pipeline.runtime.process.distributed import DistributedContext


class Device:
    """One rank's device. Class attributes are facts of its kind, which planning asks without having the device."""

    device_type: ClassVar[str]  # torch's name: torch.device(device_type, index)
    backend: ClassVar[str]  # of the process group
    not_here: ClassVar[str]  # an error, for the backend without the device
    plain: type[Device] | None = None  # the same device without this package's kernels

    # Step. A batch is pinned in host memory, and copied to the device by a stream of its own.
    copies_batches: ClassVar[bool] = True
    # The host issues operations without waiting: reading a number of the device waits for all of them.
    is_asynchronous: ClassVar[bool] = True
    # Layers, lookups and exchanges of this package replace those of TorchRec, FBGEMM and DDP.
    has_kernels: ClassVar[bool] = False
    # DLRM's own layers are TorchRec's: nothing of this package is left to compare with.
    has_torchrec_layers: ClassVar[bool] = False
    # Tables. FBGEMM has every optimizer, bags of unequal number and the settings of an update.
    fbgemm_is_complete: ClassVar[bool] = True
    # Planning: TorchRec's compute kernels, and whether tables are in memory of the device (HBM).
    table_kernels: ClassVar[tuple[str, ...]] = ("dense", "fused", "fused_uvm", "fused_uvm_caching")
    has_own_memory: ClassVar[bool] = True
    # Of collectives, where a hardware's config does not say them. NCCL's tuner (NVIDIA/nccl src/graph/tuning.cc), Ring
    # with LL128: base, a step over NVLink, over the network.
    latencies_us: ClassVar[Mapping[str, float]] = {
        "collective_launch_us": 10.0,
        "intra_host_latency_us": 1.9,
        "inter_host_latency_us": 4.0,
    }
    # What memory figures measure, and what the profiler's times are.
    memory_figure: ClassVar[str] = "max_memory_allocated"
    profiled_time: ClassVar[str] = "device time"

    def __init__(self, index: int = 0) -> None:
        self.index = index

    @classmethod
    def is_available(cls) -> bool:
        return bool(torch.get_device_module(cls.device_type).is_available())

    @classmethod
    def why_absent(cls) -> str:
        """Why torch sees no such device, as one line."""
        return "torch gives no reason"

    @classmethod
    def check_absence(cls) -> None:
        """Raises ConfigError where the host has such a device and torch does not see it: an old driver, a CPU build."""

    @classmethod
    def index_of(cls, local_rank: int) -> int:
        """Of the device that a rank of a host takes. Raises ConfigError where a host has more ranks than devices."""
        return local_rank

    def needs_claim(self, num_ranks: int) -> bool:
        """Whether several ranks of a host may have been given the same device."""
        return False

    def claim(self, store: dist.Store, local_rank: int) -> None:
        """Take the device for this rank. Raises ConfigError where another rank of the host has it."""

    @property
    def torch_device(self) -> torch.device:
        return self.at(self.index)

    def at(self, index: int) -> torch.device:
        """The device of the rank `index` of a host."""
        return torch.device(self.device_type, index)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device_type)

    def start(self) -> None:
        """Make it the one that torch takes where none is named. Before the process group."""
        self._module.set_device(self.torch_device)

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        self._module.synchronize(self.torch_device)

    def record_event(self) -> torch.Event:
        """An event that is done when the device has done what it was given so far; of the current stream."""
        event: torch.Event = self._module.current_stream().record_event()
        return event

    # The step

    def pipeline(self, asked: str, world_size: int) -> str:
        """The train pipeline for trainer.pipeline: sparse_dist, base, or plain (no copies, no exchange to overlap)."""
        return "sparse_dist" if asked == "auto" else asked

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=dtype)

    def limit_compiler(self) -> None:
        """Before torch.compile."""

    # Tables, layers, exchanges

    def exchange(self, context: DistributedContext, timeout_s: float) -> HostExchange | None:
        """Collective: what ranks of one host exchange by in place of the process group; None: nothing else."""
        return None

    # Memory

    def count_here(self) -> int:
        """How many of them torch sees on this host; 0: ranks are not bound to one each."""
        return int(self._module.device_count())

    def memory_bytes(self) -> int:
        """Of one of them that is here."""
        return int(self._module.get_device_properties(self._module.current_device()).total_memory)

    def memory_gb_per_s(self) -> float:
        """The peak of one of them that is here; 0.0: torch cannot tell."""
        return 0.0

    def card_name(self) -> str:
        """torch's name of the one that is here; empty: there is none."""
        return (
            str(self._module.get_device_properties(self._module.current_device()).name) if self.is_available() else ""
        )

    def keep_freed_memory(self, num_ranks: int) -> None:
        """Keep what a step has freed for the next one. num_ranks: on this host."""

    def peak_memory_bytes(self) -> int:
        """Of this rank since it started."""
        return int(self._module.max_memory_allocated(self.torch_device))

    def watch_memory(self) -> Callable[[], int]:
        """A function that gives the peak of what this rank has taken since now."""
        return self.peak_memory_bytes

    # Random numbers

    def fork_rng(self) -> AbstractContextManager[None]:
        """Inside, what is drawn or seeded leaves torch's generators as they were: the host's and this device's."""
        return torch.random.fork_rng(devices=[self.index], device_type=self.device_type)

    def random_state(self) -> torch.Tensor | None:
        """Return the state of the device's own generator, None if it has only the host's."""
        state: torch.Tensor = self._module.get_rng_state(self.torch_device)
        return state

    def restore_random_state(self, state: torch.Tensor) -> None:
        self._module.set_rng_state(state, self.torch_device)

    # The profiler

    def profiler_activities(self) -> list[ProfilerActivity]:
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU, getattr(ProfilerActivity, self.device_type.upper())]

    def own_time_us(self, event: FunctionEventAvg) -> float:
        """Of an event of the profiler, without what it calls.

        A kernel is an event of the device. The operation that launches it has the kernel's time as well, and
        so has a range that the user names: both are left out.
        """
        is_kernel = event.device_type.name == self.device_type.upper() and not event.is_user_annotation
        return float(event.self_device_time_total) if is_kernel else 0.0


def in_host_memory(tensors: torch.Tensor | Iterable[torch.Tensor]) -> bool:
    """Whether numpy and the CPU's kernels can read them."""
    each = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return all(tensor.device.type == "cpu" for tensor in each)


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """What products of this tensor are computed in; None without autocast."""
    device_type = tensor.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
