"""Prepare the same rows by the embedded engine on one thread, and by Ray with 1 and 2 workers:  python -m benchmarks.prepare_engines --source 'rows/*'

`--only embedded,ray1,ray2,dask1,dask2` has a Dask job beside them (benchmarks/prepare_dask.py; rows in Criteo's format, after another way).
Prints rows a second and core as ratios of the embedded engine, the largest worker's memory, and what the tasks left in the
staging folder at most, in bytes a row. --fresh N generates N rows of a few features, one of which has a value of its own in every third row,
and one a value in half of the rows; --distinct adds a feature that is distinct in every row, --narrow leaves all but the first out. With
--keep FOLDER, rows and what was prepared stay there, and the same command resumes after the finished tasks.
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
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pipeline.data.dataset import load_dataset

KINDS = {"rows.arrow": "rows", "values.arrow": "values", "counts.arrow": "counts", "ids.int32": "ids"}


# Whose process it is, by a word of its command line; the first that fits.
ROLES = (("gcs_server", "head"), ("raylet/raylet", "raylet"), ("dashboard/dashboard.py", "dashboard"), ("ray-dashboard-", "dashboard"),
         ("dashboard/agent.py", "agents"), ("runtime_env/agent", "agents"), ("log_monitor.py", "log monitor"), ("autoscaler", "monitor"),
         ("ray.scripts.scripts", "ray start"), ("ray_prepare.node", "ray start"), ("default_worker.py", "workers"), ("ray::", "workers"),
         ("pipeline prepare", "driver"))  # fmt: skip


@dataclass
class Run:
    """`seconds` as prepare says, `whole_seconds` and `cpu` (seconds by role) of the whole command."""

    seconds: float = 0.0
    whole_seconds: float = 0.0
    worker_mb: float = 0.0
    staged: Counter[str] = field(default_factory=Counter)
    cpu: dict[int, tuple[str, float]] = field(default_factory=dict)

    def cpu_by_role(self) -> list[tuple[str, float]]:
        found: Counter[str] = Counter()
        for role, seconds in self.cpu.values():
            found[role] += seconds
        return found.most_common()


def command_of(name: str, words: list[str], source: str, path: Path, workers: int) -> list[str]:
    if name.startswith("dask"):
        return [sys.executable, "-m", "benchmarks.prepare_dask", source, str(path), str(workers)]
    if name.startswith("ray"):
        node = "pipeline.extras.ray_prepare.node"
        node_words = ["--address", "127.0.0.1:0", "--memory-mb", "16000", "--"]
        return [sys.executable, "-m", node, *node_words, *words, "engine=ray"]
    return [sys.executable, "-m", "pipeline", "prepare", *words]


def run(command: list[str], workers: int, folder: Path) -> Run:
    found, ended = Run(), threading.Event()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    cores = sorted(os.sched_getaffinity(0))[:workers]
    began = time.monotonic()
    process = subprocess.Popen(
        ["taskset", "-c", ",".join(map(str, cores)), *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watcher = threading.Thread(target=_watch, args=(process.pid, folder, found, ended))
    watcher.start()
    output, _ = process.communicate()
    found.whole_seconds = time.monotonic() - began
    ended.set()
    watcher.join()
    if process.returncode:
        sys.exit(output)
    match = re.search(r"in ([\d.]+) s", output)
    assert match is not None, output
    found.seconds = float(match[1])
    return found


def _watch(pid: int, folder: Path, found: Run, ended: threading.Event) -> None:
    while not ended.wait(0.5):
        with suppress(psutil.Error):
            command = psutil.Process(pid)
            for each in (command, *command.children(recursive=True)):
                with suppress(psutil.Error):
                    title = " ".join(each.cmdline())
                    role = found.cpu[each.pid][0] if each.pid in found.cpu else _role_of(title)
                    found.cpu[each.pid] = role, sum(each.cpu_times()[:2])
                    if title.startswith("ray::") or "pipeline prepare" in title:
                        found.worker_mb = max(found.worker_mb, each.memory_full_info().uss / 2**20)
        sizes: Counter[str] = Counter()
        for parent, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):
                    if name in KINDS:
                        sizes[KINDS[name]] += os.path.getsize(os.path.join(parent, name))
        found.staged |= sizes


def _role_of(title: str) -> str:
    return next((role for word, role in ROLES if word in title), "others")


def generate(folder: Path, num_rows: int, columns: list[str], num_files: int = 8) -> None:
    """`user` is distinct in every third row, `item` has a value in half of the rows, `session` is distinct; the others are small."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.csv as csv

    each = num_rows // num_files
    for number in range(num_files):
        rng = np.random.default_rng(number)
        rows = number * each + np.arange(each)
        made = {
            "click": (rng.random(each) < 0.3).astype(int),
            "user": np.where(np.arange(each) % 3 == 0, rows, (2_000_000 * rng.random(each) ** 3).astype(int)),
            "price": rng.integers(0, 500, each),
            "item": np.where(rng.random(each) < 0.5, 0, rng.integers(0, 100_000, each)),
            "session": rows * 2_654_435_761 % (1 << 40),
            **{name: rng.integers(0, 1_000, each) for name in "abcd"},
        }
        path = folder / f"part_{number}.csv"
        csv.write_csv(pa.table({name: made[name] for name in columns}), f"{path}.partial")
        os.replace(f"{path}.partial", path)


