"""Start the ranks of a verb, and restart them if one fails:

    python -m pipeline agent --nproc-per-node 2 -m pipeline train experiment=quickstart

This is torchrun with the same flags and with exit codes that a scheduler can use. Ranks that end
with a final code (pipeline.runtime.process.exit_codes) are not restarted. SIGTERM and SIGINT reach
the ranks, which have a grace period to save.

With `--nnodes MIN:MAX --rdzv-backend folder` nodes may leave and join: the others continue from the
newest checkpoint. If a node joins, the ranks save at the next step, and all continue from there.

A rank's output is in <log_dir>/<job>_<host>_<random>/attempt_<n>/<local rank>/stdout.log; the links
<log_dir>/rank_<rank>.stdout.log name the newest files. A start removes the folders of old starts.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from types import FrameType
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api as launcher

from pipeline.runtime.logs import configure_logging, get_logger
from pipeline.runtime.process import file_rendezvous
from pipeline.runtime.process.exit_codes import DONE, FAILED, FINAL, INTERRUPTED, REQUEUE, USER_ERROR
from pipeline.runtime.process.processes import ELASTIC_JOB, ELASTIC_ROUND, hand_over_agent

KEPT_STARTS, KEPT_DAYS = 100, 30
DAY_S = 86400.0
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"


def old_starts(log_dir: str, kept: int = KEPT_STARTS, days: float = KEPT_DAYS) -> list[str]:
    """Return the folders of starts that were not written to for `days` days, except for the newest `kept` starts."""
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
    """Return the time when a start's files were last written."""
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
        """Count one attempt for each start of the ranks. torchelastic does not count starts after nodes have joined."""
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


GRACE = "--grace-s"
AFTER_FAILURE_S = 5  # a rank that still runs after this has lost a peer and cannot save
ENDS_ALL = {DONE, *FINAL} - {REQUEUE}  # these end the other nodes too, if nodes may leave and join
KILL_BEFORE_S = 3  # part of the grace period, for stopped ranks, which no signal reaches
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
logger = get_logger("pipeline.agent")


