"""Identify processes of this machine and their state, and allow one run at a time in a folder
(Linux, stdlib only).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
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


def hostname() -> str:
    return socket.gethostname()


def start_time(pid: int) -> int:
    """Return the start time in clock ticks since boot, which with the number identifies a process.

    0: no such process.
    """
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
    """Identify where process numbers are valid: this boot of the kernel and this namespace of
    process numbers.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return hostname()


def hand_over_agent() -> None:
    """Let the processes that this one starts find out whether it is still there."""
    os.environ[AGENT] = f"{os.getpid()}:{start_time(os.getpid())}"


def die_with_parent(wanted: bool = True) -> None:
    """Let the kernel kill this process when its parent dies for any reason.

    Affects only the calling thread.

    The kernel does not tell of a parent that died before this call. So if hand_over_agent() named an
    agent, and the agent is gone, this process ends now.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL) if wanted else 0, 0, 0, 0)
    pid, _, started = os.environ.get(AGENT, "").partition(":")
    if wanted and pid and os.getppid() != int(pid) and start_time(int(pid)) != int(started):
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_parent() -> None:
    """Let the kernel send SIGTERM when the parent dies, so that this process can save.

    It survives exec.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def kill(pid: int, started: int) -> bool:
    """Send SIGKILL to the process with this number and start time. Return whether it existed."""
    if not started or start_time(pid) != started:
        return False
    os.kill(pid, signal.SIGKILL)
    return True


@contextmanager
def only_one_run(folder: str, doing: str) -> Iterator[None]:
    """Raise ConfigError while another process is `doing` the same in the folder.

    The lock ends with the process.
    """
    with open_lock(os.path.join(folder, LOCK)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another run is {doing} in {folder}: wait for it, or set another temp_dir") from error
        yield
