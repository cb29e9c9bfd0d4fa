"""Implement TorchX's scheduler `slurm` (an entry point) for our Slurm job.

It submits what launch.slurm renders and needs no accounting. Other components (dist.ddp, ...) are
submitted as TorchX does it. docs/adr/0011 explains why.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Optional

from fsspec.core import url_to_fs
from torchx.schedulers.api import AppDryRunInfo, DescribeAppResponse, ListAppResponse, Stream, filter_regex
from torchx.schedulers.slurm_scheduler import SlurmScheduler as TorchXSlurmScheduler
from torchx.schedulers.slurm_scheduler import _get_job_dirs, _save_job_dir
from torchx.specs import AppDef, AppState, ReplicaStatus, Role, RoleStatus, is_terminal, runopts

from launch import slurm_jobs
from launch.appdef import WORKLOAD
from launch.slurm import SlurmOptions, render_sbatch
from launch.workload import check_env
from pipeline.runtime.errors import LaunchError

STATES = {
    "COMPLETED": AppState.SUCCEEDED,
    "CANCELLED": AppState.CANCELLED,
    **dict.fromkeys(("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED"), AppState.RUNNING),
    **dict.fromkeys(
        ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESIZING", "SUSPENDED", "RESV_DEL_HOLD"),
        AppState.PENDING,
    ),
    **dict.fromkeys(
        ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE", "BOOT_FAIL", "REVOKED"), AppState.FAILED
    ),
}  # fmt: skip
JOB_DIR = "job_dir"
POLL_S = 0.5
SEALS = {ord(sign): chr(0xE000 + number) for number, sign in enumerate("=,;")}
NEVER_COPIED = (".git", ".venv", ".venv-gpu", "venv", "__pycache__")


@dataclass
class ScriptRequest:
    """A script for sbatch. `job_dir`, if set, is a copy of the working folder in which the script runs."""

    script: str
    job_dir: Optional[str]

    def __str__(self) -> str:
        return self.script


class SlurmScheduler(TorchXSlurmScheduler):
    def build_workspace_and_update_role(self, role: Role, workspace: str, cfg: Any) -> None:
        """Copy only the sources if job_dir is set. TorchX would also copy .venv, data sets and runs."""
        if cfg.get(JOB_DIR) is not None:
            role.image = cfg[JOB_DIR]
            copy_sources(url_to_fs(workspace)[1], cfg[JOB_DIR])

    def _run_opts(self) -> runopts:
        opts = super()._run_opts()
        known = dict(opts)
        for each in dataclasses.fields(SlurmOptions):
            name = each.name.replace("_", "-")
            if name not in known:
                opts.add(name, type_=bool if each.type == "bool" else str, default=None, help=each.metadata["help"])
        return opts

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[Any]:
        workload = app.roles[0].metadata.get(WORKLOAD)
        if workload is None:
            return super()._submit_dryrun(app, cfg)
        check_env(app.roles[0].env)
        typed = {each.name: cfg.get(each.name.replace("_", "-")) for each in dataclasses.fields(SlurmOptions)}
        options: dict[str, Any] = {
            name: unsealed(value) if isinstance(value, str) else value
            for name, value in typed.items()
            if value is not None
        }
        made = SlurmOptions(**options)
        where = os.path.join(cfg.get(JOB_DIR) or ".", os.path.dirname(made.output))
        if "%" not in where and not os.path.isdir(where):  # Slurm would fail the job without a message
            raise LaunchError(
                f"output={made.output}: the folder {where} does not exist; create it first, because Slurm does not"
            )
        request = ScriptRequest(render_sbatch(workload, made), cfg.get(JOB_DIR))
        return AppDryRunInfo(request, str)

    def schedule(self, dryrun_info: AppDryRunInfo[Any]) -> str:
        request = dryrun_info.request
        if not isinstance(request, ScriptRequest):
            return str(super().schedule(dryrun_info))
        job_id = slurm_jobs.submit(request.script, [f"--chdir={request.job_dir}"] if request.job_dir else [])
        if request.job_dir:
            _save_job_dir(job_id, request.job_dir)
        return job_id

    def _validate(self, app: AppDef, scheduler: str, *more: Any) -> None:
        """Check nothing, because Slurm refuses what it cannot run."""

    def _cancel_existing(self, app_id: str) -> None:
        slurm_jobs.cancel(app_id)

    def describe(self, app_id: str) -> Optional[DescribeAppResponse]:
        job = slurm_jobs.find_job(app_id)
        if job is None:
            return None
        state = STATES.get(job.state, AppState.UNKNOWN)
        name = job.name or "job"
        replicas = [ReplicaStatus(id=i, state=state, role=name, hostname=host) for i, host in enumerate(job.nodes)]
        return DescribeAppResponse(
            app_id=app_id,
            roles=[Role(name=name, image="", num_replicas=1)],  # one log for all nodes
            roles_statuses=[RoleStatus(name, replicas)],
            state=state,
            num_restarts=job.restarts,
            msg=f"{job.state}: {job.reason}" if job.reason else job.state,
        )

    def log_iter(
        self, app_id: str, role_name: str, k: int = 0, regex: Optional[str] = None, since: Optional[datetime] = None,
        until: Optional[datetime] = None, should_tail: bool = False, streams: Optional[Stream] = None,
    ) -> Iterable[str]:  # fmt: skip
        """Return the lines of the job's file or of its tasks, over all requeues."""
        paths = slurm_jobs.output_paths(app_id) or outputs_nearby(app_id)
        if not paths:
            # A job that this package did not submit, or an old job.
            return super().log_iter(app_id, role_name, k, regex, since, until, should_tail, streams)
        if len(paths) > 1 and should_tail:
            raise LaunchError(f"job {app_id} is an array of tasks: follow one task, for instance {app_id}_0")
        there = [path for path in paths if os.path.exists(path)] or paths[:1]
        lines = _lines(piece for path in there for piece in self._pieces(app_id, path, should_tail))
        return filter_regex(regex, lines) if regex else lines

    def _pieces(self, app_id: str, path: str, should_tail: bool) -> Iterator[str]:
        """Yield the text of the file. With should_tail, wait for more text until the job has ended."""
        while should_tail and not os.path.exists(path) and not self._has_ended(app_id):
            time.sleep(POLL_S)
        if not os.path.exists(path):
            raise LaunchError(f"job {app_id} has written nothing yet to {path}; `--tail` waits for it")
        with open(path, errors="replace", newline="\n") as file:
            while True:
                # checked first, so that later text is read below
                ended = not should_tail or self._has_ended(app_id)
                while piece := file.read(1 << 16):
                    yield piece
                if ended:
                    return
                time.sleep(POLL_S)

    def _has_ended(self, app_id: str) -> bool:
        job = slurm_jobs.find_job(app_id)
        return job is None or is_terminal(STATES.get(job.state, AppState.UNKNOWN))

    def list(self, *args: Any, **kwargs: Any) -> "list[ListAppResponse]":
        return [
            ListAppResponse(app_id=job.job_id, state=STATES.get(job.state, AppState.UNKNOWN))
            for job in slurm_jobs.list_jobs()
        ]


