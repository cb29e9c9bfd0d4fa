"""Run a calibration: every setup in processes of its own, one a rank, and put what they measured into one table."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeAlias

from pipeline.config.jobs.machine import CalibrateJob
from pipeline.planner.step_time.measurements import (
    Conditions,
    Measurement,
    Measurements,
    disturbances,
    median_and_spread,
    these_versions,
    this_machine,
)
from pipeline.runtime.errors import TrainingError
from pipeline.runtime.logs import get_logger
from pipeline.training.calibration.clock import Load

if TYPE_CHECKING:
    from pipeline.runtime.process.distributed import DistributedContext
    from pipeline.training.calibration.clock import Bench

SHARES = {
    "dense": 0.36,
    "tables": 0.18,
    "jobs": 0.39,
}  # of a setup's seconds; the remainder goes to starting and storage
LEFT_OUT = (1,)  # of the passes, by the jobs: so there are more of them
START_S = 8.0  # imports, compiled kernels
ENDS_AFTER, GRACE_S = 6.0, 240.0  # budgets, and seconds on a machine that others use: then a rank has hung
SEED = 16
logger = get_logger(__name__)
Work: TypeAlias = "Callable[[Bench, Setup, DistributedContext], None]"


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
    machine, started = this_machine(), time.monotonic()
    setups = job.setups or (["1x1"] if job.clock == "cpu" else default_setups(machine.cores))
    seconds = max(job.seconds / len(setups) - START_S, 5.0)
    rows: list[Measurement] = []
    reference: list[float] = []
    busy = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name in setups:
            ranks, threads = map(int, name.split("x"))
            setup = Setup(ranks, threads, seconds, SEED + job.seed, folder, job.clock == "cpu")
            found, others = run_on_ranks(setup, measure)
            rows += found.rows
            reference += [found.reference[0]] if not reference else []
            busy = max(busy, others)
            noise = median_and_spread(found.reference)[1]
            reference.append(noise)
            logger.info("%s: %d measurements, other programs took %.2f cores", name, len(found.rows), others)
    first, *noises = reference
    conditions = Conditions(
        datetime.now(UTC).isoformat(timespec="seconds"), round(time.monotonic() - started, 1), round(busy, 3),
        round(max(noises), 4), round(1e6 * first, 1), job.clock,
    )  # fmt: skip
    measured = Measurements(job.name, machine, these_versions(), conditions, rows)
    wrong = disturbances(measured)
    if wrong and not job.force:
        raise TrainingError(
            f"nothing was written, for the machine was busy: {'; '.join(wrong)}. Calibrate when nothing else runs, or set "
            "force=true to keep the numbers all the same"
        )
    for line in wrong:
        logger.warning("the calibration is not to be relied on: %s", line)
    return measured


def default_setups(cores: int) -> list[str]:
    """One rank on one core and on all, and as many ranks as share memory."""
    ranks = max(count for count in (1, 2, 4, 8) if count <= cores)
    return list(dict.fromkeys(("1x1", f"1x{cores}", f"{ranks}x{cores // ranks}")))


def run_on_ranks(setup: Setup, work: Work) -> tuple[Found, float]:
    """`work` in a process a rank: what rank 0 measured, and the cores that other programs took. `work` is a module's function.

    Raises:
        TrainingError: a rank has ended, or was silent for long.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    for rank in range(setup.ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_run_rank, args=(rank, setup, work, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            _receive(pipe, setup)
        load = Load()  # what starting takes is not measured
        for pipe in pipes:
            pipe.send("go")
        found = [_receive(pipe, setup) for pipe in pipes]
        others = load.busy_cores()
        assert isinstance(found[0], Found)
        return found[0], others
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
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

    from pipeline.runtime.process.distributed import DistributedContext
    from pipeline.training.allocator import keep_freed_memory
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
    work(bench, setup, context)
    pipe.send(Found(bench.rows, bench.reference))
    dist.destroy_process_group()


def _agree(wanted: bool) -> bool:
    """Collective: rank 0's."""
    import torch
    import torch.distributed as dist

    answer = torch.tensor([int(wanted)])
    dist.broadcast(answer, 0)
    return bool(answer[0])


def measure(bench: Bench, setup: Setup, context: DistributedContext) -> None:
    """Collective: all kinds, under one setup, in passes."""
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
    bench.rows = jobs.amounts(fastest(bench.rows))
    if setup.name == "1x1":
        measure_storage(bench, setup.folder)
