"""Replace torch.cuda without a driver: the GPUs, their properties, memory and generators."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from pipeline.extras.shadow import memory, streams
from pipeline.extras.shadow.state import Patch, settings

_generators: dict[int, torch.Generator] = {}


class DeviceContext:
    """Replace torch.cuda.device(d)."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.before = streams.current_device()
        if self.device is not None:
            streams.set_device(streams.index_of(self.device))

    def __exit__(self, *_: object) -> None:
        streams.set_device(self.before)


def generator(device: int | None = None) -> torch.Generator:
    """Return the random generator of a GPU: a CPU generator with a separate seed."""
    index = streams.current_device() if device is None else device
    if index not in _generators:
        _generators[index] = torch.Generator()
    return _generators[index]


def reset() -> None:
    _generators.clear()


def properties(device: Any = None) -> types.SimpleNamespace:
    card = settings.card
    return types.SimpleNamespace(
        name=f"{card.name} (shadow)", total_memory=settings.total_memory_bytes, major=card.capability[0],
        minor=card.capability[1], multi_processor_count=card.num_sms, memory_clock_rate=card.memory_clock_khz,
        memory_bus_width=card.memory_bus_bits, warp_size=32, max_threads_per_multi_processor=2048,
        max_threads_per_block=1024, regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448,
        gcnArchName="", L2_cache_size=50 << 20, is_integrated=0, is_multi_gpu_board=0, uuid=f"shadow-{device}",
        pci_bus_id=0, pci_device_id=0, pci_domain_id=0,
    )  # fmt: skip


def _free_and_total(device: Any = None) -> tuple[int, int]:
    total = settings.total_memory_bytes
    return total - memory.live[streams.index_of(device)], total


def _allocated(device: Any = None) -> int:
    return memory.live[streams.index_of(device)]


def _stats(device: Any = None) -> dict[str, int]:
    current, peak = _allocated(device), memory.peak()
    names = ("allocated_bytes", "reserved_bytes", "active_bytes")
    found = {f"{name}.all.current": current for name in names} | {f"{name}.all.peak": peak for name in names}
    return found | {"num_alloc_retries": 0, "num_ooms": 0}


def _seed(seed: int) -> None:
    generator().manual_seed(int(seed))


def _seed_all(seed: int) -> None:
    for index in range(settings.num_gpus):
        generator(index).manual_seed(int(seed))


def _rng_state(device: Any = "cuda") -> torch.Tensor:
    return generator(streams.index_of(device)).get_state()


def _set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    generator(streams.index_of(device)).set_state(state)


def patches() -> list[Patch]:
    cuda = torch.cuda
    exists = "the C++ runtime finds no device"
    found: list[tuple[str, Callable[..., Any] | type, str]] = [
        ("_lazy_init", lambda: None, "it would start the driver"),
        ("init", lambda: None, "it would start the driver"),
        ("is_initialized", lambda: True, exists),
        ("is_available", lambda: True, exists),
        ("_is_in_bad_fork", lambda: False, exists),
        ("device_count", lambda: settings.num_gpus, exists),
        ("current_device", streams.current_device, exists),
        ("set_device", lambda device: streams.set_device(streams.index_of(device)), exists),
        ("device", DeviceContext, exists),
        ("get_device_properties", properties, exists),
        ("get_device_capability", lambda device=None: settings.card.capability, exists),
        ("get_device_name", lambda device=None: properties().name, exists),
        ("get_arch_list", lambda: [f"sm_{settings.card.capability[0]}{settings.card.capability[1]}"], exists),
        ("is_bf16_supported", lambda *_, **__: True, exists),
        ("is_current_stream_capturing", lambda: False, "CUDA graphs are not modelled"),
        ("mem_get_info", _free_and_total, "memory.py counts"),
        ("memory_allocated", _allocated, "memory.py counts"),
        ("memory_reserved", _allocated, "memory.py counts"),
        ("max_memory_allocated", lambda device=None: memory.peak(), "memory.py counts"),
        ("max_memory_reserved", lambda device=None: memory.peak(), "memory.py counts"),
        ("reset_peak_memory_stats", lambda device=None: memory.reset_peak(), "memory.py counts"),
        ("memory_stats", _stats, "memory.py counts"),
        ("empty_cache", lambda: None, "there is no cache"),
        ("ipc_collect", lambda: None, "there is no cache"),
        ("synchronize", streams.synchronize, "streams.py keeps the clocks"),
        ("Stream", streams.Stream, "streams.py keeps the clocks"),
        ("Event", streams.Event, "streams.py keeps the clocks"),
        ("stream", streams.StreamContext, "streams.py keeps the clocks"),
        ("StreamContext", streams.StreamContext, "streams.py keeps the clocks"),
        ("current_stream", streams.current_stream, "streams.py keeps the clocks"),
        ("default_stream", streams.default_stream, "streams.py keeps the clocks"),
        ("set_stream", streams.set_stream, "streams.py keeps the clocks"),
        ("get_rng_state", _rng_state, "a generator of this process stands for the GPU's"),
        ("set_rng_state", _set_rng_state, "a generator of this process stands for the GPU's"),
        ("manual_seed", _seed, "a generator of this process stands for the GPU's"),
        ("manual_seed_all", _seed_all, "a generator of this process stands for the GPU's"),
        ("seed_all", lambda: _seed_all(0), "a generator of this process stands for the GPU's"),
        ("initial_seed", lambda: generator().initial_seed(), "a generator of this process stands for the GPU's"),
    ]
    made = [Patch(cuda, name, value, why) for name, value, why in found]
    # The same functions under the names of the modules that define them, which torch uses
    # internally.
    for module in (torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
        made += [Patch(module, each.name, each.value, each.why) for each in made if hasattr(module, each.name)]
    common = torch.cuda.amp.common
    made.append(Patch(common, "amp_definitely_not_available", lambda: False, exists))
    return made


def let_autograd_run(shim: Any) -> None:
    """Let torch's C++ accept CUDA tensors: install torch's no-op device guard, then increase the
    device count. The guard supports 8 devices, and autograd makes one queue per device.
    """
    torch._C._ensureCUDADeviceGuardSet()
    shim.shadow_set_device_count(16)
