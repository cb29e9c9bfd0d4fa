"""10,200 mutated requests to a real server: no answer is a 500, scores stay bit-equal, and nothing leaks."""

from __future__ import annotations

import json
import os
import random
import re
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.serving.artifact.export import ExportSummary
from pipeline.serving.scoring.predictor import Predictor
from pipeline.serving.scoring.scorer import schema_of
from tests.serving.requests import ARROW
from tests.serving.servers import Server, running
from tests.support.examples import SCALE, SEED

HTTP, JSON, ARROWS = 4000 * SCALE, 3400 * SCALE, 2800 * SCALE
ODD_VALUES = [None, True, -1, 0, 2**31, 2**63, -(2**64), 1.5, "", "x" * 300, "\x00\x1b[2J", "\u2028", "=1+1", [], {}, [[]],
              ["a"] * 50, "1e400", "NaN", 1e308]  # fmt: skip


def _mutate(chance: random.Random, content: bytes) -> bytes:
    """Change, remove, double or swap a few pieces."""
    body = bytearray(content)
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(body) or 1)
        kind = chance.randrange(5)
        if kind == 0 and body:
            body[at] = chance.randrange(256)
        elif kind == 1:
            del body[at : at + chance.choice((1, 2, 8, 64))]
        elif kind == 2:
            body[at:at] = body[at : at + chance.choice((1, 4, 32))]
        elif kind == 3:
            body[at:at] = chance.choice((b"\x00", b"\xff" * 8, b"\r\n", b'"', b"{", b"[", b"9" * 40, b"\\u0000", b": "))
        elif len(body) > at + 8:
            body[at : at + 8] = chance.choice((b"\xff" * 8, b"\x00" * 8, b"\x00\x00\x00\x80" * 2, b"\x7f" * 8))
    return bytes(body)


def _rows(chance: random.Random, columns: ColumnsConfig) -> bytes:
    names = [*columns.dense, *columns.sparse, *columns.lists, "unknown"]
    rows = [
        {chance.choice(names): chance.choice(ODD_VALUES) for _ in range(chance.randrange(8))}
        for _ in range(chance.choice((0, 1, 3, 40)))
    ]
    body = json.dumps({chance.choice(("rows",) * 9 + ("row",)): rows}).encode()
    return _mutate(chance, body) if chance.random() < 0.5 else body


def _array(chance: random.Random, field: pa.Field, num_rows: int) -> pa.Array:
    values: list[list[object]] = [
        [None] * num_rows, [1] * num_rows, [1.5] * num_rows, ["a"] * num_rows, [True] * num_rows,
        [["a", "b"]] * num_rows, [[None]] * num_rows, [[]] * num_rows,
        [2.0**64] * num_rows,
    ]  # fmt: skip
    wanted = pa.nulls(num_rows, field.type) if chance.random() < 0.98 else pa.array(chance.choice(values))
    if chance.random() < 0.3 and pa.types.is_string(wanted.type):
        return wanted.dictionary_encode()
    if chance.random() < 0.01 and not pa.types.is_list(field.type) and not pa.types.is_floating(field.type):
        text = pa.array(["x" * chance.choice((10, 10_000, 1_000_000))])
        return pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int8()), text)
    return wanted


def _stream(chance: random.Random, schema: pa.Schema) -> bytes:
    num_rows, sink = chance.choice((0, 1, 7, 64, 5000)), pa.BufferOutputStream()
    table = pa.table([_array(chance, field, num_rows) for field in schema], names=schema.names)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=chance.choice((1000, 3)))
    body = bytes(sink.getvalue())
    return _mutate(chance, body) if chance.random() < 0.7 else body


def _post(body: bytes, kind: str, path: str = "/score") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body  # fmt: skip


def _ask(port: int, request: bytes, wait_s: float = 120.0) -> str:
    """The status of the first answer, or `none` if there is none in time: the server waits for more of the request."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=wait_s) as client:
        with suppress(OSError):
            client.sendall(request)
        with suppress(OSError):
            while chunk := client.recv(65536):
                answer += chunk
    statuses = re.findall(rb"^HTTP/1\.1 (\d{3}) ", answer, re.M)
    assert b"500" not in statuses, answer[-2000:]
    return statuses[0].decode() if statuses else "none"


def _held(pid: int) -> tuple[float, int, int]:
    """MiB in memory, threads and descriptors."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return (
        pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        len(os.listdir(f"/proc/{pid}/task")),
        len(os.listdir(f"/proc/{pid}/fd")),
    )