class Agent(LocalElasticAgent):
    """Extend torchelastic's agent, which torchelastic makes: results belong to the class."""

    grace_s = 30.0
    signalled: signal.Signals | None = None
    # Exit codes of this host's ranks: of ranks that ended before the other ranks had to end, and of
    # all ranks.
    first_codes: tuple[int, ...] = ()
    last_codes: tuple[int, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._processes: Any = None  # torchelastic's SubprocessContext of the running ranks
        # local rank -> exit code, before the other ranks had to end
        self._ended_first: dict[int, int] = {}
        self._admits_node = False  # the ranks end because a node has joined

    def _rendezvous(self, worker_group: Any) -> None:
        before: int | None = worker_group.group_world_size
        super()._rendezvous(worker_group)
        if (found := file_rendezvous.FileRendezvous.newest) is None:
            return
        os.environ[ELASTIC_JOB], os.environ[ELASTIC_ROUND] = found.get_run_id(), str(found.round)
        now: int = worker_group.group_world_size
        if before is not None and now < before:  # the ranks failed because a node was lost
            self._remaining_restarts = min(self._remaining_restarts + 1, worker_group.spec.max_restarts)
        if now != before:
            logger.warning("%d node(s) have joined; before: %s", now, "none" if before is None else before)

    def _restart_workers(self, worker_group: Any) -> None:
        self._admits_node = worker_group.state == WorkerState.HEALTHY
        if self._admits_node:
            logger.warning("a node has joined: the ranks save and restart with it")
        super()._restart_workers(worker_group)
        self._admits_node = False

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._ended_first, self._processes = {}, self._pcontext
        self._close = self._processes.close
        # torchelastic waits 30 s for ranks that cannot end.
        self._processes.close = self._close_in_time
        # start_processes has installed torchelastic's handlers, which a second signal would break
        listen()
        return pids

    def _exit_codes(self) -> dict[int, int]:
        polled = {rank: each.proc.poll() for rank, each in self._processes.subprocess_handlers.items()}
        return {rank: code for rank, code in polled.items() if code is not None}

    def _close_in_time(self, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        self._ended_first = self._ended_first or self._exit_codes()
        may_save = self.signalled or self._admits_node or REQUEUE in self._ended_first.values()
        self._close(death_sig, max(1, int(self.grace_s) - KILL_BEFORE_S) if may_save else AFTER_FAILURE_S)
        Agent.first_codes, Agent.last_codes = tuple(self._ended_first.values()), tuple(self._exit_codes().values())

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if not result.is_failed():
            return result
        codes, meeting = FINAL & set(self._ended_first.values()), file_rendezvous.FileRendezvous.newest
        if codes == {REQUEUE} and meeting is not None:
            # A rank of another node was asked to stop, or to let a node join. All ranks have saved,
            # and none has failed.
            self._remaining_restarts += 1
            logger.warning("the ranks have saved; the remaining nodes restart them")
            return result
        if codes:
            self._remaining_restarts = 0
        for worker in worker_group.workers:
            code = self._ended_first.get(worker.local_rank, DONE)
            failure = result.failures.get(worker.global_rank)
            if failure and code != DONE and code not in FINAL:
                logger.warning("%s", describe_failure(worker.global_rank, failure))
        is_last = not codes and self._remaining_restarts == 0
        if is_last and meeting is not None and meeting.lost_one_of(worker_group.group_world_size):
            self._remaining_restarts = 1
            logger.warning("a node was lost: the remaining nodes restart all ranks")
        elif self._remaining_restarts > 0:
            most = worker_group.spec.max_restarts
            logger.warning("restarting all ranks, %d of %d times", most - self._remaining_restarts + 1, most)
        return result


def describe_failure(rank: int, failure: ProcessFailure) -> str:
    """Describe what ended a rank: a signal, or the message in its error file."""
    if failure.exitcode < 0:
        return f"rank {rank} (pid {failure.pid}) was ended by {failure.signal_name()}"
    return f"rank {rank} (pid {failure.pid}) ended with code {failure.exitcode}: {_message_of(failure)[:1000]}"


def _message_of(failure: ProcessFailure) -> str:
    message: Any = failure.message
    if isinstance(message, dict):
        return str(message.get("message", ""))
    return "it left no message; its stderr says more" if failure.error_file == "<N/A>" else str(message)


def listen() -> None:
    """Let the first signal end the run; further signals change nothing."""

    def hear(signum: int, frame: FrameType | None) -> None:
        if Agent.signalled is None:
            Agent.signalled = signal.Signals(signum)
            raise SignalException(f"got {Agent.signalled.name}", Agent.signalled)

    for number in SIGNALS:
        signal.signal(number, hear)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the flags as torchrun does. With --node-rank, node 0 hosts the rendezvous.

    torchelastic would compare host names, and a pod may start before DNS knows its name.
    """
    args = torchrun.parse_args(argv)
    if args.rdzv_backend == "c10d" and any(word.replace("_", "-").startswith("--node-rank") for word in argv):
        is_host = "true" if args.node_rank == 0 else "false"
        args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, f"is_host={is_host}"]))
    return args


def run(argv: list[str]) -> int:
    """Run the launch and return its exit code (see pipeline.runtime.process.exit_codes)."""
    launcher.LocalElasticAgent = Agent  # type: ignore[misc]  # launch_agent makes its agent by this name
    torchrun.DefaultLogsSpecs = RankLogs  # type: ignore[misc]  # likewise
    file_rendezvous.register()
    hand_over_agent()
    listen()
    code = _run(parse(argv))
    if (found := file_rendezvous.FileRendezvous.newest) is not None:
        if code in ENDS_ALL:
            found.end(code)
        else:
            found.leave()
    return code


def _run(args: argparse.Namespace) -> int:
    try:
        torchrun.run(args)
    except file_rendezvous.RendezvousEndedError as error:
        logger.warning("%s", error)
        return error.code
    except ChildFailedError as error:
        return _code_of(error)
    except SignalException:
        return _code_after_signal()
    except RendezvousError as error:
        logger.error("the hosts could not connect: %s: %s", type(error).__name__, error)
        return FAILED
    return DONE


def _code_of(error: ChildFailedError) -> int:
    # A rank that had to end because another rank died may end with REQUEUE, which then does not
    # count.
    codes = Agent.first_codes
    _, first = error.get_first_failure()
    final = next((code for code in (USER_ERROR, REQUEUE, INTERRUPTED) if code in codes), None)
    if final == USER_ERROR:
        messages = [_message_of(each) for each in error.failures.values() if each.exitcode == final]
        # rank 0 reported nothing
        if messages and (0 not in error.failures or error.failures[0].exitcode != final):
            logger.error("%s", messages[0])
    return final or (first.exitcode if first.exitcode > 0 else FAILED)


def _code_after_signal() -> int:
    """Return the exit code. It is REQUEUE even if ranks were killed, because they resume from an earlier step."""
    if Agent.last_codes and set(Agent.last_codes) == {DONE}:
        return DONE
    if USER_ERROR in Agent.last_codes:
        return USER_ERROR
    return INTERRUPTED if Agent.signalled == signal.SIGINT else REQUEUE


def main() -> None:
    configure_logging()
    # otherwise a user wants to read torchelastic's messages
    if os.environ.get("LOGLEVEL", "WARNING") == "WARNING":
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    argv = sys.argv[1:]
    if argv[:1] == [GRACE]:  # this package's flag, which comes before torchrun's
        Agent.grace_s, argv = float(argv[1]), argv[2:]
    sys.exit(run(argv))
