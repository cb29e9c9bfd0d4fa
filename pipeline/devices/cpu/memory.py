"""Keep memory that a step has freed for the next step.

glibc returns blocks of some MB and more to the kernel at once. A CPU training step then requests
the same memory again, page by page, and the kernel clears each page first: 2,000 to 8,000 page
faults per step, a third of the time of a DLRM's step.
"""

from __future__ import annotations

import ctypes

from pipeline.runtime.host_memory import host_memory_bytes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_KEPT_BYTES = 64 << 20
MAX_KEPT_BYTES = 512 << 20
# Larger blocks are tables, buffers of checkpoints, and activations of very large batches. If these
# are kept too, a step of 65,536 samples is twice as fast, but memory fragments by 1 to 2 GiB
# (docs/explain/performance.md). So they are kept only if a rank has this much memory.
LARGE_MEMORY_BYTES = 8 << 30
LARGEST_KEPT_IN_ROOM_BYTES = 256 << 20
MAX_KEPT_BYTES_OF_LARGE_MEMORY = 2 << 30


def kept_bytes(memory_bytes: int) -> tuple[int, int]:
    """Return the largest block to keep, and the most bytes to keep at the end of the heap.

    memory_bytes: a rank's share of its host's memory.
    """
    if memory_bytes < LARGE_MEMORY_BYTES:
        return LARGEST_KEPT_BYTES, MAX_KEPT_BYTES
    return LARGEST_KEPT_IN_ROOM_BYTES, min(MAX_KEPT_BYTES_OF_LARGE_MEMORY, memory_bytes // 8)


def keep_freed_memory(num_ranks: int = 1) -> bool:
    """Keep freed memory for the rest of this process. Returns False if the C library is not glibc.

    num_ranks: ranks of this host, which share its memory.
    """
    return keep_blocks(*kept_bytes(host_memory_bytes() // num_ranks))


def keep_blocks(largest_bytes: int, most_bytes: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl, macOS
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, largest_bytes) and mallopt(M_TRIM_THRESHOLD, most_bytes))
