"""Let torch's large CPU tensors lie in pages of 2 MiB where the kernel has them; set before torch is imported."""

from __future__ import annotations

import os


def use_huge_pages() -> None:
    """Ask the kernel for huge pages for CPU tensors of 2 MiB and more. Before torch is imported; a user's own wins.

    Temporary tensors that the C library gives back come to the next step as pages that the kernel has to clear: 512 page
    faults fewer for each 2 MiB of them, and rows at random miss the TLB less often. THP_MEM_ALLOC_ENABLE is torch's own
    (c10/core/impl/alloc_cpu.cpp, madvise by tensor); it does nothing where /sys/kernel/mm/transparent_hugepage/enabled says never.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
