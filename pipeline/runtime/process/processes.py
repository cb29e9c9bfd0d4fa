"""Identify processes, tie them to parents, set priorities, spare the garbage collector."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.runtime.errors import ConfigError
from pipeline.runtime.storage.private import open_lock

PR_SET_PDEATHSIG = 1
LOCK = "lock"  # the file of only_one_run
# For a job whose nodes leave and join: its name, the same on all nodes, and how often the nodes
# have joined. The agent sets both for its ranks.
ELASTIC_JOB, ELASTIC_ROUND = "PIPELINE_ELASTIC_JOB", "PIPELINE_ELASTIC_ROUND"
AGENT = "PIPELINE_AGENT"  # the agent of a rank: its process number and start time
STATES = {"R": "running", "S": "sleeping", "D": "blocked in the kernel", "T": "stopped by a signal", "Z": "dead"}


def start_time(pid: int) -> int:
    """Return the process's start in clock ticks since boot, which makes its number unique; 0: no such process."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else 0


def state(pid: int) -> str:
    """Return the state in words; `gone` if there is no such process."""
    fields = _stat(pid)
    return STATES.get(fields[0], fields[0]) if fields else "gone"


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, which may contain anything."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def machine() -> str:
    """Return an id of the place where process numbers are valid: this boot of the kernel and this namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def hand_over_agent() -> None:
    """Store this process's id in the environment, so that processes that it starts can check if it still runs."""
    os.environ[AGENT] = f"{os.getpid()}:{start_time(os.getpid())}"


def die_with_parent(wanted: bool = True) -> None:
    """Let the kernel kill this process when its parent dies. Affects only the calling thread.

    A parent that died before this call goes unnoticed, so the agent of hand_over_agent() is checked.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL) if wanted else 0, 0, 0, 0)
    pid, _, started = os.environ.get(AGENT, "").partition(":")
    if wanted and pid and os.getppid() != int(pid) and start_time(int(pid)) != int(started):
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_parent() -> None:
    """Let the kernel send SIGTERM when the parent dies, also after exec."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def kill(pid: int, started: int) -> bool:
    """Send SIGKILL to the process with this number and start time. Return True if it existed."""
    if not started or start_time(pid) != started:
        return False
    os.kill(pid, signal.SIGKILL)
    return True


@contextmanager
def only_one_run(folder: str, doing: str) -> Iterator[None]:
    """Raise ConfigError while another process is `doing` the same in the folder."""
    with open_lock(os.path.join(folder, LOCK)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another run is {doing} in {folder}: wait for it, or set another temp_dir") from error
        yield


PRIORITIES = ("normal", "low", "idle")
LOW = 5  # added to the nice value


def lower_priority(priority: str) -> None:
    """Lower the priority of this process and of threads and processes that it starts later.

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


@contextmanager
def none_while_importing() -> Iterator[None]:
    """Exclude the objects that imports make from garbage collection; many stay alive.

    If everything was imported before, nothing is excluded: garbage could then never be freed.
    """
    was_on, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if len(sys.modules) > num_modules:
                gc.freeze()
                atexit.register(_free_at_exit)
            gc.enable()


def _free_at_exit() -> None:
    """Let the last garbage collection see all objects; otherwise nanobind (DuckDB) reports leaked objects."""
    if "duckdb" in sys.modules:
        gc.unfreeze()
