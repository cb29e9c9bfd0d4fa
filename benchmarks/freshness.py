"""Measure how old served embeddings are while a training runs, its deltas are published, and requests come:

    python -m benchmarks.freshness --data datasets/quickstart [--seconds 60] [--save-every-s 6] [--folder DIR]

A run trains 50 steps and is exported. A server takes requests of 16 rows from 4 connections, first alone (at rest); then the
same run goes on by train, saves changed rows every few seconds, and publish follows it. The age of what serves is read from
/metrics twice a second: the largest is the most that passes from a row that is trained on to its effect on an answer.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np

ROWS, CONNECTIONS, PAUSE_S = 16, 4, 0.02


def pipeline(verb: str, *words: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipeline", verb, *words]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def done(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(process.args)} ended with {process.returncode}:\n{output[-2000:]}")
    return output


class Load:
    """Posts rows with a pause behind each answer, until it is stopped."""

    def __init__(self, url: str) -> None:
        self.seconds: list[float] = []
        self.failures = 0
        self.versions: set[str] = set()
        self._url, self._stopped = url, threading.Event()
        self._threads = [threading.Thread(target=self._post, args=(seed,)) for seed in range(CONNECTIONS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _post(self, seed: int) -> None:
        chance = np.random.default_rng(seed)
        with httpx.Client(timeout=60) as client:
            while not self._stopped.is_set():
                rows = [{f"int_{i}": float(chance.integers(50)) for i in range(13)} for _ in range(ROWS)]
                began = time.perf_counter()
                try:
                    answer = client.post(f"{self._url}/score", json={"rows": rows})
                    self.seconds.append(time.perf_counter() - began)
                    self.failures += answer.status_code != 200
                    self.versions.add(answer.json().get("artifact", ""))
                except httpx.HTTPError:
                    self.failures += 1
                time.sleep(PAUSE_S)

    def line(self, name: str) -> str:
        p50, p99 = (1000 * float(np.percentile(self.seconds, q)) for q in (50, 99))
        return (
            f"{name:<10} {len(self.seconds):>6} requests  {self.failures} failed  p50 {p50:7.2f} ms  p99 {p99:7.2f} ms"
        )


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"pipeline_serving_{name} "))


def watch(url: str, seconds: float, train: subprocess.Popen[str]) -> tuple[list[float], float]:
    """The ages that were read from the first delta on, and the last delta's sequence."""
    ages, until = [], time.monotonic() + seconds
    sequence = 0.0
    while time.monotonic() < until and train.poll() is None:
        if sequence := metric(url, "delta_sequence"):
            ages.append(metric(url, "embedding_age_seconds"))
        time.sleep(0.5)
    return ages, sequence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--save-every-s", type=float, default=6.0)
    parser.add_argument("--folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run, artifact = f"{folder}/run", f"{folder}/artifact"
        words = [
            "experiment=quickstart",
            f"data.path={options.data}",
            f"run_dir={run}",
            "hardware=cpu",
            "trainer.epochs=1000",
            "checkpoint.differential=true",
            f"checkpoint.save_every_minutes={options.save_every_s / 60}",
        ]
        done(pipeline("train", *words, "trainer.max_steps=50"))
        done(pipeline("export", f"run={run}", f"output={artifact}"))
        server = pipeline("serve", f"artifact={artifact}", "server.port=0", "server.watch_s=1")
        assert server.stdout is not None
        url = next(line for line in server.stdout if "http://" in line).split(" on ")[1].split(",")[0]
        threading.Thread(target=server.stdout.read, daemon=True).start()
        with Load(url) as rest:
            time.sleep(options.seconds / 2)
        train = pipeline("train", *words)
        publisher = pipeline("publish", f"artifact={artifact}", "follow=true", "every_s=0.5")
        for process in (train, publisher):
            threading.Thread(target=process.stdout.read, daemon=True).start()
        try:
            with Load(url) as beside:
                ages, sequence = watch(url, options.seconds + 40, train)
        finally:
            for process in (publisher, train, server):
                process.send_signal(signal.SIGINT)
            for process in (publisher, train, server):
                process.wait()
        speeds = [
            line["samples_per_s"]
            for line in map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
            if "samples_per_s" in line
        ]
        print(rest.line("at rest"))
        print(beside.line("beside"), f" {len(beside.versions)} versions answered")
        print(f"training   {statistics.median(speeds):,.0f} rows/s at the median of its log lines")
        print(f"age        median {statistics.median(ages):.1f} s, most {max(ages):.1f} s; {sequence:.0f} deltas taken")


if __name__ == "__main__":
    main()
