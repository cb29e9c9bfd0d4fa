"""Write each rank's output to files whose names contain host, job and attempt.

<log_dir>/<job>_<host>_<random>/attempt_<n>/<local rank>/stdout.log, stderr.log    as torchelastic
writes them <log_dir>/rank_<rank>.stdout.log, rank_<rank>.stderr.log                           links
to the newest files

A start removes the folders of starts that are older than KEPT_DAYS and not among the newest
KEPT_STARTS.
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
    """Return folders of starts that were not written for this many days, except for the newest
    `kept` starts.
    """
    before = time.time() - days * DAY_S
    found = []
    with contextlib.suppress(OSError), os.scandir(log_dir) as entries:
        for entry in entries:
            # a start on another host may remove them at the same time
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    found.append((_last_written(entry.path), entry.path))
    newest_first = sorted(found, reverse=True)
    return [path for written, path in newest_first[kept:] if written < before]


def _last_written(start: str) -> float:
    """Return when a start's folder was last written.

    The files of its attempts are written long after it is made.
    """
    files = (os.path.join(folder, name) for folder, _, names in os.walk(start) for name in names)
    return max((os.lstat(file).st_mtime for file in files), default=os.stat(start).st_mtime)


def remove_starts(paths: list[str]) -> None:
    """Remove the folders, and the links that then point to nothing."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    for log_dir in {os.path.dirname(path) for path in paths}:
        with contextlib.suppress(OSError):
            for entry in os.scandir(log_dir):
                if entry.is_symlink() and not os.path.exists(entry.path):
                    os.unlink(entry.path)


class RankLogs(DefaultLogsSpecs):
    """Extend torchelastic's log files, so that several hosts can write below the same folder."""

    _num_attempts = 0

    def _make_log_dir(self, log_dir: str | None, rdzv_run_id: str) -> str:
        base = log_dir or tempfile.mkdtemp(prefix="torchelastic_")
        os.makedirs(base, exist_ok=True)
        host = socket.gethostname().partition(".")[0]
        remove_starts(old_starts(base))
        # A separate name each time, because a second launch under the same id must not clear the
        # files of the first launch.
        return tempfile.mkdtemp(prefix=f"{rdzv_run_id}_{host}_", dir=base)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """An attempt is a start of the ranks. torchelastic's count does not change if nodes leave
        and join, and it clears the folder.
        """
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
        # Links only help people, so a run does not fail on a file system without links.
        with contextlib.suppress(OSError):
            os.symlink(os.path.relpath(file, folder), staged)
            os.replace(staged, os.path.join(folder, name))
