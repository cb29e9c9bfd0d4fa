"""Keep the memory that a step has freed for the next step.

glibc returns blocks of some MB and more to the kernel at once. A training step on the CPU asks for the same activations and
gradients again, page by page, each cleared by the kernel first: 2,000 to 8,000 page faults a step, a third of a DLRM's time.
"""

from __future__ import annotations

import ctypes

from pipeline.runtime.host_memory import host_memory_bytes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_KEPT_BYTES = 64 << 20
MOST_KEPT_BYTES = 512 << 20
# Blocks above that are tables, checkpoints' buffers, and activations of very large batches. Kept as well, these make a step of 65,536
# samples twice as fast, and leave holes in memory, 1 to 2 GiB of them (docs/explain/performance.md): only where there is room.
ROOMY_BYTES = 8 << 30
LARGEST_KEPT_IN_ROOM_BYTES = 256 << 20
MOST_KEPT_IN_ROOM_BYTES = 2 << 30


def kept_bytes(memory_bytes: int) -> tuple[int, int]:
    """The largest block that is kept, and how much at most at the end of the heap, by a rank's share of its host's memory."""
    if memory_bytes < ROOMY_BYTES:
        return LARGEST_KEPT_BYTES, MOST_KEPT_BYTES
    return LARGEST_KEPT_IN_ROOM_BYTES, min(MOST_KEPT_IN_ROOM_BYTES, memory_bytes // 8)


def keep_freed_memory(num_ranks: int = 1) -> bool:
    """For the rest of this process; False where the C library is not glibc. num_ranks: on this host, which share its memory."""
    return keep_blocks(*kept_bytes(host_memory_bytes() // num_ranks))


def keep_blocks(largest_bytes: int, most_bytes: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl, macOS
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, largest_bytes) and mallopt(M_TRIM_THRESHOLD, most_bytes))
