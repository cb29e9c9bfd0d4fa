"""Identify processes of this machine and their state, and allow one run at a time in a folder (Linux, stdlib only)."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.runtime.errors import ConfigError

PR_SET_PDEATHSIG = 1
LOCK = "lock"  # the file of only_one_run
# Of a job whose nodes come and go: its name, the same on all nodes, and how often the nodes have met. The agent sets both for its ranks.
ELASTIC_JOB, ELASTIC_ROUND = "PIPELINE_ELASTIC_JOB", "PIPELINE_ELASTIC_ROUND"
STATES = {"R": "running", "S": "sleeping", "D": "blocked in the kernel", "T": "stopped by a signal", "Z": "dead"}


def hostname() -> str:
    return socket.gethostname()


def start_time(pid: int) -> int:
    """Clock ticks since boot at which the process began: with the number it names one process. 0: there is none."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else 0


def state(pid: int) -> str:
    """In words; `gone` where there is no such process."""
    fields = _stat(pid)
    return STATES.get(fields[0], fields[0]) if fields else "gone"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold anything."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def machine() -> str:
    """Where a process number means what it means here: this start of the kernel, this namespace of numbers."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return hostname()


def die_with_parent(wanted: bool = True) -> None:
    """Let the kernel kill this process when its parent dies, however that dies; only for the calling thread's sake."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL) if wanted else 0, 0, 0, 0)


def end_with_parent() -> None:
    """As die_with_parent, by SIGTERM, so that what the process holds is saved; survives exec."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def kill(pid: int, started: int) -> bool:
    """SIGKILL the process of that number and start time; whether there was one."""
    if not started or start_time(pid) != started:
        return False
    os.kill(pid, signal.SIGKILL)
    return True


@contextmanager
def only_one_run(folder: str, doing: str) -> Iterator[None]:
    """Raises ConfigError while another process is `doing` the same in the folder; its lock ends with it."""
    with open(os.path.join(folder, LOCK), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another run is {doing} in {folder}: wait for it, or set another temp_dir") from error
        yield
