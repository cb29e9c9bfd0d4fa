"""Let OpenMP's idle threads sleep instead of spin; set before torch is imported."""

from __future__ import annotations

import os


def wait_briefly() -> None:
    """Let OpenMP's threads (libgomp's) sleep soon after a parallel region. Before torch is imported; a user's own wins.

    By default they spin for milliseconds, on the cores that our kernels' threads want next.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
