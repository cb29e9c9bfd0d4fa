"""Keep the memory that a step has freed for the next one, where the C library would hand it back to the kernel.

glibc returns blocks of some MB and more at once. A training step on the CPU asks for the same activations and gradients
again, page by page, each cleared by the kernel first: 2,000 to 8,000 page faults a step, a third of a DLRM's time.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
# Larger blocks are tables, checkpoints' buffers, and activations of very large batches. Kept as well, up to 256 MiB, these made a step of
# 65,536 samples 1.5 times as fast, in 2.3 times the memory (docs/performance.md).
LARGEST_KEPT_BYTES = 64 << 20
MOST_KEPT_BYTES = 512 << 20


def keep_freed_memory() -> bool:
    """For the rest of this process; False where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl, macOS
        return False
    set_one = mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
    return bool(set_one and mallopt(M_TRIM_THRESHOLD, MOST_KEPT_BYTES))
