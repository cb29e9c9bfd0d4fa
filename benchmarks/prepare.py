"""Measure rows per second and peak memory of prepare beside TorchRec's own scripts on the same rows in the same run:

    python -m benchmarks.prepare [--rows 1000000 10000000] [--rounds 3] [--output prepare.json]

Criteo's shape with the Kaggle set's cardinalities, ids by a power law, in 24 day files, for TorchRec's scripts want 24.
Both sides end with ids by frequency, those seen fewer than 3 times in one: TorchRec by npy_preproc_criteo (one day in
memory at a time) and then contiguous_preproc_criteo (all days in memory); ours by `pipeline prepare`, which counts the
training days only and writes checksummed, split Parquet, at its default limit of 2 GiB and at the least it takes. Each is a process of its own, its start and imports included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.config.generated import SyntheticConfig
from pipeline.data.generate.synthetic import write_source
from pipeline.data.raw.source import TEACHER_SUFFIX

NUM_DAYS = 24
MIN_FREQUENCY = 3  # torchrec.datasets.criteo.FREQUENCY_THRESHOLD
KAGGLE_CARDINALITIES = [
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173,
    4, 7046547, 18, 15, 286181, 105, 142572,
]  # fmt: skip


@dataclass
class Usage:
    """Of one process: seconds by the clock, CPU-seconds of all its threads, highest resident memory."""

    seconds: float
    cpu_seconds: float
    peak_mib: float


@dataclass
class Figure:
    """Median over the rounds. CPU-seconds tell more than the clock on a machine that others use too."""

    name: str
    num_rows: int
    seconds: float
    cpu_seconds: float
    peak_mib: float
    rows_per_s: float


def measure(command: list[str]) -> Usage:
    """Raises CalledProcessError where the command fails."""
    before, started, peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    # ru_maxrss would count what this process weighed when it forked; VmHWM is the command's own.
    while process.poll() is None:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                peak_kib = int(line.split()[1])
        time.sleep(0.01)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Usage(time.monotonic() - started, cpu, peak_kib / 1024)


def write_days(folder: Path, num_rows: int) -> None:
    for day in range(NUM_DAYS):
        rows = num_rows * (day + 1) // NUM_DAYS - num_rows * day // NUM_DAYS
        path = str(folder / f"day_{day}")
        write_source(SyntheticConfig(num_rows=rows, cardinalities=KAGGLE_CARDINALITIES, seed=day), path)
        os.remove(path + TEACHER_SUFFIX)


def run_ours(days: Path, work: Path) -> dict[str, Usage]:
    command = [sys.executable, "-m", "pipeline", "prepare", "data=criteo_1tb", f"source={days}"]
    command += [f"data.ids.min_frequency={MIN_FREQUENCY}"]
    return {
        "prepare": measure([*command, f"data.path={work}/ours"]),
        "prepare in 0.5 GiB": measure([*command, f"data.path={work}/in_less", "memory_limit_gb=0.5"]),
    }


def run_torchrec(days: Path, work: Path) -> dict[str, Usage]:
    for name in ("npy", "contiguous"):
        (work / name).mkdir()
    python, scripts = [sys.executable, "-W", "ignore", "-m"], "torchrec.datasets.scripts"
    first = measure([*python, f"{scripts}.npy_preproc_criteo", "--input_dir", str(days), "--output_dir", f"{work}/npy"])
    folders = ["--input_dir", f"{work}/npy", "--output_dir", f"{work}/contiguous"]
    second = measure(
        [*python, f"{scripts}.contiguous_preproc_criteo", *folders, "--frequency_threshold", str(MIN_FREQUENCY)]
    )
    both = Usage(
        first.seconds + second.seconds, first.cpu_seconds + second.cpu_seconds, max(first.peak_mib, second.peak_mib)
    )
    return {"torchrec npy": first, "torchrec contiguous": second, "torchrec both": both}


def compare(num_rows: int, rounds: int, folder: Path) -> list[Figure]:
    """Rounds take each side once, so that what else the machine does falls on both."""
    days = folder / "days"
    days.mkdir()
    write_days(days, num_rows)
    found: dict[str, list[Usage]] = defaultdict(list)
    for _ in range(rounds):
        for run in (run_ours, run_torchrec):
            with tempfile.TemporaryDirectory(dir=folder) as work:
                for name, usage in run(days, Path(work)).items():
                    found[name].append(usage)
    shutil.rmtree(days)
    figures = []
    for name, usages in found.items():
        median = {key: statistics.median(getattr(usage, key) for usage in usages) for key in ("seconds", "cpu_seconds")}
        peak = max(usage.peak_mib for usage in usages)
        figures.append(Figure(name, num_rows, **median, peak_mib=peak, rows_per_s=num_rows / median["seconds"]))
    return figures


def describe(figures: list[Figure]) -> str:
    lines = [f"{'':22}{'rows':>12}{'s':>9}{'CPU s':>9}{'peak MiB':>10}{'rows/s':>12}"]
    lines += [
        f"{f.name:22}{f.num_rows:>12,}{f.seconds:>9.1f}{f.cpu_seconds:>9.1f}{f.peak_mib:>10,.0f}{f.rows_per_s:>12,.0f}"
        for f in figures
    ]
    by_name = {figure.name: figure for figure in figures}
    ours, theirs = by_name["prepare"], by_name["torchrec both"]
    lines.append(
        f"prepare over both TorchRec scripts: {theirs.seconds / ours.seconds:.1f}x by the clock, "
        f"{theirs.cpu_seconds / ours.cpu_seconds:.1f}x by CPU-seconds"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where about 700 bytes a row find room (default: the temporary folder)")
    parser.add_argument("--output", help="write the figures here as JSON")
    arguments = parser.parse_args()
    figures: list[Figure] = []
    for num_rows in arguments.rows:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found = compare(num_rows, arguments.rounds, Path(folder))
        print(describe(found), flush=True)
        figures += found
    if arguments.output:
        Path(arguments.output).write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
