"""Measure requests a second, latency and memory of serving, with tables in memory and on disk.

    python -m benchmarks.serving [--quick] [--seconds 10] [--output serving.json]

One run: each server is a process of its own on loopback, asked by the same load generator. The model is a DLRM of 26 tables
of 64 numbers with weights that nobody trained; 16 rows a request as JSON in the first part, 64 as Arrow in the second.

1. The same rows by fp32 eager (torch modules and an EmbeddingBagCollection), with the artifact's encoder of rows and with
   plain dictionaries ("own rows"), and by artifacts: fp32, int8 and int4 tables with dense.pt2, int8 with AOTInductor. All have
   the same HTTP server, JSON reader and batches, and categories of vocabularies. As fast as it goes, and at half of eager's rate for all; medians of four rounds in which
   the servers take turns.
2. Tables larger than the memory of the server's cgroup, ids Zipf-distributed: memory=ram without the bound, memory=ssd with
   100 % of the rows cached and no bound, then 25, 10 and 5 % under it, and memory=ram under it, which is expected to die.

3. Requests of one row, as JSON, and of 256 rows, as JSON and as Arrow: how many a second, and latency at half that rate, by int8 artifacts
   with dense.pt2, of fp32 and of bf16, and AOTInductor, and by a plain server of the same model (benchmarks/serving_plain.py: torch.jit, fp32, no batches).

CPU milliseconds are the server's own, of all its threads, for a request: they tell more than the clock on a machine that
others use too. RSS is the server's at the end, and its part that is no page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.cgroups import memory_cgroup
from benchmarks.serving_artifacts import DENSE, NUM_FEATURES, SPARSE, Shape, table_bytes, write_artifact, zipf_shares
from benchmarks.serving_load import post
from pipeline.extras.ssd_serving.lookup import forget_pages, read_latency_us
from pipeline.serving.http.request_rows import ARROW_TYPE, JSON_TYPE

CONNECTIONS = 4
ROUNDS = 4
MEASURED = ("qps", "p50_ms", "p99_ms", "cpu_ms", "rss_mb", "anonymous_mb")
NUM_BODIES, NUM_LARGE_BODIES = 200, 2000  # the second is more than a turn asks: its rows are not all in the page cache
ROWS_A_BATCH = 256
PLAIN = "torch.jit, plain"
SERVERS = [  # of the third part: name, kind of server, precision of the layers
    ("int8 .pt2", "pt2", "fp32"),
    ("int8 .pt2, bf16", "pt2", "bf16"),
    ("int8 AOTInductor", "compiled", "fp32"),
    (PLAIN, "jit", "fp32"),
]
VARIANTS = [  # name, kind of server, artifact
    ("fp32 eager", "eager", "fp32"),
    ("fp32 eager, own rows", "dictionaries", "fp32"),
    ("fp32 .pt2", "pt2", "fp32"),
    ("int8 .pt2", "pt2", "int8"),
    ("int4 .pt2", "pt2", "int4"),
    ("int8 AOTInductor", "compiled", "int8"),
]


@dataclass
class Figure:
    """Of one server under one load; hit_percent: of lookups in tables on SSD that memory answered."""

    name: str
    load: str
    qps: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    cpu_ms: float = 0.0
    rss_mb: float = 0.0
    anonymous_mb: float = 0.0
    hit_percent: float | None = None
    others: int = 0
    note: str = ""


@contextlib.contextmanager
def server(kind: str, rows: int, artifact: Path, *overrides: str, cgroup: str = "") -> Iterator[tuple[int, int]]:
    """(process, port). Raises ConnectionError where it ends instead of serving."""
    command = [sys.executable, "-m", "benchmarks.serving_server", kind, str(rows), *([cgroup] if cgroup else []), "--"]
    options = [f"artifact={artifact}", "server.port=0", "server.watch_s=3600", "threads=1", *overrides]
    if kind == "jit":
        command, options = [sys.executable, "-m", "benchmarks.serving_plain", str(rows)], []
    process = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if "http://" not in line:
            said = process.communicate()[1].strip().splitlines()
            raise ConnectionError(f"it ended with {process.returncode}{': ' + said[-1] if said else ''}")
        yield process.pid, int(line.split("127.0.0.1:")[1].split(",")[0])
    finally:
        process.kill()
        process.communicate()


def measure(
    name: str,
    pid: int,
    port: int,
    bodies: list[bytes],
    kind: str,
    seconds: float,
    rate: float = 0.0,
    connections: int = CONNECTIONS,
) -> Figure:
    post(port, bodies, kind, connections, min(seconds / 4, 3.0))  # warm-up
    lookups = _table_counts(port)
    before = _cpu_s(pid)
    found = post(port, bodies, kind, connections, seconds, rate)
    cpu_s, memory, after = _cpu_s(pid) - before, _memory_mb(pid), _table_counts(port)
    hits = None
    if after[0] > lookups[0]:
        hits = 100 * (after[1] - lookups[1]) / (after[0] - lookups[0])
    return Figure(
        name,
        f"{rate:.0f}/s" if rate else "most",
        found.requests_per_s,
        found.percentile_ms(50),
        found.percentile_ms(99),
        1000 * cpu_s / max(len(found.seconds), 1),
        memory["VmRSS"],
        memory["RssAnon"],
        hits,
        found.others,
    )


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mb(pid: int) -> dict[str, float]:
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) / 1024 for line in lines if line[0] in ("VmRSS:", "RssAnon:")}


def _table_counts(port: int) -> tuple[float, float]:
    from urllib.request import urlopen

    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = [
            line.split() for line in answer.read().decode().splitlines() if line.startswith("pipeline_serving_table_")
        ]
    values = {name: float(value) for name, value in lines}
    return values.get("pipeline_serving_table_lookups_total", 0.0), values.get(
        "pipeline_serving_table_cache_hits_total", 0.0
    )


def bodies_of(rows: int, num_rows: int, as_ids: bool, seed: int = 0, count: int | None = None) -> list[bytes]:
    """Requests of `num_rows` rows; ids by Zipf's law, 1 the most frequent."""
    generator = np.random.default_rng(seed)
    shares = zipf_shares(rows)
    bodies = []
    for _ in range(count or (NUM_LARGE_BODIES if as_ids else NUM_BODIES)):
        ids = np.searchsorted(shares, generator.random((NUM_FEATURES, num_rows))) + 1
        ids = np.minimum(ids, rows - 1)
        dense = generator.integers(0, 100, (len(DENSE), num_rows)).astype(np.float64)
        columns = dict(zip(DENSE, dense, strict=True)) | dict(zip(SPARSE, ids, strict=True))
        bodies.append(_arrow(columns) if as_ids else _json(columns))
    return bodies


