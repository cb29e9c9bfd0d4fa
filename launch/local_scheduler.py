"""Implement TorchX's scheduler `local_cwd` (an entry point) with the job's grace period.

TorchX kills ten seconds after SIGTERM, which is too short to save the tables of a large model.
"""

from __future__ import annotations

import subprocess
import time
from typing import Any

from torchx.schedulers.local_scheduler import CWDImageProvider, LocalScheduler
from torchx.specs import AppDef

from launch.appdef import WORKLOAD


class GracefulLocalScheduler(LocalScheduler):
    grace_s = 0.0  # the longest of the jobs that it started

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> Any:
        for role in app.roles:
            if workload := role.metadata.get(WORKLOAD):
                self.grace_s = max(self.grace_s, workload.grace_s)
        return super()._submit_dryrun(app, cfg)

    def close(self) -> None:
        replicas = [each for app in self._apps.values() for several in app.role_replicas.values() for each in several]
        for each in replicas:
            each.terminate()
        until = time.monotonic() + self.grace_s
        for each in replicas:
            try:
                each.proc.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        super().close()  # kills the remaining processes


def create_scheduler(session_name: str, cache_size: int = 100, **kwargs: Any) -> GracefulLocalScheduler:
    return GracefulLocalScheduler(session_name, CWDImageProvider, cache_size)
