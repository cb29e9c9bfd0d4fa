"""What tests ask a server: rows as JSON and as Arrow, once or without a pause."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import httpx
import pyarrow as pa

from tests.serving.servers import Server

ARROW = "application/vnd.apache.arrow.stream"
SCHEMA = pa.schema(
    [
        ("price", pa.float64()),
        ("age", pa.int32()),
        ("city", pa.string()),
        ("device", pa.string()),
        ("tags", pa.list_(pa.string())),
    ]
)


def post(server: Server, rows: object, **keywords: object) -> httpx.Response:
    return server.client.post(f"{server.url}/score", json={"rows": rows}, timeout=120, **keywords)


def stream_of(rows: list[dict[str, object]], schema: pa.Schema | None = SCHEMA, **options: object) -> bytes:
    table, sink = pa.Table.from_pylist(rows, schema=schema), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


class Load:
    """Threads that post rows without a pause and keep what came back. `draw` makes rows, `are_scores` says of (rows, version,
    scores) whether that version gives them."""

    def __init__(
        self,
        url: str,
        draw: Callable[[random.Random], list[dict[str, object]]],
        are_scores: Callable[[list[dict[str, object]], str, list[float]], bool],
        num_threads: int = 4,
    ) -> None:
        self.failures: list[str] = []
        self.versions: list[str] = []
        self._url, self._draw, self._are_scores = url, draw, are_scores
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._post, args=(seed,)) for seed in range(num_threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _post(self, seed: int) -> None:
        chance = random.Random(seed)
        with httpx.Client(timeout=120) as client:
            while not self._stopped.is_set():
                rows = self._draw(chance)
                try:
                    answer = client.post(f"{self._url}/score", json={"rows": rows})
                    values = answer.json()
                    if answer.status_code != 200 or not self._are_scores(rows, values["artifact"], values["scores"]):
                        self.failures.append(f"{answer.status_code} {answer.text[:200]}")
                    self.versions.append(values.get("artifact", ""))
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
