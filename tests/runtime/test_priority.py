"""A process that gives way does so with all its threads, and with those that it begins later."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

LOOK = """
import json, os, sys, threading
from pipeline.runtime.process.processes import lower_priority

def state(thread):
    return os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread) - before

before = os.getpriority(os.PRIO_PROCESS, 0)
stop, found = threading.Event(), []
waiting = threading.Thread(target=stop.wait)
waiting.start()
lower_priority(sys.argv[1])
later = threading.Thread(target=lambda: found.append(state(threading.get_native_id())))
later.start()
later.join()
print(json.dumps([state(0), state(waiting.native_id), *found]))
stop.set()
"""


@pytest.mark.parametrize("priority", ["normal", "low", "idle"])
def test_all_threads_give_way(priority: str) -> None:
    found = json.loads(subprocess.run([sys.executable, "-c", LOOK, priority], capture_output=True, check=True).stdout)
    policy = os.SCHED_IDLE if priority == "idle" else os.SCHED_OTHER
    lower = min(5, 19 - os.nice(0)) if priority == "low" else 0  # nothing is below 19
    assert found == [[policy, lower]] * 3
