"""Set OpenMP's spin time, huge pages, freed memory and Numba's cache for a process on the CPU.

All except keep_freed_memory are called before torch and Numba are imported. Settings of the user
are not changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pipeline
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.host_memory import host_memory_bytes
from pipeline.runtime.storage.private import private_folder, temporary_folder

logger = logging.getLogger(__name__)

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
KERNEL_CACHE = "NUMBA_CACHE_DIR"
OTHER_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton", "MPLCONFIGDIR": "matplotlib"}
GPU_FILE = Path("/dev/nvidia0")  # the NVIDIA driver makes it for the first GPU of a host


def computes_here(overrides: Sequence[str]) -> bool:
    """Return whether this process trains on the CPU, as far as this is known without importing torch."""
    asked = {"hardware=cpu", "comms.backend=gloo"} & set(overrides)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return bool(asked) or hidden or not GPU_FILE.exists()


def limit_openmp_spin() -> None:
    """Let OpenMP's threads (libgomp) sleep soon after a parallel region.

    By default they spin for milliseconds on cores that others need. 1,000 turns are about 50 us, so
    a thread is mostly awake for the next operation. 20,000 made a step 3 to 6 % shorter on reserved
    cores, and 4 to 8 times longer on shared ones.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def use_huge_pages() -> None:
    """Request huge pages for CPU tensors of 2 MiB and more.

    Each huge page saves 512 page faults for 2 MiB of temporary tensors, and TLB misses. This is a
    setting of torch (c10/core/impl/alloc_cpu.cpp). It has no effect if transparent_hugepage/enabled
    is `never`.
    """
    os.environ.setdefault(HUGE_PAGES, "1")


def disable_huge_pages_of(address: int, num_bytes: int) -> None:
    """Use small pages for memory that is kept for the whole run. Call it before the memory is
    written.

    If a virtual machine returns free memory to its host, the host must find each huge page again:
    tables of 2 GiB took 5.2 CPU-seconds instead of 1.1 (docs/adr/0054).
    """
    if os.environ.get(HUGE_PAGES) != "1" or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_NOHUGEPAGE)


def find_kernel_cache() -> None:
    """Set Numba's cache folder, which must be writable, and copy an image's compiled kernels into
    it.

    Compiled kernels are pickles, so a folder is used only if no other user can write to it.
    """
    given, is_shared = os.environ.get(KERNEL_CACHE), False
    if given:
        is_shared = _others_write(Path(given))
        usable = _is_writable(Path(given)) and not is_shared
        if is_shared:
            logger.warning("%s=%s is not used: other users can write to it, and kernels are code", KERNEL_CACHE, given)
    else:
        own = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        usable = _is_writable(Path(pipeline.__path__[0])) or _is_writable(Path(own))
    if usable:
        return
    folder = Path(tempfile.gettempdir()) / f"numba-{os.getuid()}"
    if given and Path(given).is_dir() and not os.path.lexists(folder) and not is_shared:
        _copy(Path(given), folder)
    try:
        os.environ[KERNEL_CACHE] = private_folder(str(folder))
    except ConfigError as error:
        os.environ[KERNEL_CACHE] = tempfile.mkdtemp(prefix="numba-")
        logger.warning("kernels are compiled anew into %s: %s", os.environ[KERNEL_CACHE], error)


def find_other_caches() -> None:
    """Let torch's compilers and matplotlib use caches in a folder of this user.

    Their caches hold code and pickles. torch uses its default, /tmp/torchinductor_<user>, even if
    another user made this folder.
    """
    for variable, name in OTHER_CACHES.items():
        if given := os.environ.get(variable):
            with contextlib.suppress(OSError):
                os.makedirs(given, 0o700, exist_ok=True)
                found = os.stat(given)
                if found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022:
                    continue
            logger.warning(
                "%s=%s is not used: it must be a folder that no other user can write to, because it holds code",
                variable,
                given,
            )
        try:
            os.environ[variable] = private_folder(os.path.join(temporary_folder(), name))
        except ConfigError as error:
            os.environ[variable] = tempfile.mkdtemp(prefix=f"{name}-")
            logger.warning("the cache is a new folder, %s: %s", os.environ[variable], error)


def _others_write(folder: Path) -> bool:
    """Return whether another user (except root) owns or can write to the folder or a folder in it."""
    folders = (folder, *(Path(parent) / name for parent, names, _ in os.walk(folder) for name in names))
    for each in folders if folder.is_dir() else ():
        found = each.lstat()
        if found.st_uid not in (0, os.getuid()) or found.st_mode & 0o022 or stat.S_ISLNK(found.st_mode):
            return True
    return False


def _is_writable(folder: Path) -> bool:
    """Return whether the folder, or its closest existing parent, is writable."""
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    return os.access(there, os.W_OK | os.X_OK)


def _copy(source: Path, folder: Path) -> None:
    """Copy the folder completely or not at all, because several ranks may copy at the same time."""
    staged = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    with contextlib.suppress(OSError):
        shutil.copytree(source, staged, dirs_exist_ok=True)
        os.chmod(staged, 0o700)  # copytree gives it the mode of `source`
        os.rename(staged, folder)
    shutil.rmtree(staged, ignore_errors=True)


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
    """Return two limits for a rank: the largest block that glibc keeps, and the most free bytes at the heap's end."""
    if memory_bytes < LARGE_MEMORY_BYTES:
        return LARGEST_KEPT_BYTES, MAX_KEPT_BYTES
    return LARGEST_KEPT_IN_ROOM_BYTES, min(MAX_KEPT_BYTES_OF_LARGE_MEMORY, memory_bytes // 8)


def keep_freed_memory(num_ranks: int = 1) -> bool:
    """Keep freed memory in this process. Return False if the C library is not glibc.

    By default glibc returns large blocks to the kernel at once. The kernel then clears each page of
    the next step's memory: 2,000 to 8,000 page faults, a third of the time of a DLRM's step.
    """
    return keep_blocks(*kept_bytes(host_memory_bytes() // num_ranks))


def keep_blocks(largest_bytes: int, most_bytes: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl, macOS
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, largest_bytes) and mallopt(M_TRIM_THRESHOLD, most_bytes))
