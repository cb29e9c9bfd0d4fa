"""A real server process over a stand-in model, whose artifact is a folder with a manifest.json and nothing else.

`python -m tests.serving.servers OVERRIDE ...` is the process.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.forks import WarmCommand

LIMITS = [
    "limits.rows=200",
    "limits.body_mb=0.25",
    "limits.header_timeout_s=2.0",
    "limits.body_timeout_s=2.0",
    "limits.values_per_cell=20",
]
ROW = {"price": 1.5, "age": 30, "city": "Rom", "device": "a", "tags": ["x", "y"]}


def write_artifact(folder: Path, version: str, **about: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"version": version, **about}))
    return folder


class Server:
    def __init__(self, process: WarmCommand, url: str) -> None:
        self.process, self.url = process, url
        self.client = httpx.Client(timeout=120, limits=httpx.Limits(max_connections=100))
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        self.lines.extend(line.rstrip() for line in self.process.stderr)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def log(self) -> str:
        return "\n".join(self.lines)

    def metric(self, name: str) -> float:
        text = self.client.get(f"{self.url}/metrics").text
        return sum(
            float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"pipeline_serving_{name}")
        )

    def wait_for(self, text: str, timeout_s: float = 120.0) -> None:
        until = time.monotonic() + timeout_s
        while text not in self.log():
            assert time.monotonic() < until, f"{text!r} is not in {self.log()!r}"
            time.sleep(0.05)


@contextmanager
def server_of(artifact: Path, *overrides: str) -> Iterator[Server]:
    words = [f"artifact={artifact}", "server.port=0", "server.watch_s=0.05", *overrides]
    with running("tests.serving.servers", *words) as server:
        yield server


@contextmanager
def running(module: str, *words: str) -> Iterator[Server]:
    process = WarmCommand(module, words)
    line = process.stdout.readline()
    if "://" not in line:
        process.kill()
        raise AssertionError(f"no server: {process.communicate()}")
    server = Server(process, line.split(" on ")[1].split(",")[0])
    try:
        yield server
    finally:
        server.client.close()
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    from pipeline.cli.verb import Verb
    from pipeline.config.jobs.evaluate import ServeJob
    from pipeline.serving.http.serve import serve
    from pipeline.serving.http.switching import FoundArtifact
    from tests.serving.stand_in import StandIn

    def load(found: FoundArtifact) -> StandIn:
        about = json.loads((Path(found.path) / "manifest.json").read_text())
        time.sleep(about.get("load_s", 0.0))
        if about.get("damaged"):
            raise ValueError(f"{found.path}/tables/00000.rows does not match its checksum in bytes 0 to 9")
        tried = 2  # rows, before the server listens
        delay_s, held_by = about.get("delay_s", 0.0), about.get("held_by", "")
        return StandIn(about["version"], delay_s=delay_s, held_by=held_by, free_rows=tried)

    Verb(ServeJob, lambda job: serve(job, load), "python -m tests.serving.servers").main()


if __name__ == "__main__":
    main()
