"""Turn what a component is told of a host, or this machine, into a TorchX Resource."""

from __future__ import annotations

import os
import re
from typing import Optional

from torchx import specs


def host_resource(cpu: Optional[int], gpu: Optional[int], memMB: Optional[int], h: Optional[str]) -> specs.Resource:
    """A named resource `h`, else the numbers given, else this machine's own cores and memory (and no GPU)."""
    if h is not None:
        return specs.resource(h=h)
    return specs.resource(
        cpu=len(os.sched_getaffinity(0)) if cpu is None else cpu,
        gpu=0 if gpu is None else gpu,
        memMB=_memory_mb() if memMB is None else memMB,
    )


def _memory_mb() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20


def parse_shape(j: str) -> tuple[int, int]:
    """'2x8' -> 2 nodes of 8 ranks; '8' -> 1 node."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", j)
    nodes, ranks = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    if nodes < 1 or ranks < 1:
        raise ValueError(f"-j {j} is not NODESxRANKS_PER_NODE, both at least 1; for instance -j 1x2 or -j 2x8")
    return nodes, ranks


def threads_per_rank(resource: specs.Resource, ranks_per_node: int) -> int:
    """OMP_NUM_THREADS: the host's cores shared evenly, for torch would otherwise start one a core in every rank."""
    return max(1, resource.cpu // ranks_per_node)