def _json(columns: dict[str, np.ndarray]) -> bytes:
    table = pa.table(columns)
    return json.dumps({"rows": table.to_pylist()}).encode()


def _arrow(columns: dict[str, np.ndarray]) -> bytes:
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def precisions(folder: Path, rows: int, seconds: float) -> list[Figure]:
    """All servers run at once and take turns under load: what else the machine does then falls on all of them alike."""
    artifacts = {
        name: write_artifact(folder / name, Shape(rows), name, compiled=name == "int8", vocabularies=True)
        for name in ("fp32", "int8", "int4")
    }
    bodies, rounds, rate = bodies_of(rows, 16, as_ids=False), [], 0.0
    with contextlib.ExitStack() as stack:
        servers = [
            (name, *stack.enter_context(server(kind, rows, artifacts[artifact]))) for name, kind, artifact in VARIANTS
        ]
        for _ in range(ROUNDS):
            turn = []
            for name, pid, port in servers:
                turn.append(measure(name, pid, port, bodies, JSON_TYPE, seconds / ROUNDS))
                rate = rate or turn[0].qps / 2
                turn.append(measure(name, pid, port, bodies, JSON_TYPE, seconds / ROUNDS, rate))
            rounds.append(turn)
    figures = [_median([turn[place] for turn in rounds]) for place in range(2 * len(VARIANTS))]
    _show(figures)
    return figures


def throughput(folder: Path, rows: int, seconds: float, compiled: bool, rounds: int) -> list[Figure]:
    """Servers take turns, as in precisions(); a round has each load as fast as it goes, and at half of that server's own rate."""
    artifacts = {
        dense: write_artifact(folder / dense, Shape(rows), "int8", compiled and dense == "fp32", True, dense)
        for dense in ("fp32", "bf16")
    }
    loads = {
        "1 row, JSON": (bodies_of(rows, 1, as_ids=False), JSON_TYPE, 8),
        f"{ROWS_A_BATCH} rows, JSON": (bodies_of(rows, ROWS_A_BATCH, as_ids=False), JSON_TYPE, 4),
        f"{ROWS_A_BATCH} rows, Arrow": (bodies_of(rows, ROWS_A_BATCH, as_ids=True, count=NUM_BODIES), ARROW_TYPE, 4),
    }
    found: dict[tuple[str, str], list[Figure]] = {}
    with contextlib.ExitStack() as stack:
        chosen = [one for one in SERVERS if compiled or one[1] != "compiled"]
        servers = [(name, *stack.enter_context(server(kind, rows, artifacts[dense]))) for name, kind, dense in chosen]
        for _ in range(rounds):
            for load, (bodies, kind, connections) in loads.items():
                for name, pid, port in servers:
                    if kind == ARROW_TYPE and name == PLAIN:
                        continue
                    times = seconds / rounds
                    most = measure(name, pid, port, bodies, kind, times, 0.0, connections)
                    half = measure(name, pid, port, bodies, kind, times, most.qps / 2, connections)
                    for figure in (replace(most, load=load), replace(half, load=f"{load}, half")):
                        found.setdefault((name, figure.load), []).append(figure)
                        _show_rows(figure, "  one turn: ")
    figures = [_median(turns) for turns in found.values()]
    for one in sorted(figures, key=lambda figure: figure.load):
        _show_rows(one)
    return figures