@pytest.mark.campaign
def test_mutated_requests_get_no_500_and_change_no_score(small_artifact: ExportSummary) -> None:
    predictor = Predictor.load(small_artifact.artifact)
    columns, schema = predictor.columns, schema_of(predictor.columns)
    reference = {"rows": [{columns.dense[0]: 1, columns.sparse[0]: "68fd1e64"}, {}, {columns.sparse[1]: "x"}]}
    words = [f"artifact={small_artifact.artifact}", "server.port=0", "limits.header_timeout_s=5", "limits.client_connections=null"]  # fmt: skip
    chance, found = random.Random(4311 + SEED), Counter[str]()
    with running("pipeline serve", *words) as server:
        wanted = server.client.post(f"{server.url}/score", json=reference).content
        first = _post(json.dumps(reference).encode(), "application/json")
        # Allocators keep a large body's memory until they use it again: a leak raises the least.
        _least_held(server, chance, schema)  # caches are warm then, and threads are there
        before = _least_held(server, chance, schema)
        for number in range(HTTP + JSON + ARROWS):
            if number < HTTP:
                path = chance.choice(("/score", "/health", "/docs", "/metrics", "/openapi.json"))
                get = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
                request = _mutate(chance, chance.choice((first, get)))
            elif number < HTTP + JSON:
                request = _post(_rows(chance, columns), "application/json")
            else:
                request = _post(_stream(chance, schema), ARROW)
            found[_ask(server.port, request, 0.15 if number < HTTP else 120.0)] += 1
            if number % 500 == 0:
                _assert_same(server, reference, wanted)
        _assert_same(server, reference, wanted)
        after = _least_held(server, chance, schema)
    print(
        f"{HTTP + JSON + ARROWS} requests: {dict(sorted(found.items()))}; MiB, threads, descriptors {before} -> {after}"
    )
    assert found["200"] > 500 and found["400"] > 500 and found["413"] > 20 and found["422"] > 500
    assert after[0] < before[0] + 64 and after[1] <= before[1] + 2 and after[2] <= before[2] + 4


@pytest.mark.campaign
def test_bodies_within_the_limits_take_less_than_256_mib(small_artifact: ExportSummary) -> None:
    """A dictionary of 280 kB in 26 columns of 4,096 rows (30 GB as text), one of 7.5 MB, and rows of 3 bytes."""
    columns = Predictor.load(small_artifact.artifact, memory="mapped").columns

    def stream(num_columns: int, size: int, num_rows: int) -> bytes:
        coded = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int8()), pa.array(["x" * size]))
        arrays = [pa.nulls(num_rows)] * len(columns.dense) + [
            coded if number < num_columns else pa.nulls(num_rows) for number in range(len(columns.sparse))
        ]
        table, sink = pa.table(arrays, names=[*columns.dense, *columns.sparse]), pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())

    bodies = {
        "26 dictionaries": (_post(stream(26, 280_000, 4096), ARROW), "413"),
        "1 dictionary": (_post(stream(1, 7_500_000, 250), ARROW), "413"),
        "empty rows": (_post(b'{"rows":[' + b"{}," * 2_700_000 + b"{}]}", "application/json"), "422"),
    }
    with running("pipeline serve", f"artifact={small_artifact.artifact}", "server.port=0") as server:
        status = Path(f"/proc/{server.process.pid}/status")
        for name, (request, wanted) in bodies.items():
            before = _held(server.process.pid)[0]
            assert _ask(server.port, request) == wanted, name
            peak = int(re.findall(r"VmHWM:\s+(\d+)", status.read_text())[0]) / 1024
            print(f"{name}: {len(request) / 1e6:.1f} MB are answered {wanted}; {before:.0f} -> at most {peak:.0f} MiB")
            assert peak < before + 256, name


def _least_held(server: Server, chance: random.Random, schema: pa.Schema) -> tuple[float, int, int]:
    """What the server holds at least while it answers 200 Arrow requests."""
    held = []
    for _ in range(200):
        _ask(server.port, _post(_stream(chance, schema), ARROW))
        held.append(_held(server.process.pid))
    mib, threads, descriptors = zip(*held, strict=True)
    return min(mib), min(threads), min(descriptors)


def _assert_same(server: Server, reference: object, wanted: bytes) -> None:
    assert server.client.post(f"{server.url}/score", json=reference).content == wanted