def create_scheduler(session_name: str, **kwargs: Any) -> SlurmScheduler:
    return SlurmScheduler(session_name=session_name)


def sealed(typed: str, known: Iterable[str]) -> str:
    """Escape `=`, `,` and `;` in the value of `sbatch=` in -cfg. The value ends at the next known key."""
    keys = "|".join(map(re.escape, known))
    value = re.compile(rf"(^|[,;])(sbatch=)(.*?)(?=[,;](?:{keys})=|$)", re.DOTALL)
    return value.sub(lambda found: found[1] + found[2] + found[3].translate(SEALS), typed)


def unsealed(value: str) -> str:
    return value.translate({ord(seal): sign for sign, seal in zip("=,;", SEALS.values(), strict=True)})


def copy_sources(folder: str, target: str) -> None:
    """Copy the files that git tracks; without git all except what .torchxignore lists.

    Symbolic links stay links. Raises LaunchError if `target` exists.
    """
    if os.path.lexists(target):
        raise LaunchError(f"job_dir={target} exists already; give a new folder")
    tracked = subprocess.run(["git", "-C", folder, "ls-files", "-z"], capture_output=True, text=True)
    if tracked.returncode == 0 and tracked.stdout:
        for name in filter(None, tracked.stdout.split("\0")):
            source, copy = os.path.join(folder, name), os.path.join(target, name)
            # otherwise the file was deleted, and the deletion is not committed
            if os.path.lexists(source):
                os.makedirs(os.path.dirname(copy), exist_ok=True)
                shutil.copy2(source, copy, follow_symlinks=False)
        return
    ignore_file = os.path.join(folder, ".torchxignore")
    lines = open(ignore_file).read().split() if os.path.exists(ignore_file) else []  # noqa: SIM115
    shutil.copytree(folder, target, symlinks=True, ignore=shutil.ignore_patterns(*lines, *NEVER_COPIED))


def outputs_nearby(app_id: str) -> list[str]:
    """Return the output files of a job that Slurm has forgotten, from the current folder and from job_dir."""
    folders = [".", *filter(None, [_get_job_dirs().get(app_id)])]
    names = (f"*-{app_id}.out", f"*-{app_id}_[0-9]*.out")
    return [
        path
        for folder in folders
        for name in names
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), name)))
    ]


def _lines(pieces: Iterable[str]) -> Iterable[str]:
    """Join pieces of text and yield complete lines."""
    rest = ""
    for piece in pieces:
        *whole, rest = (rest + piece).split("\n")
        yield from (f"{line}\n" for line in whole)
    if rest:
        yield rest
