"""Let torch's large CPU tensors lie in pages of 2 MiB where the kernel has them; set before torch is imported."""

from __future__ import annotations

import ctypes
import mmap
import os

VARIABLE = "THP_MEM_ALLOC_ENABLE"


def use_huge_pages() -> None:
    """Ask the kernel for huge pages for CPU tensors of 2 MiB and more. Before torch is imported; a user's own wins.

    Temporary tensors that the C library gives back come to the next step as pages that the kernel has to clear: 512 page
    faults fewer for each 2 MiB of them, and rows at random miss the TLB less often. THP_MEM_ALLOC_ENABLE is torch's own
    (c10/core/impl/alloc_cpu.cpp, madvise by tensor); it does nothing where /sys/kernel/mm/transparent_hugepage/enabled says never.
    """
    os.environ.setdefault(VARIABLE, "1")


def use_small_pages(address: int, num_bytes: int) -> None:
    """For memory that is there once and stays, before it is written.

    Where a virtual machine hands free memory back to its host, a huge page is one that the host has to find again: tables of 2 GiB
    took 5.2 CPU-seconds to draw instead of 1.1 (docs/adr/0054).
    """
    if os.environ.get(VARIABLE) != "1" or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_NOHUGEPAGE)
