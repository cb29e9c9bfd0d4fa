"""Lease a run folder to one run at a time, on one host or on many that share it (stdlib only).

    <run_dir>/.lease/00000007.json   the holder of token 7; the highest number is the newest holder's token

A token is made by os.link, which is atomic on local disks and on NFS; the modification time of its
file is the holder's heartbeat, which is set and compared by the file server's clock. A token whose
holder is dead, or sends no heartbeat for the ttl, is followed by a higher one. Before each commit
the holder checks that its token is still the highest (fencing).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from pipeline.runtime.errors import StorageError
from pipeline.runtime.process import processes

FOLDER = ".lease"
CLOCKS_DIFFER_S = 60.0


class RunFolderHeldError(StorageError):
    """Another run writes to the folder. The message names this run and its start."""


class LeaseLostError(OSError):
    """Another run has taken over the folder, so this run may not commit any more."""


@dataclass(frozen=True)
class Holder:
    token: int
    host: str
    machine: str  # boot and process-number namespace: where `pid` means something
    pid: int
    started: int
    job: str  # what the scheduler calls it, the same after a requeue; empty outside one
    attempt: int  # of the job
    since: str
    released: bool = False

    def describe(self, silent_s: float) -> str:
        job = f", job {self.job}" if self.job else ""
        heartbeat = f"last heartbeat {max(silent_s, 0.0):.0f} s ago"
        if silent_s < -CLOCKS_DIFFER_S:
            heartbeat = f"last heartbeat {-silent_s:,.0f} s ahead of the clock, which has gone back; if that run is over, remove {FOLDER}"
        return f"process {self.pid} on {self.host}{job}, since {self.since}, {heartbeat}, token {self.token}"


class Lease:
    """A lease that is held from take_lease() to release(). A thread sends the heartbeats."""

    def __init__(self, folder: str, holder: Holder, ttl_s: float, when_lost: Callable[[], None]) -> None:
        self.token = holder.token
        self._folder, self._holder, self._ttl_s, self._when_lost = folder, holder, ttl_s, when_lost
        self._ended = threading.Event()
        threading.Thread(target=self._send_heartbeats, name="lease", daemon=True).start()

    def check(self) -> None:
        """Raise LeaseLostError if another run holds a higher token. Call it right before a commit."""
        newest = _tokens(self._folder)[-1:]
        if newest != [self.token]:
            now = _read(self._folder, newest[0]) if newest else None
            by = now.describe(0.0) if now else "nobody: the lease was removed"
            raise LeaseLostError(
                f"this run (token {self.token}) no longer holds {os.path.dirname(self._folder)}; it is held by {by}"
            )

    def release(self) -> None:
        """Release the folder for other runs. A lost lease is left to the run that holds it now."""
        if self._ended.is_set():
            return
        self._ended.set()
        path = _path(self._folder, self.token)
        if os.path.exists(path):
            staged = os.path.join(self._folder, f".{uuid.uuid4().hex}.tmp")
            _write(staged, replace(self._holder, released=True))
            os.replace(staged, path)

    def _send_heartbeats(self) -> None:
        while not self._ended.wait(self._ttl_s / 4):
            try:
                os.utime(_path(self._folder, self.token))
                self.check()
            except LeaseLostError:
                return self._when_lost()
            except OSError:
                continue  # a file server that hiccups; after the ttl another may take over, which check() sees


def take_lease(run_dir: str, ttl_s: float, when_lost: Callable[[], None] = lambda: None) -> Lease:
    """Make the folder `run_dir` and take its lease for this process. Waits only for an earlier
    start of the same job, if it is unknown whether that start still runs.

    Raises:
        RunFolderHeldError: another run holds the lease, or took it first.
        OSError: the folder cannot be written to.
    """
    folder = os.path.join(run_dir, FOLDER)
    os.makedirs(folder, exist_ok=True)
    while True:
        tokens = _tokens(folder)
        token = tokens[-1] if tokens else 0
        holder = _read(folder, token)
        silent_s = _silent_s(folder, token)
        me = _myself(token + 1)
        if holder is None or not _is_held(holder, me, silent_s, ttl_s):
            return Lease(folder, _make_token(run_dir, folder, me), ttl_s, when_lost)
        if holder.machine == me.machine or not me.job or holder.job != me.job:
            raise RunFolderHeldError(_held(run_dir, holder.describe(silent_s)))
        time.sleep(min(1.0, ttl_s / 10))


def _held(run_dir: str, by: str) -> str:
    return f"another run writes to run_dir={run_dir} ({by}); wait, or choose another"


def _is_held(holder: Holder, me: Holder, silent_s: float, ttl_s: float) -> bool:
    if holder.released or silent_s > ttl_s:
        return False
    if holder.machine == me.machine:
        return processes.start_time(holder.pid) == holder.started
    return not (me.job and holder.job == me.job and me.attempt > holder.attempt)  # the scheduler has ended that one


def _make_token(run_dir: str, folder: str, me: Holder) -> Holder:
    path = _path(folder, me.token)
    staged = os.path.join(folder, f".{uuid.uuid4().hex}.tmp")
    _write(staged, me)
    try:
        os.link(staged, path)
    except FileExistsError:
        winner = _read(folder, me.token)
        by = winner.describe(0.0) if winner else f"token {me.token}"
        raise RunFolderHeldError(_held(run_dir, f"it was faster: {by}")) from None
    finally:
        os.remove(staged)
    tokens = _tokens(folder)
    if tokens[-1] != me.token:  # this process slept between reading the folder and making its token
        os.remove(path)
        raise RunFolderHeldError(_held(run_dir, f"it was faster: token {tokens[-1]}"))
    for old in tokens[:-1]:
        with contextlib.suppress(FileNotFoundError):
            os.remove(_path(folder, old))
    return me


def _myself(token: int) -> Holder:
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    job = os.environ.get("SLURM_JOB_ID") or ("" if run_id == "none" else run_id)
    attempt = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if elastic_job := os.environ.get(processes.ELASTIC_JOB):
        # The ranks of an earlier round have ended, or their node is lost to the others; fencing holds it off if it is not.
        job, attempt = elastic_job, int(os.environ[processes.ELASTIC_ROUND])
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    pid = os.getpid()
    start = processes.start_time(pid)
    return Holder(token, socket.gethostname(), processes.machine(), pid, start, job, attempt, now)


def _path(folder: str, token: int) -> str:
    return os.path.join(folder, f"{token:08d}.json")


def _tokens(folder: str) -> list[int]:
    """Return the numbers of the tokens in the folder, ascending."""
    return sorted(int(name[:-5]) for name in os.listdir(folder) if name.endswith(".json") and name[:-5].isdigit())


def _read(folder: str, token: int) -> Holder | None:
    try:
        with open(_path(folder, token)) as file:
            return Holder(**json.load(file))
    except (OSError, ValueError, TypeError):  # removed by its follower
        return None


def _silent_s(folder: str, token: int) -> float:
    """Return the seconds since the holder's last heartbeat, measured by the clock of the file server."""
    probe = os.path.join(folder, f".{uuid.uuid4().hex}.tmp")
    with open(probe, "w"):
        pass
    try:
        return os.stat(probe).st_mtime - os.stat(_path(folder, token)).st_mtime
    except FileNotFoundError:
        return 0.0
    finally:
        os.remove(probe)


def _write(path: str, holder: Holder) -> None:
    with open(path, "w") as file:
        json.dump(asdict(holder), file)
        file.flush()
        os.fsync(file.fileno())


def held_by(run_dir: str, ttl_s: float) -> str:
    """Return which run writes to the folder now; "" for none. Nothing is changed, and this host's clock is used."""
    folder = os.path.join(run_dir, FOLDER)
    if "://" in run_dir or not os.path.isdir(folder) or not (tokens := _tokens(folder)):
        return ""
    holder = _read(folder, tokens[-1])
    try:
        silent_s = time.time() - os.stat(_path(folder, tokens[-1])).st_mtime
    except FileNotFoundError:
        return ""
    held = holder is not None and _is_held(holder, _myself(holder.token + 1), silent_s, ttl_s)
    return holder.describe(silent_s) if held and holder is not None else ""
