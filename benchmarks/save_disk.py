"""Measure how a large table is saved and loaded beside dd on the same disk, and how long an asynchronous save stops training:

    python -m benchmarks.save_disk [--gib 9.7] [--rounds 3] [--saves-only] [--folder DIR] [--beside] [--output save_disk.json]

One rank holds one table of `--gib` GiB. A round takes each way once, so that a disk whose rate changes shows in all of them: dd with
an fsync at the end, dd past the page cache with one, a save, a load as it is and
one that leaves its pages in the page cache, and dd's reading of the saved file to nowhere, also past the page cache. `--saves-only`: dd past the page
cache and a save, for many rounds in little time. dd copies the table's own
bytes from memory; files are forgotten by the page cache before they are read. A save is durable, read back, and
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks.growth_stages import one_rank
from benchmarks.timings import Timing, timing
from pipeline.checkpoint import metadata
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.extras.ssd_serving.lookup import forget_pages
from pipeline.runtime.process.distributed import DistributedContext

DIM = 64
RANDOM_ROWS = 1 << 20  # repeated: some disks write zeros more quickly
CHECKPOINT_EVERY_S = 300.0
MEMORY_FILES = "/dev/shm"
DD, DIRECT, SAVE = "dd, fsync", "dd, direct and fsync", "save"
LOAD, LOAD_KEPT = "load", "load, its pages kept"
READ, DIRECT_READ = "dd to nowhere", "dd, direct, to nowhere"
BESIDE = {
    SAVE: (DIRECT, DD),
    LOAD: (READ, DIRECT_READ),
    LOAD_KEPT: (READ, DIRECT_READ),
}
FIRST, LATER = "asynchronous save, the first", "asynchronous save, later"


@dataclass
class Way:
    """Seconds by the clock, and CPU-seconds of this process and its children: all, and the kernel's part."""

    name: str
    seconds: float
    cpu_seconds: float
    kernel_seconds: float


class Table(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values, requires_grad=False)


def timed(name: str, work: Callable[[], object]) -> Way:
    began, (user, kernel) = time.perf_counter(), _cpu_s()
    work()
    seconds, (user_after, kernel_after) = time.perf_counter() - began, _cpu_s()
    return Way(name, seconds, user_after + kernel_after - user - kernel, kernel_after - kernel)


def _cpu_s() -> tuple[float, float]:
    """By this process's code and its children's, and by the kernel for them."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime for one in used), sum(one.ru_stime for one in used)


@contextmanager
def pages_kept() -> Iterator[None]:
    """In this context a load leaves what it reads in the page cache."""
    dropping = metadata.VerifiedFile
    metadata.VerifiedFile = lambda path, entry, keep_pages: dropping(path, entry)
    try:
        yield
    finally:
        metadata.VerifiedFile = dropping


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
    return timed(name, dd_words(*words))


def dd_words(*words: str) -> Callable[[], object]:
    return lambda: subprocess.run(["dd", "bs=8M", "status=none", *words], check=True)


def saves(folder: Path, source: str, model: Table, context: DistributedContext) -> list[Way]:
    """The last save is left there."""
    copy, steps = folder / "copy", folder / "steps"
    found = []
    try:
        found.append(dd(DIRECT, f"if={source}", f"of={copy}", "oflag=direct", "conv=fsync"))
    except subprocess.CalledProcessError:
        print("this file system writes nothing past its page cache")
    copy.unlink(missing_ok=True)
    shutil.rmtree(steps, ignore_errors=True)
    checkpointer = Checkpointer(str(steps), model, None, context)
    found.append(timed(SAVE, lambda: checkpointer.save(1)))
    checkpointer.close()
    return found


def one_round(folder: Path, source: str, model: Table, context: DistributedContext, rest_s: float) -> list[Way]:
    copy, steps = folder / "copy", folder / "steps"
    found = [dd(DD, f"if={source}", f"of={copy}", "conv=fsync")]
    copy.unlink()
    found += saves(folder, source, model, context)
    checkpointer = Checkpointer(str(steps), model, None, context)
    file = next((steps / "step_00000001").glob("*.distcp"))

    def from_disk(name: str, work: Callable[[], object]) -> None:
        forget_pages(str(file))
        time.sleep(rest_s)
        found.append(timed(name, work))

    from_disk(LOAD, lambda: checkpointer.restore(1))
    with pages_kept():
        from_disk(LOAD_KEPT, lambda: checkpointer.restore(1))
    from_disk(READ, dd_words(f"if={file}", "of=/dev/null"))
    try:
        from_disk(DIRECT_READ, dd_words(f"if={file}", "of=/dev/null", "iflag=direct"))
    except subprocess.CalledProcessError:
        print("this file system reads nothing past its page cache")
    checkpointer.close()
    shutil.rmtree(steps)
    return found


def beside_training(folder: Path, model: Table, context: DistributedContext, rounds: int) -> list[Way]:
    """For how long save() keeps its caller; what follows goes on beside training."""
    found = []
    checkpointer = Checkpointer(str(folder / "beside"), model, None, context, keep_last_n=1, asynchronous=True)
    for step in range(1, rounds + 2):
        found.append(timed(FIRST if step == 1 else LATER, lambda step=step: checkpointer.save(step)))
        checkpointer.wait()
    checkpointer.close()
    shutil.rmtree(folder / "beside")
    return found


def timings(rounds: list[list[Way]], num_bytes: int) -> list[Timing]:
    ways: dict[str, list[Way]] = {}
    for way in (way for each in rounds for way in each):
        ways.setdefault(way.name, []).append(way)
    found = []
    for name, own in ways.items():
        one = timing(name, [way.seconds for way in own], num_bytes)
        one.cpu_s = statistics.median(way.cpu_seconds for way in own)
        one.kernel_s = statistics.median(way.kernel_seconds for way in own)
        for other in (other for other in BESIDE.get(name, ()) if other in ways):
            pairs = zip(own, ways[other], strict=True)
            one.ratios[other] = statistics.median(each.seconds / dds.seconds for each, dds in pairs)
        found.append(one)
    return found


def show(one: Timing) -> str:
    line = f"{one.name:30}{one.median_s:8.2f} s  ({one.least_s:.2f} .. {one.most_s:.2f})"
    if one.name in (FIRST, LATER):
        return f"{line}  {100 * one.median_s / CHECKPOINT_EVERY_S:.2f} % of five minutes   cpu {one.cpu_s:.1f} s"
    ratios = ", ".join(f"{ratio:.2f} of the time of {other}" for other, ratio in one.ratios.items())
    cpu = f"cpu {one.cpu_s:.1f} s, {one.kernel_s:.1f} in the kernel"
    return f"{line}  {one.bytes_per_s / 2**30:.2f} GiB/s   {cpu}{'  ' if ratios else ''}{ratios}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="of the table; 9.7 are 40M rows of 64 numbers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where to write; default: the temporary folder")
    parser.add_argument(
        "--rest",
        type=float,
        default=0.0,
        help="seconds before each read, in which a virtual machine hands free memory back",
    )
    parser.add_argument("--saves-only", action="store_true")
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
        if options.saves_only:
            rounds = [saves(folder, source, model, context) for _ in range(options.rounds)]
        else:
            rounds = [one_round(folder, source, model, context, options.rest) for _ in range(options.rounds)]
        if options.beside:
            rounds.append(beside_training(folder, model, context, options.rounds))
    found = timings(rounds, num_rows * DIM * 4)
    print("\n".join(map(show, found)))
    if options.output:
        options.output.write_text(json.dumps([asdict(one) for one in found], indent=1))


if __name__ == "__main__":
    main()
