"""Extend TorchX's commands (entry points) with one-line errors instead of tracebacks."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torchx.cli.cmd_cancel import CmdCancel
from torchx.cli.cmd_describe import CmdDescribe
from torchx.cli.cmd_list import CmdList
from torchx.cli.cmd_log import CmdLog
from torchx.cli.cmd_run import CmdRun
from torchx.cli.cmd_status import CmdStatus
from torchx.runner import Runner, get_runner
from torchx.schedulers.local_scheduler import SignalException
from torchx.specs import AppState, MalformedAppHandleException

from launch import slurm_jobs, slurm_scheduler
from pipeline.runtime.errors import LaunchError, did_you_mean
from pipeline.runtime.masking import mask
from pipeline.runtime.process.exit_codes import FAILED, INTERRUPTED, REQUEUE, USER_ERROR


class _Lines:
    def run(self, args: argparse.Namespace) -> None:
        with errors_as_lines():
            super().run(args)  # type: ignore[misc]


Status = type("Status", (_Lines, CmdStatus), {})
List = type("List", (_Lines, CmdList), {})
Describe = type("Describe", (_Lines, CmdDescribe), {})


class Run(CmdRun):
    def run(self, args: argparse.Namespace) -> None:
        with errors_as_lines("; jobs on a cluster continue to run"):
            if args.scheduler == "slurm" and args.scheduler_args:
                with get_runner() as runner:
                    known = [name for name, _ in runner.scheduler_run_opts("slurm")]
                args.scheduler_args = slurm_scheduler.sealed(args.scheduler_args, known)
            _check_keys(args.scheduler, args.scheduler_args or "")
            super().run(args)

    def _wait_and_exit(self, runner: Runner, app_handle: str, log: bool) -> None:
        """Wait for the job and exit as TorchX does, but do not print the raw status of a failed job."""
        following = self._start_log_thread(runner, app_handle) if log else None
        status = runner.wait(app_handle, wait_interval=1)
        if following:
            following.join()
        if status is None:
            raise LaunchError(f"{app_handle}: the scheduler no longer knows the job")
        if status.state != AppState.SUCCEEDED:
            hint = "" if log else f"; `torchx log {app_handle}` shows more"
            _end(f"{app_handle} ended as {status.state.name}{hint}", _exit_code(app_handle) or FAILED)


class Log(CmdLog):
    def run(self, args: argparse.Namespace) -> None:
        with errors_as_lines("; the job runs on"):
            # TorchX would wait forever for an unknown job.
            handle = "/".join(args.identifier.split("/")[:4])
            job_id = _slurm_id(handle)
            if not _is_known(handle) and job_id and (paths := slurm_scheduler.outputs_nearby(job_id)):
                # slurmctld forgets a job minutes after its end, but its output remains.
                for path in paths:
                    with open(path, errors="replace") as file:
                        sys.stdout.writelines(line for line in file if not args.regex or re.search(args.regex, line))
                return
            _check_known(handle)
            super().run(args)


class Cancel(CmdCancel):
    def run(self, args: argparse.Namespace) -> None:
        with errors_as_lines():
            _check_known(args.app_handle)
            super().run(args)


def _check_keys(scheduler: str, typed: str) -> None:
    """Raise LaunchError for an unknown -cfg key, which TorchX ignores."""
    with get_runner() as runner:
        known = [name for name, _ in runner.scheduler_run_opts(scheduler)]
    for word in re.findall(r"(?:^|[,;])([\w-]+)=", typed):
        if word not in known:
            hint = did_you_mean(word, known)
            raise LaunchError(
                f"-cfg {word}: unknown option of the scheduler {scheduler}{hint}; known are {', '.join(known)}"
            )


def _check_known(handle: str) -> None:
    if not _is_known(handle):
        raise LaunchError(f"{handle}: the scheduler does not know this job, or no longer knows it")


def _is_known(handle: str) -> bool:
    with get_runner() as runner:
        return runner.status(handle) is not None


def _slurm_id(handle: str) -> str:
    """Return the Slurm job id, or "" for a job of another scheduler."""
    return handle.rpartition("/")[2] if handle.startswith("slurm://") else ""


def _exit_code(handle: str) -> int:
    """Return the exit code of the job's script, or 0 if the exit code is unknown."""
    job = slurm_jobs.find_job(job_id) if (job_id := _slurm_id(handle)) else None
    return job.exit_code if job else 0


@contextmanager
def errors_as_lines(when_interrupted: str = "") -> Iterator[None]:
    """End the process with one line and an exit code instead of a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        _end(f"interrupted{when_interrupted}", INTERRUPTED)
    except SignalException as error:  # of local_cwd, after its ranks have ended
        if error.sigval == signal.SIGINT:
            _end("interrupted; run the same command again to resume", INTERRUPTED)
        _end(f"ended by {error.sigval.name}; run the same command again to resume", REQUEUE)
    except BrokenPipeError:  # `torchx log ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except Exception as error:
        if os.environ.get("LOGLEVEL", "").upper() == "DEBUG":
            raise
        if isinstance(error, (ValueError, MalformedAppHandleException)):
            _end(f"error: {error}", USER_ERROR)
        _end(f"error: {type(error).__name__}: {' '.join(str(error).split())} (LOGLEVEL=DEBUG shows where)", FAILED)


def _end(text: str, code: int) -> NoReturn:
    print(mask(text), file=sys.stderr, flush=True)
    sys.exit(code)
