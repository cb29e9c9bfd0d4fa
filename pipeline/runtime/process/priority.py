"""Let a process give way to others on its machine (Linux, stdlib only)."""

from __future__ import annotations

import os

PRIORITIES = ("normal", "low", "idle")
LOW = 5  # added to the nice value


def give_way(priority: str) -> None:
    """normal: nothing changes. low: as `nice -n 5` does. idle: it runs where no other process wants the core, and leaves it at once when
    one does. Threads and processes that are begun later inherit it; it is not undone.
    """
    for thread in map(int, os.listdir("/proc/self/task")) if priority != "normal" else ():
        try:
            if priority == "idle":
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            else:
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + LOW)
        except ProcessLookupError:  # the thread has ended
            continue
