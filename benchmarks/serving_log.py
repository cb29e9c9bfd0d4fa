"""Compare a server with and without a serving log, and compute every logged score again:

    python -m benchmarks.serving_log [--seconds 20] [--rounds 5] [--rates 200,500,1000,2000] [--output docs/measurements/serving_log.json]

The servers run at once, each a process of its own with one thread, and take turns under the same
load of requests of one row of 13 numbers and 26 categories. `off` has no observer, `log` writes all requests,
`log 10 %` a tenth of them. `log CPU-ms` is of the process that writes the log. At the end `skew` prepares and
scores the logged rows again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from benchmarks.about import about
from benchmarks.serving import Figure, bodies_of, measure, server
from benchmarks.serving_artifacts import Shape, write_artifact
from pipeline.extras.serving_log.log_files import read_log
from pipeline.extras.serving_log.replay import Artifacts, Compared, replay
from pipeline.serving.http.request_rows import JSON_TYPE

ROWS, CONNECTIONS = 20_000, 32
SHARES = {"off": 0.0, "log": 1.0, "log 10 %": 0.1}


def compare(folder: Path, rates: list[float], seconds: float, rounds: int) -> list[dict[str, Any]]:
    artifact = write_artifact(folder / "artifact", Shape(ROWS), "int8", vocabularies=True)
    bodies = bodies_of(ROWS, 1, as_ids=False)
    turns: dict[tuple[float, str], list[Figure]] = {}
    log_cpu_ms: dict[tuple[float, str], list[float]] = {}
    drops: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, share in SHARES.items():
            log = folder / "logs" / name
            words = [f"observers.log.folder={log}", f"observers.log.share={share}", "observers.log.flush_s=5"]
            servers[name] = stack.enter_context(server("pt2", ROWS, artifact, *(words if share else [])))
        for number in range(rounds):
            for rate in rates:
                for name in list(SHARES)[:: 1 if number % 2 else -1]:
                    before = _requests_and_log_cpu_s(*servers[name])
                    figure = measure(name, *servers[name], bodies, JSON_TYPE, seconds / rounds, rate, CONNECTIONS)
                    requests, cpu_s = (
                        b - a for a, b in zip(before, _requests_and_log_cpu_s(*servers[name]), strict=True)
                    )
                    turns.setdefault((rate, name), []).append(figure)
                    log_cpu_ms.setdefault((rate, name), []).append(1000 * cpu_s / requests)
                    print(f"{rate:6.0f}/s {name:9} {figure.qps:7.1f}/s p50 {figure.p50_ms:6.2f} p99 {figure.p99_ms:7.2f} ms", flush=True)  # fmt: skip
        for name, (_, port) in servers.items():
            drops[name] = _metric(port, "observer_drops_total") + _metric(port, "observer_failures_total")
        writers = [each for pid, _ in servers.values() for each in psutil.Process(pid).children()]
    psutil.wait_procs(writers)
    found = []
    for (rate, name), figures in turns.items():
        base = turns[rate, "off"]
        ratios = [one.p99_ms / other.p99_ms for one, other in zip(figures, base, strict=True)]
        found.append(
            {
                "asked per s": rate, "server": name, "answered per s": round(statistics.median(one.qps for one in figures), 1),
                "p50 ms": round(statistics.median(one.p50_ms for one in figures), 3),
                "p99 ms": round(statistics.median(one.p99_ms for one in figures), 3),
                "p99 / off": round(statistics.median(ratios), 3), "least": round(min(ratios), 3), "most": round(max(ratios), 3),
                "server CPU-ms": round(statistics.median(one.cpu_ms for one in figures), 3),
                "CPU-ms / off": round(statistics.median(one.cpu_ms / other.cpu_ms for one, other in zip(figures, base, strict=True)), 3),
                "log CPU-ms": round(statistics.median(log_cpu_ms[rate, name]), 3), "dropped": drops[name],
            }
        )  # fmt: skip
    return found


def _requests_and_log_cpu_s(pid: int, port: int) -> tuple[float, float]:
    return _metric(port, "requests_total"), sum(sum(each.cpu_times()[:2]) for each in psutil.Process(pid).children())


def _metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"pipeline_serving_{name}"))


def reproduce(folder: Path) -> dict[str, int]:
    """Compute the logged scores again. The servers were killed (SIGKILL), and the log's processes wrote what they had."""
    artifacts, compared = Artifacts(str(folder / "artifact")), Compared()
    for log in sorted((folder / "logs").iterdir()):
        for _, described, table in read_log(str(log)):
            replay(artifacts.load(described.artifact, 0), described, table, compared)
    return {
        "logged rows": compared.rows, "equal ids": compared.equal_rows, "equal scores": compared.equal_scores
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of load for each server and rate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", default="200,500,1000,2000")
    parser.add_argument("--output")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rates = [float(rate) for rate in given.rates.split(",")]
        figures = compare(folder, rates, given.seconds, given.rounds)
        counts = reproduce(folder)
    print(json.dumps(figures, indent=1), counts)
    if given.output:
        described = about(seconds=given.seconds, rounds=given.rounds, **counts)
        Path(given.output).write_text(json.dumps({"about": described, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