def words_of(folder: Path, columns: list[str]) -> list[str]:
    dense = [name for name in columns if name == "price"]
    sparse = [name for name in columns if name not in ("click", "price")]
    return [
        "data=open_bandit",
        "data.name=fresh",
        f"source={folder}",
        "data.columns.label=click",
        f"data.columns.dense=[{','.join(dense)}]",
        f"data.columns.sparse=[{','.join(sparse)}]",
        "data.columns.multi_hot=[]",
        "data.columns.timestamp=null",
        "data.feature_ids={}",
        "data.ids.min_frequency=1",
        "data.split.kind=row_range",
        "data.format=csv",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source")
    parser.add_argument("--fresh", type=int)
    parser.add_argument("--narrow", action="store_true")
    parser.add_argument("--distinct", action="store_true")
    parser.add_argument("--keep")
    parser.add_argument("--only", default="embedded,ray1,ray2")
    parser.add_argument("words", nargs="*")
    typed = parser.parse_args()
    with nullcontext(typed.keep) if typed.keep else tempfile.TemporaryDirectory() as top:
        folder = Path(top)
        columns = ["click", "user"] if typed.narrow else ["click", "price", "user", "item", *"abcd"]
        columns += ["session"] * typed.distinct
        if typed.fresh:
            raw = folder / "raw"
            if not (raw / "_done").exists():
                raw.mkdir(parents=True, exist_ok=True)
                generate(raw, typed.fresh, columns)
                (raw / "_done").touch()
            words = words_of(raw, columns)
        else:
            words = ["data=quickstart", f"source={typed.source}"]
        base, rows = 0.0, 0
        for name in typed.only.split(","):
            workers, path = (2 if name.endswith("2") else 1), folder / name
            own = [*words, f"data.path={path}", "threads=1", *typed.words]
            found = run(command_of(name, own, typed.source, path, workers), workers, folder)
            rows = rows if name.startswith("dask") else load_dataset(str(path)).accepted_rows
            rate = rows / found.seconds / workers
            base = base or rate
            staged = ", ".join(f"{kind} {size / rows:.1f}" for kind, size in sorted(found.staged.items()))
            cpu = ", ".join(f"{role} {seconds:.1f}" for role, seconds in found.cpu_by_role())
            print(
                f"{name}: {rows:,} rows in {found.seconds:.1f} s ({found.whole_seconds:.1f} the whole command), {rate:,.0f} rows/s a core, "
                f"{rate / base:.2f} of the first; CPU-seconds: {cpu}; largest process {found.worker_mb:,.0f} MiB; staged bytes a row: {staged}",
                flush=True,
            )
            time.sleep(1)


if __name__ == "__main__":
    main()
