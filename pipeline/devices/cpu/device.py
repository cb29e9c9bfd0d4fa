"""Train on the CPU with this package's kernels (Cpu), or with TorchRec, FBGEMM and gloo (PlainCpu)."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

import psutil
import torch

from pipeline.config.registry import register
from pipeline.devices.base import Device
from pipeline.devices.cpu.host_exchange import HostExchange, connect
from pipeline.devices.cpu.process import keep_freed_memory

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEventAvg
    from torch.profiler import ProfilerActivity

    from pipeline.runtime.process.distributed import DistributedContext


class PlainCpu(Device):
    """Train with sharding.fast_cpu=false, with the fixes that FBGEMM and gloo need."""

    device_type = "cpu"
    backend = "gloo"
    copies_batches = False
    is_asynchronous = False
    has_torchrec_layers = True
    fbgemm_is_complete = False
    max_shard_width = None
    table_kernels = ("dense", "fused")  # dense is used for data_parallel only
    has_own_memory = False
    # Measured between 2 ranks: gloo's all_to_all_single of 128 bytes takes 95 us (median) and 74 us
    # (tenth percentile), used for launch and hop. Between hosts we assume a TCP round trip of 50 us
    # within a rack.
    latencies_us: ClassVar[Mapping[str, float]] = {
        "collective_launch_us": 74.0,
        "intra_host_latency_us": 21.0,
        "inter_host_latency_us": 50.0,
    }
    memory_figure = "growth of the resident set since before the tables were created"
    profiled_time = "CPU time"

    @classmethod
    def is_available(cls) -> bool:
        return True

    def at(self, index: int) -> torch.device:
        return torch.device("cpu")  # no index, because ranks share the host

    def start(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def pipeline(self, asked: str, world_size: int) -> str:
        """Return "plain" for a single rank, because it exchanges nothing and copies no batch."""
        chosen = asked if asked != "auto" else "base" if world_size == 1 else "sparse_dist"
        return "plain" if chosen == "base" else chosen

    def limit_compiler(self) -> None:
        import torch._inductor.config as inductor

        # no pool of compiler processes, because the graphs are few and small
        inductor.compile_threads = 1

    def count_here(self) -> int:
        return 0

    def card_name(self) -> str:
        return ""

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux counts KiB

    def watch_memory(self) -> Callable[[], int]:
        """Return a function that returns how many bytes peak memory has grown since this call."""
        resident, before = psutil.Process().memory_info().rss, self.peak_memory_bytes()

        def peak() -> int:
            # An earlier peak (while data was loaded) does not count, but hides later growth.
            now = self.peak_memory_bytes()
            highest: int = now if now > before else psutil.Process().memory_info().rss
            return max(0, highest - resident)

        return peak

    def fork_rng(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[])

    def random_state(self) -> torch.Tensor | None:
        return None

    def restore_random_state(self, state: torch.Tensor) -> None:
        pass  # the state of a GPU on which the step was saved

    def profiler_activities(self) -> list[ProfilerActivity]:
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU]

    def own_time_us(self, event: FunctionEventAvg) -> float:
        return float(event.self_cpu_time_total)


@register("device", "cpu")
class Cpu(PlainCpu):
    """Train with this package's kernels for lookups, updates, layers and one host's exchange."""

    plain = PlainCpu
    has_kernels = True
    has_torchrec_layers = False

    def exchange(self, context: DistributedContext, timeout_s: float) -> HostExchange | None:
        return connect(context, timeout_s)

    def keep_freed_memory(self, num_ranks: int) -> None:
        keep_freed_memory(num_ranks)
