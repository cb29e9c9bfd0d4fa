"""Report how much memory this host has, and how much is free. Limits of containers and of Slurm are applied."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def host_memory_bytes() -> int:
    """Return the memory of this host, or the lowest limit of its cgroups and of the Slurm job."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_cgroup_limits(), *_slurm_limits()])


def _cgroup_limits() -> list[int]:
    """Return the limits of this process's cgroups and their parents.

    /proc/self/cgroup has lines `0::/path` (version 2) and `4:memory:/path` (version 1).
    """
    files = [CGROUPS / "memory.max", CGROUPS / "memory" / "memory.limit_in_bytes"]
    for line in OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top, name = (CGROUPS, "memory.max") if not controllers else (CGROUPS / "memory", "memory.limit_in_bytes")
            own = top / path.lstrip("/")
            files += [folder / name for folder in (own, *own.parents) if folder.is_relative_to(top)]
    texts = (file.read_text().strip() for file in files if file.exists())
    return [int(text) for text in texts if text.isdigit()]


def _slurm_limits() -> list[int]:
    """Return the limits of the Slurm job on this node, in bytes. Slurm's value 0 is no limit."""
    node, cpu = (os.environ.get(f"SLURM_MEM_PER_{part}", "") for part in ("NODE", "CPU"))
    cpus = os.environ.get("SLURM_CPUS_ON_NODE", "")
    limits = [int(node)] if node.isdigit() else [int(cpu) * int(cpus)] if cpu.isdigit() and cpus.isdigit() else []
    return [limit << 20 for limit in limits if limit]


def free_host_bytes(used_bytes: int) -> int:
    """Return how much more memory this host can provide if the ranks on this host use `used_bytes`."""
    import psutil

    return min(int(psutil.virtual_memory().available), host_memory_bytes() - used_bytes)


def used_by_this_process() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
