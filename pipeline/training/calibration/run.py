"""Run a calibration: every setup in processes of its own, one a rank, by turns, and put what they measured into one table."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, TypeAlias

from pipeline.config.jobs.machine import CalibrateJob
from pipeline.devices import best_here
from pipeline.planner.step_time.measurements import (
    Conditions,
    Measurement,
    Measurements,
    disturbances,
    median_and_spread,
    these_versions,
    this_machine,
    unsteadiness,
)
from pipeline.runtime.errors import TrainingError
from pipeline.runtime.logs import get_logger
from pipeline.training.calibration.clock import Load

if TYPE_CHECKING:
    from pipeline.runtime.process.distributed import DistributedContext
    from pipeline.training.calibration.clock import Bench

SHARES = {
    "dense": 0.28,
    "tables": 0.18,
    "jobs": 0.47,
}  # of a setup's seconds; the remainder goes to starting and storage
LEFT_OUT = (1,)  # of the passes, by the jobs: so there are more of them
START_S = 6.0  # a setup: imports, compiled kernels
ENDS_AFTER, GRACE_S = 6.0, 240.0  # budgets, and seconds on a machine that others use: then a rank has hung
SEED = 16
logger = get_logger(__name__)
# Each `yield` ends a turn: then another setup's ranks work.
Work: TypeAlias = "Callable[[Bench, Setup, DistributedContext], Iterator[None]]"


@dataclass(frozen=True)
class Setup:
    """Ranks of one host, each with `threads`; what they measure is drawn by the seed."""

    ranks: int
    threads: int
    seconds: float
    seed: int
    folder: str
    by_cpu: bool = False

    @property
    def name(self) -> str:
        return f"{self.ranks}x{self.threads}"


@dataclass
class Found:
    """What rank 0 has measured, and the seconds of the operation that is repeated throughout."""

    rows: list[Measurement]
    reference: list[float]


def calibrate(job: CalibrateJob) -> Measurements:
    """About job.seconds. Raises TrainingError where the machine was too busy for the numbers to be of use, or a rank ended."""
    if best_here() != "cpu":
        logger.warning(
            "calibrate measures CPU ranks only: steps on this host's GPUs are predicted from their data sheet"
        )
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = run_in_turns(calibration_works(job, folder))
    return measurements_of(job, found, time.monotonic() - started)


def calibration_works(job: CalibrateJob, folder: str) -> list[tuple[Setup, Work]]:
    """What a calibration runs in turns: each setup, in passes."""
    cores = this_machine().cores
    setups = job.setups or (["1x1"] if job.clock == "cpu" else default_setups(cores))
    seconds = max(job.seconds / len(setups) - START_S, 5.0)
    works: list[tuple[Setup, Work]] = []
    for name in setups:
        ranks, threads = map(int, name.split("x"))
        works.append((Setup(ranks, threads, seconds, SEED + job.seed, folder, job.clock == "cpu"), measure))
    return works


def measurements_of(job: CalibrateJob, found: Sequence[tuple[Found, float]], seconds: float) -> Measurements:
    """Of what the works of a calibration have found in so many seconds. Raises TrainingError where the machine was too busy."""
    rows = [row for each, _ in found for row in each.rows]
    for each, others in found:
        logger.info("%s: %d measurements, other programs took %.2f cores", each.rows[0].setup, len(each.rows), others)
    conditions = Conditions(
        datetime.now(UTC).isoformat(timespec="seconds"), round(seconds, 1), round(max(others for _, others in found), 3),
        round(max(median_and_spread(each.reference)[1] for each, _ in found), 4),
        round(1e6 * found[0][0].reference[0], 1), job.clock,
    )  # fmt: skip
    measured = Measurements(job.name, this_machine(), these_versions(), conditions, rows)
    wrong = disturbances(measured)
    if wrong and not job.force:
        raise TrainingError(
            f"nothing was written, for the machine was busy: {'; '.join(wrong)}. Calibrate when nothing else runs, or set "
            "force=true to keep the numbers all the same"
        )
    for line in wrong:
        logger.warning("the calibration is not to be relied on: %s", line)
    if line := unsteadiness(measured):
        logger.warning("%s", line)
    return measured


def default_setups(cores: int) -> list[str]:
    """One rank on one core and on all, and as many ranks as share memory."""
    ranks = max(count for count in (1, 2, 4, 8) if count <= cores)
    return list(dict.fromkeys(("1x1", f"1x{cores}", f"{ranks}x{cores // ranks}")))


def run_in_turns(works: Sequence[tuple[Setup, Work]]) -> list[tuple[Found, float]]:
    """Each setup's work in a process a rank, a turn of one setup after that of another: what rank 0 measured, and the cores
    that other programs took meanwhile. A work is a module's function.

    A rented machine is slower for a minute now and then. By turns that minute is one pass of every setup, and the other
    passes make up for it.

    Raises:
        TrainingError: a rank has ended, or was silent for long.
    """
    with ExitStack() as stack:
        setups = [stack.enter_context(_Ranks(setup, work)) for setup, work in works]
        for each in setups:
            each.wait_until_ready()
        while working := [each for each in setups if each.found is None]:
            for each in working:
                each.take_turn()
    return [(each.found, each.busy_s / max(each.seconds, 1e-9)) for each in setups if each.found is not None]


class _Ranks:
    """The processes of one setup, which wait but for their turns."""

    def __init__(self, setup: Setup, work: Work) -> None:
        self.found: Found | None = None
        self.busy_s = self.seconds = 0.0
        self._setup, self._work = setup, work
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> _Ranks:
        context = multiprocessing.get_context("spawn")
        for rank in range(self._setup.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_rank, args=(rank, self._setup, self._work, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        return self

    def wait_until_ready(self) -> None:
        """What starting takes is not measured."""
        self._receive()

    def take_turn(self) -> None:
        load, started = Load(), time.monotonic()
        for pipe in self._pipes:
            pipe.send("go")
        first = self._receive()[0]
        seconds = time.monotonic() - started
        self.busy_s, self.seconds = self.busy_s + load.busy_cores() * seconds, self.seconds + seconds
        if first is not None:
            assert isinstance(first, Found)
            self.found = first

    def _receive(self) -> list[object]:
        return [_receive(pipe, self._setup) for pipe in self._pipes]

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _receive(pipe: Connection, setup: Setup) -> object:
    try:
        if pipe.poll(ENDS_AFTER * (setup.seconds + START_S) + GRACE_S):
            return pipe.recv()
    except EOFError as error:
        raise TrainingError(f"a rank of setup {setup.name} ended while it measured; its log is above") from error
    raise TrainingError(f"a rank of setup {setup.name} was silent for long; calibrate when the machine is idle")


def _run_rank(rank: int, setup: Setup, work: Work, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(setup.ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(setup.ranks)
    )
    import torch
    import torch.distributed as dist

    from pipeline.devices.cpu.memory import keep_freed_memory
    from pipeline.runtime.process.distributed import DistributedContext
    from pipeline.training.calibration.clock import Bench

    torch.set_num_threads(setup.threads)
    keep_freed_memory(setup.ranks)
    store = f"file://{setup.folder}/{setup.name}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=setup.ranks)
    context = DistributedContext(rank, setup.ranks, rank, setup.ranks, torch.device("cpu"), "gloo")
    clock = time.process_time if setup.by_cpu else time.perf_counter
    bench = Bench(setup.name, clock=clock, agree=_agree if setup.ranks > 1 else bool)
    pipe.send("ready")
    pipe.recv()
    for _ in work(bench, setup, context):
        pipe.send(None)
        pipe.recv()
    pipe.send(Found(bench.rows, bench.reference))
    dist.destroy_process_group()


def _agree(wanted: bool) -> bool:
    """Collective: rank 0's."""
    import torch
    import torch.distributed as dist

    answer = torch.tensor([int(wanted)])
    dist.broadcast(answer, 0)
    return bool(answer[0])


def measure(bench: Bench, setup: Setup, context: DistributedContext) -> Iterator[None]:
    """Collective: all kinds, under one setup, in passes, a turn each."""
    from pipeline.training.calibration.clock import PASSES, fastest
    from pipeline.training.calibration.collectives import measure_collectives
    from pipeline.training.calibration.dense import measure_dense
    from pipeline.training.calibration.host import measure_host, measure_storage
    from pipeline.training.calibration.job_steps import JobSteps
    from pipeline.training.calibration.tables import measure_tables

    jobs, seconds = JobSteps(bench, setup.seed, context), setup.seconds / PASSES
    for number in range(PASSES):
        measure_host(bench)
        measure_dense(bench, SHARES["dense"] * seconds, setup.seed)
        measure_tables(bench, SHARES["tables"] * seconds, setup.seed)
        measure_collectives(bench, context)
        if number not in LEFT_OUT:
            jobs.measure(SHARES["jobs"] * seconds * PASSES / (PASSES - len(LEFT_OUT)))
        if number < PASSES - 1:
            yield
    bench.rows = jobs.amounts(fastest(bench.rows))
    if setup.name == "1x1":
        measure_storage(bench, setup.folder)
