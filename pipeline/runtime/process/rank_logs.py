"""Write each rank's output to files whose names say host, job and attempt.

<log_dir>/<job>_<host>_<random>/attempt_<n>/<local rank>/stdout.log, stderr.log    as torchelastic writes them
<log_dir>/rank_<rank>.stdout.log, rank_<rank>.stderr.log                           links to the newest of each
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest


class RankLogs(DefaultLogsSpecs):
    """torchelastic's, of which several hosts may write below the same folder."""

    def _make_log_dir(self, log_dir: str | None, rdzv_run_id: str) -> str:
        base = log_dir or tempfile.mkdtemp(prefix="torchelastic_")
        os.makedirs(base, exist_ok=True)
        host = socket.gethostname().partition(".")[0]
        # A name of its own each time: a second launch under the same id must not clear the files of the first.
        return tempfile.mkdtemp(prefix=f"{rdzv_run_id}_{host}_", dir=base)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = super().reify(envs)
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
