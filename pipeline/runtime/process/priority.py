"""Lower the priority of a process (Linux, stdlib only)."""

from __future__ import annotations

import os

PRIORITIES = ("normal", "low", "idle")
LOW = 5  # added to the nice value


def lower_priority(priority: str) -> None:
    """Lower the priority of this process and of threads and processes that it starts later.

    It cannot be undone.

    normal: no change. low: as `nice -n 5`. idle: run only on cores that no other process wants.
    """
    for thread in map(int, os.listdir("/proc/self/task")) if priority != "normal" else ():
        try:
            if priority == "idle":
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            else:
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + LOW)
        except ProcessLookupError:  # the thread has ended
            continue