def _show_rows(one: Figure, before: str = "") -> None:
    rows_a_request = 1 if one.load.startswith("1 row") else ROWS_A_BATCH
    print(
        f"{before}{one.load:22}{one.name:18}{one.qps:9.1f} requests/s {one.qps * rows_a_request:10,.0f} rows/s  "
        f"p50 {one.p50_ms:6.2f} ms  p99 {one.p99_ms:6.2f} ms  {one.cpu_ms:6.2f} CPU-ms a request"
        + (f"  {one.others} not 200" if one.others else ""),
        flush=True,
    )


def _median(figures: list[Figure]) -> Figure:
    values = {name: statistics.median(getattr(one, name) for one in figures) for name in MEASURED}
    return replace(figures[0], **values, others=sum(one.others for one in figures))


def on_disk(folder: Path, rows: int, limit_bytes: int, seconds: float) -> tuple[list[Figure], dict[str, object]]:
    """ram and ssd without a bound, then ssd with less and less cache, and ram, under it."""
    artifact = write_artifact(folder / "large", Shape(rows), "int8")
    total = table_bytes(Shape(rows), "int8")
    files = sorted(str(path) for path in (artifact / "tables").iterdir())
    bodies, figures, rate = bodies_of(rows, 64, as_ids=True), [], 0.0
    about: dict[str, object] = {
        "table_bytes": total,
        "limit_bytes": limit_bytes,
        "read_p95_us": read_latency_us(files),
    }
    cases = [("ram, no bound", "ram", 1.0, False), ("ssd 100 %, no bound", "ssd", 1.0, False)]
    cases += [(f"ssd {percent} %", "ssd", percent / 100, True) for percent in (25, 10, 5)] + [("ram", "ram", 1.0, True)]
    for name, memory, share, bounded in cases:
        os.sync()
        for path in files:
            forget_pages(path)  # else they are another cgroup's pages, and no read reaches the disk
        options = [f"memory={memory}", f"ssd.cache_gb={share * total / 2**30}"]
        with memory_cgroup(limit_bytes) if bounded else contextlib.nullcontext(("", "no bound")) as (cgroup, bound):
            about["bound"] = bound
            try:
                with server("ids", rows, artifact, *options, cgroup=cgroup) as (pid, port):
                    figures.append(measure(name, pid, port, bodies, ARROW_TYPE, seconds))
                    rate = rate or figures[0].qps / 2
                    figures.append(measure(name, pid, port, bodies, ARROW_TYPE, seconds, rate))
                    _show(figures[-2:])
            except ConnectionError as error:
                figures.append(Figure(name, "-", note=f"{bound}: {error}"))
                _show(figures[-1:])
    return figures, about


def _show(figures: list[Figure]) -> None:
    for one in figures:
        hits = "" if one.hit_percent is None else f"  {one.hit_percent:5.1f} % hits"
        text = one.note or (
            f"{one.qps:8.1f} requests/s  p50 {one.p50_ms:7.2f} ms  p99 {one.p99_ms:7.2f} ms  {one.cpu_ms:6.2f} CPU-ms  "
            f"RSS {one.rss_mb:7.0f} MB ({one.anonymous_mb:.0f} anonymous){hits}"
        )
        print(f"{one.name:22} {one.load:>6} {text}" + (f"  {one.others} not 200" if one.others else ""), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="small tables and short loads: that it works, not how fast"
    )
    parser.add_argument("--only", choices=("precisions", "disk", "throughput"), help="one part alone")
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--table-gb", type=float, default=None, help="of the tables of the second part")
    parser.add_argument("--limit-gb", type=float, default=None, help="of the cgroup")
    parser.add_argument("--folder", default=None, help="where artifacts are written, on the disk to be measured")
    parser.add_argument("--output", default=None)
    options = parser.parse_args()
    seconds = options.seconds or (1.0 if options.quick else 10.0)
    table_gb, limit_gb = (
        options.table_gb or (0.9 if options.quick else 2.5),
        options.limit_gb or (0.85 if options.quick else 1.5),
    )
    rows = int(table_gb * 2**30 / table_bytes(Shape(1), "int8"))
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.only in (None, "throughput"):
            table_rows, rounds = (2_000, 2) if options.quick else (50_000, ROUNDS)
            figures = throughput(Path(folder), table_rows, seconds, not options.quick, rounds)
            result["throughput"] = [asdict(one) for one in figures]
        if options.only in (None, "precisions"):
            figures = precisions(Path(folder), 2_000 if options.quick else 50_000, seconds)
            result["precisions"] = [asdict(one) for one in figures]
        if options.only in (None, "disk"):
            print(
                f"tables of {table_gb:g} GiB, {100 * limit_gb / table_gb:.0f} % of that for the server's whole memory"
            )
            figures, about = on_disk(Path(folder), rows, int(limit_gb * 2**30), seconds)
            print("disk: " + ", ".join(f"{name} {value}" for name, value in about.items()))
            result |= {"disk": [asdict(one) for one in figures], **about}
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
