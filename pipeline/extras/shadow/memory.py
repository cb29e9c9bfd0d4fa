"""Count the memory of shadow GPUs: live bytes, peaks by phase, and an error when the GPU is full.

A block is attached to torch's storage object, so it ends with it. Sizes are rounded as in torch's
allocator. Fragmentation and NCCL's buffers are not counted.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch

from pipeline.extras.shadow import report, streams
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
    """Attribute peaks in the context to `name`."""
    global _phase
    before, _phase = _phase, name
    peaks = report.current().peak_bytes
    peaks[name] = max(peaks.get(name, 0), *live.values(), 0)
    try:
        yield
    finally:
        _phase = before


def enter_phase(name: str) -> None:
    """Attribute peaks to `name` from now on."""
    global _phase
    _phase = name
    peaks = report.current().peak_bytes
    peaks[name] = max(peaks.get(name, 0), *live.values(), 0)


def reset_peak() -> None:
    report.current().peak_bytes[_phase] = max([0, *live.values()])


def peak() -> int:
    return max([0, *report.current().peak_bytes.values()])


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in memory that is reserved but not touched and may exceed this machine's."""
    count = prod(shape)
    pages = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    buffer = (ctypes.c_char * len(pages)).from_buffer(pages)
    flat = torch.frombuffer(buffer, dtype=dtype, count=count)
    flat.untyped_storage().shadow_untouched = True  # type: ignore[attr-defined]
    return flat.view(shape)


def is_untouched(inner: torch.Tensor) -> bool:
    """Return whether a tensor is part of memory from untouched(), which must not be filled."""
    return "shadow_untouched" in inner.untyped_storage().__dict__
