"""Measure the seconds from launch to the end of the first training step of experiment=quickstart, and where they go:

    python -m benchmarks.startup [--ranks 1 2] [--rounds 3] [--cold] [--resume] [--runc RUNC] [--output startup.json]

One rank is `python -m pipeline train`, more are what the launcher starts: the agent and its ranks. Each rank runs the
verb itself, with a clock around its stages (benchmarks/startup_rank.py); a stage counts from the end of the one before.
Shown is the rank that came last. `cpu` is CPU-seconds of that rank: it tells more than the clock on a machine that others
use too. A cold launch finds no compiled kernels (Numba's cache) and no page of the environment's files in memory, as far
as the system lets go of them; it is one launch, for the next is warm. `agent` is from the launch to the rank's first line.

--resume: each launch goes on with the same run, by its checkpoint and its plan. --runc: each launch is a container that this
OCI runtime starts (as root; bookworm's package `runc`), whose root is this machine's own files, and what a pod's container
would run: the agent, with one rank too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.container import as_container
from benchmarks.startup_rank import STAGES
from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.data.prepare.run import prepare

ROWS = 40_000  # enough for the first steps; more would take as long to start


@dataclass
class Launch:
    """Seconds of each stage by the clock, and CPU-seconds, of the rank that trained last."""

    ranks: int
    kind: str  # warm or cold
    clock: dict[str, float]
    cpu: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.clock.values())


def make_data(folder: Path, num_rows: int = ROWS) -> str:
    """Generated and prepared; the folder of its shards."""
    source = str(folder / "quickstart.tsv")
    generate(load_config(GenerateJob, ["data=quickstart", f"output={source}", f"data.synthetic.num_rows={num_rows}"]))
    words = ["data=quickstart", f"source={source}", f"data.path={folder / 'prepared'}", "data.rows_per_shard=8000"]
    return prepare(load_config(PrepareJob, words)).path


@dataclass
class Way:
    """How a training is launched."""

    runc: str | None = None  # the OCI runtime of a container; None: a process of this machine
    resume: bool = False  # goes on with the run of the launch before


def launch(data: str, folder: Path, ranks: int, kind: str, way: Way, step: int = 1) -> Launch:
    """One training up to `step`, each stage of which has been timed up to the end of the first step that it trains."""
    environ = dict(os.environ, OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // ranks)))
    if kind == "cold":
        environ["NUMBA_CACHE_DIR"] = str(folder / "numba")
        forget_pages(Path(sysconfig.get_path("purelib")))
    elif way.runc:
        environ["NUMBA_CACHE_DIR"] = str(
            folder.parent / "numba"
        )  # the image has one of its own, filled when it is built
    command = [sys.executable]
    if ranks > 1 or way.runc:
        command += ["-m", "pipeline", "agent", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", "localhost:0"]
    command += ["-m", "benchmarks.startup_rank", str(folder / "marks"), "experiment=quickstart", f"data.path={data}"]
    run = folder.parent / f"run-{ranks}" if way.resume else folder / "run"
    command += [f"run_dir={run}", "hardware=cpu", f"trainer.max_steps={step}", "trainer.evaluate_max_batches=1"]
    if way.runc:
        command = as_container(way.runc, command, environ, folder, folder.parent)
    started = time.time()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"the launch ended with {done.returncode}:\n{done.stderr[-3000:]}")
    if way.resume and step > 1 and "is still valid: no search" not in done.stderr:
        raise RuntimeError(f"the run did not go on by its own plan:\n{done.stderr[-3000:]}")
    marks = [json.loads((folder / f"marks.{rank}").read_text()) for rank in range(ranks)]
    return timed(max(marks, key=lambda rank: rank[-1][1]), started, ranks, kind)


def timed(marks: list[tuple[str, float, float]], started: float, ranks: int, kind: str) -> Launch:
    """`marks`: (stage, when it ended, CPU-seconds by then)."""
    clock, cpu = {}, {}
    before, used = started, 0.0
    for stage, at, seconds in marks:
        clock[stage], cpu[stage] = max(at - before, 0.0), seconds - used  # processes begin on a tick of 10 ms
        before, used = at, seconds
    return Launch(ranks, kind, clock, cpu)


def forget_pages(folder: Path) -> None:
    """Ask the system to drop what it caches of the files; pages that another process has mapped stay."""
    for path in folder.rglob("*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def show(launches: list[Launch]) -> str:
    """A line a stage: median seconds by the clock, and median CPU-seconds."""
    lines = [f"{launches[0].ranks} rank(s), {launches[0].kind}, {len(launches)} launch(es)"]
    for stage in STAGES:
        clock = statistics.median(one.clock[stage] for one in launches)
        cpu = statistics.median(one.cpu[stage] for one in launches)
        lines.append(f"  {stage:<24}{clock:>8.2f} s   cpu {cpu:>6.2f} s")
    totals = [one.total for one in launches]
    cpu = statistics.median(sum(one.cpu.values()) for one in launches)
    spread = f"({min(totals):.2f} to {max(totals):.2f})"
    return "\n".join([*lines, f"  {'all':<24}{statistics.median(totals):>8.2f} s   cpu {cpu:>6.2f} s   {spread}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="a cold launch of each, too")
    parser.add_argument("--resume", action="store_true", help="each launch goes on with the same run")
    parser.add_argument("--runc", help="an OCI runtime: each launch is a container of it")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    way = Way(options.runc, options.resume)
    found: list[Launch] = []
    with tempfile.TemporaryDirectory() as name:
        data = make_data(Path(name))
        kinds = ["cold"] * options.cold + ["warm"] * (options.rounds + 1)
        for round_number, kind in enumerate(kinds):
            for ranks in options.ranks:
                folder = Path(name) / f"{round_number}-{ranks}"
                folder.mkdir()
                one = launch(data, folder, ranks, kind, way, round_number + 1 if way.resume else 1)
                if kind == "cold" or round_number > options.cold:  # the first warm one warms
                    found.append(one)
    for kind in ("cold", "warm"):
        for ranks in options.ranks:
            if mine := [one for one in found if (one.kind, one.ranks) == (kind, ranks)]:
                print(show(mine), flush=True)
    if options.output:
        about = {"date": datetime.now(UTC).isoformat(), "cores": os.cpu_count(), "python": sys.version.split()[0]}
        options.output.write_text(json.dumps({"about": about, "launches": [asdict(one) for one in found]}, indent=1))


if __name__ == "__main__":
    main()
