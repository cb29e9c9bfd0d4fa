"""Set OpenMP's waits, huge pages and Numba's folder for a process that computes on the CPU.

They are set before torch and Numba are imported. A user's own setting is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pipeline

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
KERNEL_CACHE = "NUMBA_CACHE_DIR"
GPU_FILE = Path("/dev/nvidia0")  # made by NVIDIA's driver for the first GPU of a host


def computes_here(overrides: Sequence[str]) -> bool:
    """Whether a training computes on this host's CPU, as far as can be told before torch is imported."""
    asked = {"hardware=cpu", "comms.backend=gloo"} & set(overrides)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return bool(asked) or hidden or not GPU_FILE.exists()


def wait_briefly() -> None:
    """Let OpenMP's threads (libgomp's) sleep soon after a parallel region. Before torch is imported; a user's own wins.

    By default they spin for milliseconds: on cores that readers want, or other programs. 1,000 turns are about 50 us, by which a thread is mostly
    still awake when the next operation begins. 20,000 made a step on cores of its own 3 to 6 % shorter, and one on shared cores 4 to 8 times longer.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def use_huge_pages() -> None:
    """Ask the kernel for huge pages for CPU tensors of 2 MiB and more. Before torch is imported; a user's own wins.

    Temporary tensors that the C library gives back come to the next step as pages that the kernel has to clear: 512 page
    faults fewer for each 2 MiB of them, and rows at random miss the TLB less often. THP_MEM_ALLOC_ENABLE is torch's own
    (c10/core/impl/alloc_cpu.cpp, madvise by tensor); it does nothing where /sys/kernel/mm/transparent_hugepage/enabled says never.
    """
    os.environ.setdefault(HUGE_PAGES, "1")


def use_small_pages(address: int, num_bytes: int) -> None:
    """For memory that is there once and stays, before it is written.

    Where a virtual machine hands free memory back to its host, a huge page is one that the host has to find again: tables of 2 GiB
    took 5.2 CPU-seconds to draw instead of 1.1 (docs/adr/0054).
    """
    if os.environ.get(HUGE_PAGES) != "1" or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_NOHUGEPAGE)


def find_kernel_cache() -> None:
    """What an image has compiled is copied, for Numba takes nothing from a folder that it cannot write to."""
    given = os.environ.get(KERNEL_CACHE)
    if given:
        usable = _is_writable(Path(given))
    else:
        own = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        usable = _is_writable(Path(pipeline.__path__[0])) or _is_writable(Path(own))
    if usable:
        return
    folder = Path(tempfile.gettempdir()) / f"numba-{os.getuid()}"
    if given and Path(given).is_dir() and not folder.exists():
        _copy(Path(given), folder)
    os.environ[KERNEL_CACHE] = str(folder)


def _is_writable(folder: Path) -> bool:
    """Or can be made, and then is."""
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    return os.access(there, os.W_OK | os.X_OK)


def _copy(source: Path, folder: Path) -> None:
    """Whole or not at all: of several ranks one comes first."""
    staged = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    with contextlib.suppress(OSError):
        shutil.copytree(source, staged, dirs_exist_ok=True)
        os.rename(staged, folder)
    shutil.rmtree(staged, ignore_errors=True)
