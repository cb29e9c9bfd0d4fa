"""Write each rank's output to files whose names say host, job and attempt.

<log_dir>/<job>_<host>_<random>/attempt_<n>/<local rank>/stdout.log, stderr.log    as torchelastic writes them
<log_dir>/rank_<rank>.stdout.log, rank_<rank>.stderr.log                           links to the newest of each

A start removes the folders of starts that are older than KEPT_DAYS and not among the newest KEPT_STARTS.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest

KEPT_STARTS, KEPT_DAYS = 100, 30
DAY_S = 86400.0
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"


def old_starts(log_dir: str, kept: int = KEPT_STARTS, days: float = KEPT_DAYS) -> list[str]:
    """Paths of the starts' folders that nobody has written to for so many days, less the newest `kept` of all."""
    before = time.time() - days * DAY_S
    found = []
    with contextlib.suppress(OSError), os.scandir(log_dir) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another host's start removes them too
                if entry.is_dir(follow_symlinks=False):
                    found.append((_last_written(entry.path), entry.path))
    newest_first = sorted(found, reverse=True)
    return [path for written, path in newest_first[kept:] if written < before]


def _last_written(start: str) -> float:
    """Of a start's folder: its attempts' files are written long after it is made."""
    files = (os.path.join(folder, name) for folder, _, names in os.walk(start) for name in names)
    return max((os.lstat(file).st_mtime for file in files), default=os.stat(start).st_mtime)


def remove_starts(paths: list[str]) -> None:
    """With the links that then lead nowhere."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    for log_dir in {os.path.dirname(path) for path in paths}:
        with contextlib.suppress(OSError):
            for entry in os.scandir(log_dir):
                if entry.is_symlink() and not os.path.exists(entry.path):
                    os.unlink(entry.path)


class RankLogs(DefaultLogsSpecs):
    """torchelastic's, of which several hosts may write below the same folder."""

    _num_attempts = 0

    def _make_log_dir(self, log_dir: str | None, rdzv_run_id: str) -> str:
        base = log_dir or tempfile.mkdtemp(prefix="torchelastic_")
        os.makedirs(base, exist_ok=True)
        host = socket.gethostname().partition(".")[0]
        remove_starts(old_starts(base))
        # A name of its own each time: a second launch under the same id must not clear the files of the first.
        return tempfile.mkdtemp(prefix=f"{rdzv_run_id}_{host}_", dir=base)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """An attempt is a start of the ranks: torchelastic's own count stands still where nodes come and go, and it clears the folder."""
        attempt = {RESTART_COUNT: str(self._num_attempts)}
        self._num_attempts += 1
        counted = {rank: {**env, **attempt} for rank, env in envs.items()}
        destinations = super().reify(counted)
        for local_rank, env in envs.items():  # torchelastic names each rank's error file here
            env.update({name: value for name, value in counted[local_rank].items() if name != RESTART_COUNT})
        for files, stream in ((destinations.stdouts, "stdout"), (destinations.stderrs, "stderr")):
            for local_rank, file in files.items():
                if rank := envs[local_rank].get("RANK"):
                    self._link(file, f"rank_{rank}.{stream}.log")
        return destinations

    def _link(self, file: str, name: str) -> None:
        if not file or file == os.devnull or not self._run_log_dir:
            return  # that stream goes to the console
        folder = os.path.dirname(self._run_log_dir)
        staged = os.path.join(self._run_log_dir, f".{name}")
        # For people alone: no run ends for the want of it, on file systems without links for instance.
        with contextlib.suppress(OSError):
            os.symlink(os.path.relpath(file, folder), staged)
            os.replace(staged, os.path.join(folder, name))
