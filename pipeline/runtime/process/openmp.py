"""How long OpenMP's idle threads wait awake: a while where the cores are this process's own, hardly where others want them too.

A thread that sleeps is woken in 25 us for each parallel region; one that waits awake takes the time of whoever else wants its core. libgomp knows
two lengths, the shorter one for when it has more threads than there are CPUs (https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html).
So where this process's threads wait for cores, a few more threads of OpenMP, which do nothing, make all of them sleep at once.
Before torch is imported: standard library only.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "GOMP_SPINCOUNT"
StartRegion = Callable[[int], None]  # begins a parallel region of so many threads
LONG, SHORT = "20000", "1000"  # turns. libgomp's own is 300,000; 100 where it has more threads than there are CPUs
MOST_CORES = 64  # as many threads make all others sleep; with more cores the count is SHORT, and nothing is watched
PERIOD_S = 0.5
# Of a core: what this process's threads would have run and could not, as the kernel counts it. On two cores its own reader brings .3 to .6,
# one program of others .7 to 1.2; where all sleep at once, these are .1 and .6 to 1.
SHARED, OWN = 0.7, 0.3
CALM_PERIODS = 4  # in a row, after which the cores count as our own again


def choose_spin_count() -> None:
    """Before torch is imported; a user's own count wins. Child processes inherit it."""
    os.environ.setdefault(VARIABLE, LONG if _num_cores() <= MOST_CORES and _waited_s() is not None else SHORT)


def watch_cores() -> None:
    """From now on, until the process ends, on a thread of its own; once a process. Nothing where the count is not LONG, a user's own."""
    if os.environ.get(VARIABLE) == LONG and _watch.ident is None:
        _watch.start()


class CoreWatch(threading.Thread):
    """Decides by how long this process's threads wait for a core."""

    def __init__(self) -> None:
        super().__init__(name="core-watch", daemon=True)
        self.last = 0.0  # cores, of the period before
        self.calm = 0
        self.told = False
        self.idlers: Idlers | None = None

    def run(self) -> None:
        while "torch._C" not in sys.modules:
            time.sleep(PERIOD_S)
        start, waited = _region_start(), _waited_s()
        while start is not None and waited is not None:
            began, before = time.monotonic(), waited
            time.sleep(PERIOD_S)
            waited = _waited_s()
            if waited is not None:
                self.decide((waited - before) / (time.monotonic() - began), start)

    def decide(self, cores: float, start: StartRegion) -> None:
        """cores: that our threads would have used in this period, and could not; below 0 where threads have ended."""
        mean, self.last = (self.last + cores) / 2, cores
        self.calm = self.calm + 1 if cores < OWN else 0
        if self.idlers is None and mean > SHARED:
            self.idlers = Idlers(start)
            self.idlers.start()
            if not self.told:
                logger.info(
                    "this process waits for %.1f cores that others use: OpenMP's idle threads sleep at once", mean
                )
            self.told = True
        elif self.idlers is not None and self.calm >= CALM_PERIODS:
            self.idlers.ended.set()
            self.idlers = None


class Idlers(threading.Thread):
    """Begins a region of more threads than there are CPUs: they stay, asleep, as long as this thread."""

    def __init__(self, start: StartRegion) -> None:
        super().__init__(name="openmp-idlers", daemon=True)
        self._start_region = start
        self.ended = threading.Event()

    def run(self) -> None:
        self._start_region(_num_cores() + 1)
        self.ended.wait()


_watch = CoreWatch()


def _region_start() -> StartRegion | None:
    """Of torch's OpenMP; None where it is not libgomp's kind. Each thread of the region calls sched_yield, and no more."""
    try:
        begin = ctypes.CDLL(sys.modules["torch._C"].__file__).GOMP_parallel
        body = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None
    begin.restype = None
    return lambda threads: begin(body, None, ctypes.c_uint(threads), ctypes.c_uint(0))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _waited_s() -> float | None:
    """All of this process's threads together, for a core, since each began; None where the kernel does not count it."""
    total = 0
    try:
        tasks = os.listdir("/proc/self/task")
    except OSError:
        return None
    for task in tasks:
        try:
            total += int(Path(f"/proc/self/task/{task}/schedstat").read_bytes().split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        except (OSError, IndexError, ValueError):
            return None
    return total / 1e9
