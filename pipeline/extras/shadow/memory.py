"""Count memory of shadow GPUs and copies to and from the host. Find reads of a copy's target before
the copy is done.

A block is attached to torch's storage object, so it ends with it. Sizes are rounded as in torch's
allocator. Fragmentation and NCCL's buffers are not counted. A non-blocking copy into pinned memory
returns at once; the host must wait before it reads.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from pipeline.extras.shadow import report, streams
from pipeline.extras.shadow.rules import Rule
from pipeline.extras.shadow.state import settings

_ROUNDED_TO = 512  # bytes, kMinBlockSize of c10/cuda/CUDACachingAllocator
_MAP_NORESERVE = 0x4000  # of Linux; Python 3.13 names it

live: Counter[int] = Counter()  # device -> bytes
host_live: Counter[str] = Counter()  # "uvm", "pinned" -> bytes of host memory
_phase = "start"


class Block(streams.Tracked):
    """One storage on a shadow GPU. streams.Tracked records its users."""

    __slots__ = ("device", "kind", "num_bytes")

    def __init__(self, device: int, num_bytes: int, kind: str) -> None:
        super().__init__()
        self.device, self.kind = device, kind
        self.num_bytes = -(-num_bytes // _ROUNDED_TO) * _ROUNDED_TO
        if kind == "hbm":
            _take(device, self.num_bytes)
        else:
            host_live[kind] += self.num_bytes

    def __del__(self) -> None:
        try:
            if self.kind == "hbm":
                live[self.device] -= self.num_bytes
            else:
                host_live[self.kind] -= self.num_bytes
            streams.freed(self)
        except (AttributeError, TypeError):  # the interpreter exits
            pass


def _take(device: int, num_bytes: int) -> None:
    limit = settings.total_memory_bytes
    if live[device] + num_bytes > limit:
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {num_bytes / 2**30:.2f} GiB. GPU {device} has a total "
            f"capacity of {limit / 2**30:.2f} GiB of which {(limit - live[device]) / 2**30:.2f} GiB is free."
        )
    live[device] += num_bytes
    peaks = report.current().peak_bytes
    peaks[_phase] = max(peaks.get(_phase, 0), live[device])


def block_of(inner: torch.Tensor, device: int) -> Block:
    """Return the block of the storage that holds a shadow's numbers. The first use makes it."""
    storage = inner.untyped_storage()
    block: Block | None = storage.__dict__.get("shadow_block")
    if block is None:
        block = Block(device, storage.nbytes(), storage.__dict__.get("shadow_kind", "hbm"))
        storage.shadow_block = block  # type: ignore[attr-defined]
    return block


def in_host_memory(inner: torch.Tensor, kind: str) -> torch.Tensor:
    """Mark a storage as host memory of a kind: "uvm" (the device reads it) or "pinned"."""
    storage = inner.untyped_storage()
    storage.shadow_kind = kind  # type: ignore[attr-defined]
    if kind == "pinned":
        storage.shadow_block = Block(-1, storage.nbytes(), kind)  # type: ignore[attr-defined]
    return inner


def is_kind(inner: torch.Tensor, kind: str) -> bool:
    return bool(inner.untyped_storage().__dict__.get("shadow_kind") == kind)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Attribute memory peaks in this context to the phase `name`."""
    global _phase
    before, _phase = _phase, name
    peaks = report.current().peak_bytes
    peaks[name] = max(peaks.get(name, 0), *live.values(), 0)
    try:
        yield
    finally:
        _phase = before


def enter_phase(name: str) -> None:
    """Attribute memory peaks to the phase `name` from now on."""
    global _phase
    _phase = name
    peaks = report.current().peak_bytes
    peaks[name] = max(peaks.get(name, 0), *live.values(), 0)


def reset_peak() -> None:
    report.current().peak_bytes[_phase] = max([0, *live.values()])


def peak() -> int:
    return max([0, *report.current().peak_bytes.values()])


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in memory that is reserved but not touched, and may be larger than this machine's memory."""
    count = prod(shape)
    pages = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    buffer = (ctypes.c_char * len(pages)).from_buffer(pages)
    flat = torch.frombuffer(buffer, dtype=dtype, count=count)
    flat.untyped_storage().shadow_untouched = True  # type: ignore[attr-defined]
    return flat.view(shape)


def is_untouched(inner: torch.Tensor) -> bool:
    """Return whether a tensor is part of memory from untouched(), which must not be filled."""
    return "shadow_untouched" in inner.untyped_storage().__dict__


_in_flight: dict[int, tuple[Any, int, int, str]] = {}  # id of a storage -> storage, stream, tick, place


def check_host_reads(rule: Rule, flat: list[Any]) -> None:
    """Find operations of the host on memory that a copy may still fill."""
    if not _in_flight:
        return
    for each in flat:
        if isinstance(each, torch.Tensor) and (key := id(each.untyped_storage())) in _in_flight:
            _, stream, tick, since = _in_flight[key]
            if not streams.host_knows(stream, tick) and rule.touches_data:
                report.current().find(
                    "host_read",
                    f"{rule.name} on the host uses a tensor of shape {list(each.shape)} that a non-blocking "
                    f"copy at {since} still fills: synchronize first",
                )
            if streams.host_knows(stream, tick):
                del _in_flight[key]


def _remember(storage: Any) -> None:
    """Record that the current stream still fills this host memory. Forget copies that are finished."""
    for key, (_, stream, tick, _) in list(_in_flight.items()):
        if streams.host_knows(stream, tick):
            del _in_flight[key]
    stream = streams.current_stream().number
    _in_flight[id(storage)] = (storage, stream, streams.tick_of(stream), report.place())


@dataclass(frozen=True)
class Copy:
    """One copy: its source and target (host or GPU), and whether the host continues without waiting for it."""

    from_host: bool
    to_host: bool
    is_near: bool  # within one device
    non_blocking: bool
    from_pinned: bool
    num_bytes: int


def described(rule: Rule, args: Any, kwargs: Any, target: torch.device) -> Copy:
    """Describe what copy_ or _to_copy is about to copy."""
    source, into = (args[1], args[0].device) if rule.base == "copy_" else (args[0], target)
    non_blocking = kwargs.get("non_blocking", args[2] if rule.base == "copy_" and len(args) > 2 else False)
    from_host = source.device.type == "cpu"
    return Copy(
        from_host=from_host,
        to_host=into.type == "cpu",
        is_near=source.device == into,
        non_blocking=bool(non_blocking),
        from_pinned=from_host and is_kind(source, "pinned"),
        num_bytes=source.numel() * source.element_size(),
    )


def finish(copied: Copy, result: torch.Tensor) -> None:
    """Count the copy. The host waits for it unless it is non-blocking and its memory is pinned."""
    if copied.from_host:
        report.copy("host_to_device" if copied.from_pinned else "pageable_host_to_device", copied.num_bytes)
        waits = not copied.non_blocking and copied.num_bytes > 0
    elif copied.to_host:
        report.copy("device_to_host", copied.num_bytes)
        waits = not (copied.non_blocking and is_kind(result, "pinned"))
        if not waits:
            _remember(result.untyped_storage())
    else:
        report.copy("on_device" if copied.is_near else "device_to_device", copied.num_bytes)
        waits = False
    if waits:
        report.sync("host_to_device" if copied.from_host else "device_to_host")
        streams.wait_for_host_copy()


def reset() -> None:
    """Forget the copies of an earlier program."""
    _in_flight.clear()
