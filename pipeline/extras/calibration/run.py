"""Run a calibration: ranks of every setup train the same small jobs, one setup after the other, in
passes.
"""

from __future__ import annotations

import itertools
import logging
import math
import multiprocessing
import os
import random
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import psutil

from pipeline.devices import best_here
from pipeline.extras.calibration.job import CalibrateJob
from pipeline.extras.calibration.jobs import SmallJob, small_jobs, with_shardings
from pipeline.extras.step_time.calibration import (
    Calibration,
    Conditions,
    Speeds,
    TimedJob,
    disturbances,
    median_and_spread,
    these_versions,
    this_machine,
)
from pipeline.runtime.errors import TrainingError
from pipeline.runtime.logs import get_logger

PASSES = 3  # the fastest pass counts, because other guests slow down a virtual machine for seconds
MAX_JOBS, MIN_JOBS = 200, 12  # of a setup; a busy machine takes longer than requested
START_S = 8.0  # per setup: imports, compiled kernels, recording of layers
# multiples of the time, and seconds on a busy machine, after which a rank counts as hanging
ENDS_AFTER, GRACE_S = 6.0, 240.0
REFERENCE_SIZE = 384  # of the square product that is repeated throughout
SEED = 16
logger = get_logger(__name__)


@dataclass(frozen=True)
class Setup:
    """Describe ranks of one host with `threads` each, and the jobs that they train: as many as fit in `seconds`."""

    ranks: int
    threads: int
    jobs: list[SmallJob]
    folder: str
    seconds: float = math.inf
    by_cpu: bool = False
    speeds: bool = True  # also measure Speeds

    @property
    def name(self) -> str:
        return f"{self.ranks}x{self.threads}"


@dataclass
class Found:
    """Hold the result of a setup. jobs: times by the job's number in the setup. reference: seconds
    of the repeated operation.
    """

    jobs: dict[int, TimedJob]
    reference: list[float]
    speeds: dict[str, object] = field(default_factory=dict)
    busy_cores: float = 0.0


def calibrate(job: CalibrateJob) -> Calibration:
    """Calibrate in about job.seconds.

    Raises TrainingError if the machine was too busy, or a rank ended.
    """
    if best_here() != "cpu":
        logger.warning("calibrate measures CPU ranks only: steps on GPUs are predicted from the data sheet")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = run_in_turns(calibration_setups(job, folder))
    return calibration_of(job, found, time.monotonic() - started)


def calibration_setups(job: CalibrateJob, folder: str) -> list[Setup]:
    names = job.setups or (["1x1"] if job.clock == "cpu" else default_setups(this_machine().cores))
    seconds = max(job.seconds / len(names) - START_S, 5.0)
    found = []
    for name in names:
        ranks, threads = map(int, name.split("x"))
        jobs = list(itertools.islice(small_jobs(random.Random(SEED + job.seed)), MAX_JOBS))
        jobs = with_shardings(jobs) if ranks > 1 else jobs
        found.append(Setup(ranks, threads, jobs, folder, seconds, job.clock == "cpu"))
    return found


def default_setups(cores: int) -> list[str]:
    """Return one rank on one core, one rank on all cores, and 1, 2, 4 or 8 ranks that share all cores."""
    ranks = max(count for count in (1, 2, 4, 8) if count <= cores)
    return list(dict.fromkeys(("1x1", f"1x{cores}", f"{ranks}x{cores // ranks}")))


def calibration_of(job: CalibrateJob, found: Sequence[Found], seconds: float) -> Calibration:
    """Return the calibration. Raises TrainingError if the machine was too busy."""
    speeds: dict[str, object] = {}
    for each in found:
        speeds |= each.speeds
    conditions = Conditions(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        busy_cores=round(max(each.busy_cores for each in found), 3),
        noise=round(max(median_and_spread(each.reference)[1] for each in found), 4),
        reference_us=round(1e6 * found[0].reference[0], 1),
        clock=job.clock,
    )
    measured = Calibration(
        job.name,
        this_machine(),
        these_versions(),
        conditions,
        Speeds(**speeds),  # type: ignore[arg-type]
        [timed for each in found for timed in each.jobs.values()],
    )
    wrong = disturbances(measured)
    if wrong and not job.force:
        raise TrainingError(
            f"nothing was written because the machine was busy: {'; '.join(wrong)}. Calibrate when nothing "
            "else runs, or set force=true to keep the numbers anyway"
        )
    for line in wrong:
        logger.warning("the calibration is not reliable: %s", line)
    return measured


