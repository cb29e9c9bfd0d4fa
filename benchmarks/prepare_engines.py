"""Prepare the same rows by the embedded engine on one thread, and by Ray with 1 and 2 workers:  python -m benchmarks.prepare_engines --source 'rows/*'

Prints rows a second and core as ratios of the embedded engine, the largest worker's memory, and what the tasks left in the
staging folder at most, in bytes a row. --fresh N generates N rows of a few features, one of which has a value of its own in every third row.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pipeline.data.dataset import load_dataset

KINDS = {"rows.arrow": "rows", "entries.parquet": "entries", "run.parquet": "runs", "positions.int32": "positions",
         "answers.int32": "answers", "ids.int32": "ids", "values.parquet": "counts"}  # fmt: skip


@dataclass
class Run:
    seconds: float = 0.0
    worker_mb: float = 0.0
    staged: Counter[str] = field(default_factory=Counter)


def run(words: list[str], workers: int, folder: Path, is_ray: bool) -> Run:
    found, ended = Run(), threading.Event()
    command = [sys.executable, "-m", "pipeline.prepare", *words]
    if is_ray:
        node = "pipeline.data.prepare.distributed.ray_node"
        command = [
            sys.executable,
            "-m",
            node,
            "--address",
            "127.0.0.1:0",
            "--memory-mb",
            "16000",
            "--",
            *words,
            "engine=ray",
        ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    cores = sorted(os.sched_getaffinity(0))[:workers]
    process = subprocess.Popen(
        ["taskset", "-c", ",".join(map(str, cores)), *command], env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    watcher = threading.Thread(target=_watch, args=(process.pid, folder, found, ended))
    watcher.start()
    output, _ = process.communicate()
    ended.set()
    watcher.join()
    if process.returncode:
        sys.exit(output)
    match = re.search(r"in ([\d.]+) s", output)
    assert match is not None, output
    found.seconds = float(match[1])
    return found


def _watch(pid: int, folder: Path, found: Run, ended: threading.Event) -> None:
    while not ended.wait(1.0):
        with suppress(psutil.Error):
            for each in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.Error):
                    title = " ".join(each.cmdline())
                    if title.startswith("ray::") or "pipeline.prepare" in title:
                        found.worker_mb = max(found.worker_mb, each.memory_full_info().uss / 2**20)
        sizes: Counter[str] = Counter()
        for parent, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):
                    if name in KINDS:
                        sizes[KINDS[name]] += os.path.getsize(os.path.join(parent, name))
        found.staged |= sizes


def generate(folder: Path, num_rows: int, num_files: int = 8) -> list[str]:
    """Of a feature that is distinct in every third row, one with a value in half of the rows, and four small ones."""
    import numpy as np

    each = num_rows // num_files
    for number in range(num_files):
        rng = np.random.default_rng(number)
        first = np.where(
            np.arange(each) % 3 == 0, number * each + np.arange(each), (2_000_000 * rng.random(each) ** 3).astype(int)
        )
        skewed = np.where(rng.random(each) < 0.5, 0, rng.integers(0, 100_000, each))
        small = rng.integers(0, 1_000, (4, each))
        label, price = (rng.random(each) < 0.3).astype(int), rng.integers(0, 500, each)
        with open(folder / f"part_{number}.csv", "w") as file:
            file.write("click,price,user,item,a,b,c,d\n")
            columns = [label.tolist(), price.tolist(), first.tolist(), skewed.tolist(), *small.tolist()]
            file.writelines(
                f"{y},{p},{u:x},{i:x},{a},{b},{c},{d}\n" for y, p, u, i, a, b, c, d in zip(*columns, strict=True)
            )
    return [
        "data=open_bandit", "data.name=fresh", f"source={folder}", "data.columns.label=click", "data.columns.dense=[price]",
        "data.columns.sparse=[user,item,a,b,c,d]", "data.columns.multi_hot=[]", "data.columns.timestamp=null",
        "data.feature_ids={}", "data.ids.min_frequency=1", "data.split.kind=row_range",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source")
    parser.add_argument("--fresh", type=int)
    parser.add_argument("--only", default="embedded,ray1,ray2")
    parser.add_argument("words", nargs="*")
    typed = parser.parse_args()
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top)
        if typed.fresh:
            (folder / "raw").mkdir()
            words = generate(folder / "raw", typed.fresh)
        else:
            words = ["data=quickstart", f"source={typed.source}"]
        base = 0.0
        for name in typed.only.split(","):
            workers, is_ray = (2 if name.endswith("2") else 1), name.startswith("ray")
            path = folder / name
            found = run([*words, f"data.path={path}", "threads=1", *typed.words], workers, folder, is_ray)
            rows = load_dataset(str(path)).accepted_rows
            rate = rows / found.seconds / workers
            base = base or rate
            staged = ", ".join(f"{kind} {size / rows:.1f}" for kind, size in sorted(found.staged.items()))
            print(f"{name}: {rows:,} rows in {found.seconds:.1f} s, {rate:,.0f} rows/s a core, {rate / base:.2f} of the first; "
                  f"largest process {found.worker_mb:,.0f} MiB; staged bytes a row: {staged}", flush=True)  # fmt: skip
            time.sleep(1)


if __name__ == "__main__":
    main()
