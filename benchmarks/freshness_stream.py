"""Measure how long a row of a stream takes from being written to its effect on an answer, under load:

    python -m pipeline generate data=quickstart data.synthetic.num_rows=8000000 output=stream.tsv
    python -m benchmarks.freshness_stream --data datasets/quickstart --rows stream.tsv [--rate 50000] [--seconds 90]
        [--every every_10_seconds] [--batch 8192] [--nice 5] [--folder DIR] [--kept WORD ...]

`retrain follow=true` reads files to which rows are appended at a rate, and publishes deltas; a server follows them, and takes requests of
16 rows from 4 connections: first alone (at rest), and then beside the training, from its first delta on. For each delta that an answer
names, the oldest row that it brings is known: by the journal of the stream and the time at which it was written. The largest of these
times is the most that any row took. No row is written twice, for a model that has seen its rows before is not what a stream trains.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import os
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.freshness import Load, done, metric, pipeline
from pipeline.runtime.storage.manifest import MANIFEST

TICK_S, FILE_S = 0.1, 10.0  # between two appends; for one file


class Writer(threading.Thread):
    """Appends rows to files of a folder, in the order of their names, at `rate` rows a second."""

    def __init__(self, folder: Path, rows: Iterable[bytes], rate: int) -> None:
        super().__init__(daemon=True)
        self._folder, self._rows, self._rate = folder, iter(rows), rate
        self.stopped, self.ran_out = threading.Event(), False
        self.written: list[tuple[float, str, int]] = []  # when, file, its bytes then
        self.num_rows = 0

    def run(self) -> None:
        began = time.time()
        while not self.stopped.wait(TICK_S):
            now = time.time()
            name = f"part-{int((now - began) / FILE_S):06d}.tsv"
            count = int((now - began) * self._rate) - self.num_rows
            rows = list(itertools.islice(self._rows, count))
            with open(self._folder / name, "ab") as file:
                file.write(b"".join(rows))
                self.written.append((time.time(), name, file.tell()))
            self.num_rows += len(rows)
            self.ran_out = len(rows) < count
            if self.ran_out:
                return

    def first_after(self, name: str, offset: int) -> float:
        """When the first row behind that offset was written."""
        keys = [(file, size) for _, file, size in self.written]
        return self.written[min(bisect.bisect_right(keys, (name, offset)), len(keys) - 1)][0]


def read_up_to(run: Path, step: int) -> tuple[str, int]:
    """(file, offset) behind the last row that `step` was trained on."""
    with open(run / "stream/journal.jsonl") as file:
        for line in file:
            entry = json.loads(line)
            if entry["batch"] == step - 1:
                name, _, end = entry["ranges"][-1]
                return name, end
    raise SystemExit(f"step {step} is not in the journal")


def delays(seen: dict[int, float], steps: dict[int, int], run: Path, writer: Writer) -> Iterator[tuple[int, float]]:
    """(delta, seconds) of the row of each that had waited for longest: the first behind what the delta seen before had brought."""
    before: tuple[str, int] | None = None
    for sequence in sorted(seen):
        place = read_up_to(run, steps[sequence])
        if before is not None:
            yield sequence, seen[sequence] - writer.first_after(*before)
        before = place


def published_steps(artifact: Path) -> dict[int, int]:
    found = {}
    for path in sorted(artifact.glob(f"deltas/*/{MANIFEST}")):
        values = json.loads(path.read_text())
        found[int(path.parent.name)] = int(values["step"])
    return found


def watch(url: str, load: Load, seconds: float) -> dict[int, float]:
    """When an answer first named each delta."""
    seen: dict[int, float] = {}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for version in load.versions.copy():
            sequence = int(version.rpartition("+")[2]) if "+" in version else 0
            if sequence and sequence not in seen:
                seen[sequence] = time.time()
        time.sleep(0.05)
    return seen


def words_of(options: argparse.Namespace, folder: str) -> list[str]:
    return [
        "experiment=quickstart", f"data.path={options.data}", f"run_dir={folder}/run", f"registry.path={folder}/registry", "hardware=cpu",
        f"source={folder}/stream", "follow=true", "stream.poll_s=0.1", f"trainer.global_batch_size={options.batch}", "trainer.log_every_steps=50",
        "trainer.evaluate_max_batches=5", "checkpoint.differential=true", "checkpoint.asynchronous=true", "checkpoint.save_every_minutes=null",
        f"publishing.when={options.every}", "publishing.max_chain=null", "publishing.gate.max_rows=4000", *options.kept,
    ]  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--rate", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--every", default="every_10_seconds")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        help="of the training and its publisher, which share cores with the server; or --kept stream.priority=idle",
    )
    parser.add_argument("--folder")
    parser.add_argument("--kept", nargs="*", default=[], help="further words of retrain")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    with open(options.rows, "rb") as rows, tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source, run = Path(folder, "stream"), Path(folder, "run", "follow")
        source.mkdir()
        words = words_of(options, folder)
        # The artifact is that of the first rows; then the training rests until the server does not.
        (source / "a.tsv").write_bytes(b"".join(itertools.islice(rows, 60 * options.batch)))
        done(pipeline("retrain", *words, "stream.idle_s=2"))
        artifact = run / "artifacts/published"
        server = pipeline("serve", f"artifact={artifact}", "server.port=0", "server.watch_s=0.5", "threads=1")
        assert server.stdout is not None
        url = next(line for line in server.stdout if "http://" in line).split(" on ")[1].split(",")[0]
        threading.Thread(target=server.stdout.read, daemon=True).start()
        with Load(url) as rest:
            time.sleep(options.seconds / 3)
        writer = Writer(source, rows, options.rate)
        training = pipeline("retrain", *words, preexec_fn=lambda: os.nice(options.nice))
        try:
            writer.start()
            await_first_delta(training, url)
            used = cpu_seconds(training, server)
            with Load(url) as beside:
                seen = watch(url, beside, options.seconds)
                used = {name: seconds - used[name] for name, seconds in cpu_seconds(training, server).items()}
                refused = metric(url, "delta_refusals_total")
        finally:
            writer.stopped.set()
            for process in (training, server):
                process.send_signal(signal.SIGINT)
            for process in (training, server):
                process.wait()
        report(rest, beside, writer, seen, published_steps(artifact), run, refused)
        print(
            "CPU       ",
            ", ".join(f"{name} {seconds / options.seconds:.2f} of a core" for name, seconds in used.items()),
        )


def await_first_delta(training: subprocess.Popen[str], url: str) -> None:
    """Until the training, its publisher and the server are at work, with nothing of their start left."""
    assert training.stdout is not None
    lines = deque(maxlen=20)  # type: deque[str]
    threading.Thread(target=lambda: lines.extend(training.stdout or ()), daemon=True).start()
    while not metric(url, "delta_sequence"):
        if training.poll() is not None:
            raise SystemExit("the training has ended:\n" + "".join(lines))
        time.sleep(0.2)


def cpu_seconds(training: subprocess.Popen[str], server: subprocess.Popen[str]) -> dict[str, float]:
    publishers = Path(f"/proc/{training.pid}/task/{training.pid}/children").read_text().split()
    processes = {"training": [str(training.pid)], "publisher": publishers, "server": [str(server.pid)]}
    return {name: sum(_cpu_seconds(pid) for pid in pids) for name, pids in processes.items()}


def _cpu_seconds(pid: str) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(
    rest: Load, beside: Load, writer: Writer, seen: dict[int, float], steps: dict[int, int], run: Path, refused: float
) -> None:
    found = [seconds for _, seconds in delays(seen, steps, run, writer)]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = [
        line["samples_per_s"]
        for line in lines
        if "samples_per_s" in line and line.get("stream_batches_ahead") is not None
    ]
    behind = [line["stream_behind_bytes"] for line in lines if "stream_behind_bytes" in line]
    seconds = writer.written[-1][0] - writer.written[0][0]
    print(rest.line("at rest"))
    print(beside.line("beside"), f" {len(beside.versions)} versions answered, {refused:.0f} deltas refused")
    print(f"stream     {writer.num_rows / seconds:,.0f} rows/s written for {seconds:.0f} s")
    print(
        f"training   {statistics.median(speeds):,.0f} rows/s at the median of its log lines, {behind[-1]:,.0f} bytes behind at the end, most {max(behind):,.0f}"
    )
    if writer.ran_out:
        print("rows       ended too soon: generate more of them")
    for path in run.glob("artifacts/*/deltas/pin.json"):
        print(f"stopped    {json.loads(path.read_text()).get('reason', '')}")
    if not found:
        print(f"effect     not known: {len(seen)} deltas answered, and the first says nothing; take more --seconds")
        return
    print(
        f"effect     median {statistics.median(found):.1f} s, most {max(found):.1f} s from a row's writing to an answer; {len(seen)} deltas answered"
    )


if __name__ == "__main__":
    main()
