"""Measure how a large table is saved and loaded beside dd on the same disk, and how long an asynchronous save stops training:

    python -m benchmarks.save_disk [--gib 9.7] [--rounds 3] [--folder DIR] [--beside] [--output save_disk.json]

One rank holds one table of `--gib` GiB. A round takes each way once, so that a disk whose rate changes shows in all of them: dd with
an fsync at the end, the same past the page cache (oflag=direct), a save, and a load of it. dd copies the table's own
bytes from memory, and reads the saved file; files are forgotten by the page cache before they are read. A save is durable, read back, and
verified when it ends; dd's file is durable. `--beside` adds asynchronous saves, which hold a copy of the table: the seconds for which
training waits, and their share of five minutes. Seconds are the clock's, medians over the rounds with the least and the most; ratios are medians of
each round's own. The disk holds two copies at most, memory one (--beside: two).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks.growth_stages import one_rank
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.serving.scoring.ssd_lookup import forget_pages

DIM = 64
RANDOM_ROWS = 1 << 20  # repeated: some disks write zeros more quickly
CHECKPOINT_EVERY_S = 300.0
MEMORY_FILES = "/dev/shm"
DD, DIRECT, SAVE, LOAD, READ = "dd, fsync", "dd, direct and fsync", "save", "load", "dd to nowhere"
FIRST, LATER = "asynchronous save, the first", "asynchronous save, later"


@dataclass
class Way:
    """Seconds by the clock, and CPU-seconds of this process and its children."""

    name: str
    seconds: float
    cpu_seconds: float


@dataclass
class Figure:
    name: str
    median_s: float
    least_s: float
    most_s: float
    gib_per_s: float
    cpu_s: float
    ratio: float = 0.0  # to dd's time, of the same round
    beside: str = ""  # which dd


class Table(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values, requires_grad=False)


def timed(name: str, work: Callable[[], object]) -> Way:
    began, cpu = time.perf_counter(), _cpu_s()
    work()
    return Way(name, time.perf_counter() - began, _cpu_s() - cpu)


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def table_in_memory(path: str, num_rows: int) -> torch.Tensor:
    """[num_rows, DIM], in a file of memory, so that dd can read it as well."""
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, num_rows * DIM * 4)  # fails here where there is not as much
    values = torch.from_file(path, shared=True, size=num_rows * DIM, dtype=torch.float32).view(num_rows, DIM)
    some = torch.rand(min(RANDOM_ROWS, num_rows), DIM)
    for first in range(0, num_rows, len(some)):
        part = values[first : first + len(some)]
        part.copy_(some[: len(part)])
    return values


def dd(name: str, *words: str) -> Way:
    return timed(name, lambda: subprocess.run(["dd", "bs=8M", "status=none", *words], check=True))


def one_round(folder: Path, source: str, model: Table, context: DistributedContext) -> list[Way]:
    copy, steps = folder / "copy", folder / "steps"
    found = [dd(DD, f"if={source}", f"of={copy}", "conv=fsync")]
    copy.unlink()
    checkpointer = Checkpointer(str(steps), model, None, context)  # type: ignore[arg-type]
    found.append(timed(SAVE, lambda: checkpointer.save(1)))
    file = next((steps / "step_00000001").glob("*.distcp"))
    forget_pages(str(file))
    found.append(timed(LOAD, lambda: checkpointer.restore(1)))
    forget_pages(str(file))
    found.append(dd(READ, f"if={file}", "of=/dev/null"))
    checkpointer.close()
    shutil.rmtree(steps)
    try:
        found.append(dd(DIRECT, f"if={source}", f"of={copy}", "oflag=direct", "conv=fsync"))
    except subprocess.CalledProcessError:
        print("this file system writes nothing past its page cache")
    copy.unlink(missing_ok=True)
    return found


def beside_training(folder: Path, model: Table, context: DistributedContext, rounds: int) -> list[Way]:
    """For how long save() keeps its caller; what follows goes on beside training."""
    found = []
    checkpointer = Checkpointer(str(folder / "beside"), model, None, context, keep_last_n=1, asynchronous=True)  # type: ignore[arg-type]
    for step in range(1, rounds + 2):
        found.append(timed(FIRST if step == 1 else LATER, lambda step=step: checkpointer.save(step)))  # type: ignore[misc]
        checkpointer.wait()
    checkpointer.close()
    shutil.rmtree(folder / "beside")
    return found


def figures(rounds: list[list[Way]], gib: float) -> list[Figure]:
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for way in (way for each in rounds for way in each):
        seconds.setdefault(way.name, []).append(way.seconds)
        cpu.setdefault(way.name, []).append(way.cpu_seconds)
    found = []
    for name, values in seconds.items():
        median = statistics.median(values)
        found.append(Figure(name, median, min(values), max(values), gib / median, statistics.median(cpu[name])))
        for other, plain in ((SAVE, DD), (LOAD, READ)):
            if name == other:
                pairs = zip(values, seconds[plain], strict=True)
                found[-1].ratio, found[-1].beside = statistics.median(own / dds for own, dds in pairs), plain
    return found


def show(figure: Figure) -> str:
    line = f"{figure.name:30}{figure.median_s:8.2f} s  ({figure.least_s:.2f} .. {figure.most_s:.2f})"
    if figure.name in (FIRST, LATER):
        return f"{line}  {100 * figure.median_s / CHECKPOINT_EVERY_S:.2f} % of five minutes   cpu {figure.cpu_s:.1f} s"
    beside = f"  {figure.ratio:.2f} of the time of {figure.beside}" if figure.beside else ""
    return f"{line}  {figure.gib_per_s:.2f} GiB/s   cpu {figure.cpu_s:.1f} s{beside}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="of the table; 9.7 are 40M rows of 64 numbers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where to write; default: the temporary folder")
    parser.add_argument("--beside", action="store_true", help="asynchronous saves as well")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    num_rows = int(options.gib * 2**30) // (4 * DIM)
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as name,
        tempfile.TemporaryDirectory(dir=MEMORY_FILES) as memory,
        one_rank(Path(name)) as context,
    ):
        assert isinstance(context, DistributedContext)
        folder, source = Path(name), f"{memory}/table"
        model = Table(table_in_memory(source, num_rows))
        print(
            f"{num_rows:,} rows of {DIM} numbers, {num_rows * DIM * 4 / 2**30:.2f} GiB, {options.rounds} rounds",
            flush=True,
        )
        rounds = [one_round(folder, source, model, context) for _ in range(options.rounds)]
        if options.beside:
            rounds.append(beside_training(folder, model, context, options.rounds))
    found = figures(rounds, options.gib)
    print("\n".join(map(show, found)))
    if options.output:
        options.output.write_text(json.dumps([asdict(one) for one in found], indent=1))


if __name__ == "__main__":
    main()