def run_in_turns(setups: Sequence[Setup]) -> list[Found]:
    """Train all setups' jobs in passes: one pass of each setup after the other.

    A rented machine is sometimes slower for a minute. With passes, such a minute affects only one
    pass of every setup, and the other passes compensate for it.

    Raises:
        TrainingError: a rank has ended, or did not answer in time.
    """
    with ExitStack() as stack:
        running = [stack.enter_context(_Ranks(setup)) for setup in setups]
        for each in running:
            each.receive()  # the start is not measured
        for _ in range(PASSES):
            for each in running:
                each.take_turn()
        return [each.finish() for each in running]


class _Ranks:
    """Run the processes of one setup. Between their turns they wait."""

    def __init__(self, setup: Setup) -> None:
        self._busy_s = self._seconds = 0.0
        self._setup = setup
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> _Ranks:
        context = multiprocessing.get_context("spawn")
        for rank in range(self._setup.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_rank, args=(rank, self._setup, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        return self

    def take_turn(self) -> None:
        started, busy, own = time.monotonic(), _busy_seconds(), _own_seconds()
        self._go()
        self.receive()
        self._seconds += time.monotonic() - started
        self._busy_s += max(0.0, _busy_seconds() - busy - (_own_seconds() - own))

    def finish(self) -> Found:
        self._go()
        found = self.receive()
        assert isinstance(found, Found)
        found.busy_cores = self._busy_s / max(self._seconds, 1e-9)
        logger.info("%s: %d jobs, other programs took %.2f cores", self._setup.name, len(found.jobs), found.busy_cores)
        return found

    def _go(self) -> None:
        for pipe in self._pipes:
            pipe.send("go")

    def receive(self) -> object:
        """Wait for a message from each rank and return rank 0's message."""
        seconds = ENDS_AFTER * (min(self._setup.seconds, 600.0) + START_S) + GRACE_S
        name = self._setup.name
        found = []
        for pipe in self._pipes:
            try:
                if not pipe.poll(seconds):
                    raise TrainingError(f"a rank of setup {name} was silent for {seconds:.0f} s")
                found.append(pipe.recv())
            except EOFError as error:
                raise TrainingError(f"a rank of setup {name} ended; its log is above") from error
        return found[0]

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _busy_seconds() -> float:
    """Return the CPU seconds of all cores, including time that the hypervisor gave to other
    machines.
    """
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "steal", 0.0) + getattr(times, "softirq", 0.0))


def _own_seconds() -> float:
    """Return the CPU seconds of this process and its children."""
    found = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        found += times.user + times.system
    return found


def _run_rank(rank: int, setup: Setup, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(setup.ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(setup.ranks)
    )
    import torch
    import torch.distributed as dist

    from pipeline.devices.cpu.process import keep_freed_memory
    from pipeline.extras.calibration.jobs import TimedTrainings
    from pipeline.extras.calibration.speeds import measure_exchange, measure_host, seconds_of
    from pipeline.runtime.process.distributed import DistributedContext

    torch.set_num_threads(setup.threads)
    keep_freed_memory(setup.ranks)
    store = f"file://{setup.folder}/{setup.name}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=setup.ranks)
    context = DistributedContext(rank, setup.ranks, rank, setup.ranks, torch.device("cpu"), "gloo")
    square, reference = torch.ones(REFERENCE_SIZE, REFERENCE_SIZE), []
    trainings = TimedTrainings(context, setup.threads, setup.by_cpu)
    trainings.run_one(setup.jobs[0])  # compiles kernels
    pipe.send("ready")
    count = len(setup.jobs)
    for number in range(PASSES):
        pipe.recv()
        end = time.monotonic() + setup.seconds / PASSES
        for index, job in enumerate(setup.jobs[:count]):
            if number == 0 and not _agree(index < MIN_JOBS or time.monotonic() < end):
                count = index
                break
            if index % 4 == 0:
                reference.append(seconds_of(lambda: square @ square))
            trainings.time(index, job)
        pipe.send(None)
    pipe.recv()
    speeds = dict(measure_host() if rank == 0 and setup.name == "1x1" else {}) if setup.speeds else {}
    if setup.speeds and setup.ranks > 1:
        speeds |= measure_exchange(context)
    # layers are recorded without a process group, as when a plan is made
    dist.destroy_process_group()
    pipe.send(Found(trainings.timed_jobs(setup.name) if rank == 0 else {}, reference, speeds))


def _agree(wanted: bool) -> bool:
    """Collective: return rank 0's answer on every rank."""
    import torch
    import torch.distributed as dist

    answer = torch.tensor([int(wanted)])
    dist.broadcast(answer, 0)
    return bool(answer[0])
