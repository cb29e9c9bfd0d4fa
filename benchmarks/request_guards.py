"""Measure what the server's own checks of requests buy and cost:  python -m benchmarks.request_guards

Arrow: the memory that a compressed body of a few kilobytes takes, and the time of looking for compression.
HTTP: unfinished requests, long headers and too many connections, against uvicorn with and without GuardedProtocol.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipeline.config.serving import LimitsConfig
from pipeline.serving.http.arrow_bounds import has_compression
from pipeline.serving.http.protocol import limited_by

LIMITS = LimitsConfig(header_timeout_s=2.0, connections=150)
SLOW, WAIT_S, REQUESTS, ROUNDS = 100, 4.0, 2000, 5
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def _stream(table: pa.Table, compression: str | None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def measure_arrow() -> None:
    bomb = _stream(pa.table({"price": np.zeros(32 << 20)}), "zstd")
    before = pa.total_allocated_bytes()
    batch = pa.ipc.open_stream(bomb).read_next_batch()
    taken = pa.total_allocated_bytes() - before
    print(
        f"arrow  a zstd body of {len(bomb):,} bytes takes {taken:,} bytes when its batch is read ({taken // len(bomb):,} x)"
    )
    del batch
    body = _stream(pa.table({f"c{column}": np.random.rand(64) for column in range(39)}), None)
    rounds = 2000
    took = min(_seconds(lambda: [has_compression(body) for _ in range(rounds)]) for _ in range(3))
    read = min(_seconds(lambda: [pa.ipc.open_stream(body).read_all() for _ in range(rounds)]) for _ in range(3))
    print(
        f"arrow  64 rows of 39 columns: the check takes {1e6 * took / rounds:.0f} us, reading {1e6 * read / rounds:.0f} us"
    )


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def measure_http(name: str, protocol: type[asyncio.Protocol]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(_app, http=protocol, ws="none", lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    address = listener.getsockname()
    while not server.started:
        time.sleep(0.01)
    slow = [_connect(address, b"GET / HT") for _ in range(SLOW)]
    time.sleep(WAIT_S)
    print(f"http   {name}: {sum(map(_is_open, slow))} of {SLOW} unfinished requests are open after {WAIT_S:g} s")
    _close(slow)
    header = _connect(address, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (8 << 20) + b"\r\n\r\n")
    print(f"http   {name}: a header of 8 MiB is answered {_answer(header)!r}")
    many = [_connect(address, REQUEST) for _ in range(LIMITS.connections + 50)]
    refused = sum(b" 503 " in _answer(connection) for connection in many)
    print(f"http   {name}: {refused} of {len(many)} connections are told that there are too many")
    _close([header, *many])
    time.sleep(0.2)
    rates = []
    for _ in range(ROUNDS):
        client = socket.create_connection(address)
        rates.append(REQUESTS / _seconds(lambda client=client: [_ask(client) for _ in range(REQUESTS)]))
        client.close()
    print(f"http   {name}: {max(rates):,.0f} requests/s over one connection, the best of {ROUNDS} times {REQUESTS}")
    server.should_exit = True
    thread.join()


def _connect(address: Any, sent: bytes) -> socket.socket:
    connection = socket.create_connection(address, timeout=5)
    with suppress(OSError):  # answered and closed before all was sent
        connection.sendall(sent)
    return connection


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b"unfinished"  # what is closed or answered can be read
    except BlockingIOError:
        return True


def _answer(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1000).partition(b"\r\n")[0]
    except OSError as error:
        return type(error).__name__.encode()


def _ask(connection: socket.socket) -> None:
    connection.sendall(REQUEST)
    connection.recv(1000)


def _close(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def main() -> None:
    measure_arrow()
    measure_http("uvicorn's protocol", HttpToolsProtocol)
    measure_http("GuardedProtocol", limited_by(LIMITS))


if __name__ == "__main__":
    main()
