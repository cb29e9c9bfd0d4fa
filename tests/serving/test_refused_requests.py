"""A real server process: what is wrong, hostile, slow or too much is refused with its reason, and harms nobody else."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

from tests.serving.requests import ARROW, SCHEMA, post, stream_of
from tests.serving.servers import LIMITS, ROW, Server, server_of, write_artifact


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server_of(write_artifact(tmp_path_factory.mktemp("artifact"), "v1"), *LIMITS) as server:
        yield server


WRONG = {
    "a column that there is not": (
        422,
        {"rows": [{"citty": "Rom"}]},
        "unknown field `citty` - at `$.rows[0]`; did you mean 'city'?",
    ),
    "text for a number": (
        422,
        {"rows": [ROW, {"price": "cheap"}]},
        "Expected `float | null`, got `str` - at `$.rows[1].price`",
    ),
    "true for a number": (422, {"rows": [{"price": True}]}, "got `bool`"),
    "a list for a category": (422, {"rows": [{"city": ["Rom"]}]}, "at `$.rows[0].city`"),
    "an object for a category": (422, {"rows": [{"city": {"$ne": 1}}]}, "got `object`"),
    "no rows": (422, {"row": []}, "rows is missing: send"),
    "a list": (422, [1], "Expected `object`, got `array`"),
    "too many rows": (422, {"rows": [{}] * 201}, "limits.rows=200"),
    "too many values": (422, {"rows": [{"tags": ["x"] * 21}]}, "length <= 20"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_request_is_said_with_its_place(server: Server, name: str) -> None:
    status, body, message = WRONG[name]
    answer = server.client.post(f"{server.url}/score", json=body)
    assert answer.status_code == status and message in answer.json()["error"]


HOSTILE = {
    "nothing": b"",
    "half an object": b'{"rows": [{"price": 1',
    "deep lists": b"[" * 100_000,
    "deep rows": b'{"rows":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep unknown": b'{"x":' * 20_000 + b"1" + b"}" * 20_000,
    "a number without an end": b'{"rows": [{"price": ' + b"9" * 100_000 + b"}]}",
    "a whole number without an end": b'{"rows": [{"city": ' + b"9" * 5000 + b"}]}",
    "an exponent and half a surrogate": b'{"rows": [{"price": 1e400, "city": "\\ud800"}]}',
    "an exponent and a list": b'{"rows": [{"price": 1e400, "city": [1]}]}',
    "an exponent as a count": b'{"rows": 1e400}',
    "NaN": b'{"rows": [{"price": NaN}]}',
    "half a surrogate": b'{"rows": [{"city": "\\ud800"}]}',
    "not UTF-8": b'{"rows": [{"city": "\xff\xfe"}]}',
    "two documents": b'{"rows": []}{"rows": []}',
    "a pickle": b"\x80\x04\x95\x1b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_is_refused(server: Server, name: str) -> None:
    answer = server.client.post(
        f"{server.url}/score", content=HOSTILE[name], headers={"Content-Type": "application/json"}
    )
    assert 400 <= answer.status_code < 500 and answer.json()["error"]


def test_what_is_not_served_is_said_in_json(server: Server) -> None:
    json_type = {"Content-Type": "application/json"}
    asked = [
        (server.client.get(f"{server.url}/score"), 405), (server.client.get(f"{server.url}/nothing"), 404), (server.client.get(f"{server.url}/score/"), 404),
        (server.client.post(f"{server.url}/score", content=b"a=1", headers={"Content-Type": "text/plain"}), 415),
        (server.client.post(f"{server.url}/score", content=b"{}"), 415),
        (server.client.post(f"{server.url}/score", content=b"\x1f\x8b", headers={**json_type, "Content-Encoding": "gzip"}), 415),
        (server.client.get(f"{server.url}/health", headers={"Host": "attacker.example"}), 400),
        (server.client.post(f"{server.url}/score", content=b"x" * 300_000, headers=json_type), 413),
    ]  # fmt: skip
    for answer, status in asked:
        assert answer.status_code == status and answer.json()["error"], answer.text


def test_answers_tell_a_browser_to_guess_and_load_nothing(server: Server) -> None:
    docs = server.client.get(f"{server.url}/docs")
    assert docs.headers["Content-Security-Policy"].startswith("default-src 'none'") and docs.status_code == 200
    for path in ("/docs", "/health", "/metrics", "/nothing"):
        assert server.client.get(f"{server.url}{path}").headers["X-Content-Type-Options"] == "nosniff"


def test_a_body_that_is_announced_too_large_is_refused_before_it_is_sent(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(
            b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n"
        )
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b"HTTP/1.1 408 "),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", b"HTTP/1.1 408 "),
        (b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{", b"HTTP/1.1 408 "),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 20_000 + b"\r\n\r\n", b"HTTP/1.1 431 "),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Endless: " + b"a" * 600_000, b"HTTP/1.1 431 "),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 431 "),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"HTTP/1.1 400 "),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nhost: attacker.example\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET /health HTTP/1.1\r\nAccept: */*\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET http://attacker.example/health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET http://localhost:80/health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET http://localhost/health HTTP/1.1\r\nHost: Localhost\r\nConnection: close\r\n\r\n", b"HTTP/1.1 200 "),
        (b"GET / HTTP/1.1\nHost: localhost\nContent-Length: 1\nContent-Length: 2\n\n", b"HTTP/1.1 400 "),
        (b"POST /score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", b"HTTP/1.1 400 "),
        (b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{\"\r\nzz\r\n", b"HTTP/1.1 400 "),
    ],
)  # fmt: skip
def test_slow_and_broken_connections_are_answered_and_closed(server: Server, sent: bytes, answered: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        received = b""
        with suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(sent)
        with suppress(ConnectionResetError):  # what it still had to say came first
            while chunk := client.recv(1000):
                received += chunk
    assert received.startswith(answered), received[:200]
    assert server.client.get(f"{server.url}/health/live").status_code == 200


def test_many_idle_connections_do_not_keep_others_out(server: Server) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    try:
        assert post(server, [ROW]).status_code == 200
    finally:
        for client in idle:
            client.close()


@pytest.mark.long
def test_a_connection_too_many_is_told_so_and_the_others_go_on(tmp_path: Path) -> None:
    with server_of(write_artifact(tmp_path, "v1"), "limits.connections=3") as server:
        assert post(server, [ROW]).status_code == 200  # on a connection that stays open
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            assert client.recv(100).startswith(b"HTTP/1.1 503 ")
        assert post(server, [ROW]).status_code == 200
        idle.pop().close()
        until = time.monotonic() + 120
        while httpx.get(f"{server.url}/health").status_code != 200:  # until it has noticed that one has left
            assert time.monotonic() < until
            time.sleep(0.02)


def test_mutated_arrow_streams_are_refused_and_nothing_crashes(server: Server) -> None:
    chance = random.Random(0)
    whole = stream_of([ROW] * 20)
    statuses = []
    with httpx.Client() as client:
        for number in range(400):
            body = bytearray(whole)
            for _ in range(chance.randrange(1, 5)):
                body[chance.randrange(len(body))] = chance.randrange(256)
            if number % 3 == 0:
                del body[chance.randrange(len(body)) :]
            answer = client.post(f"{server.url}/score", content=bytes(body), headers={"Content-Type": ARROW})
            statuses.append(answer.status_code)
            assert answer.status_code == 200 or answer.json()["error"]
    assert set(statuses) <= {200, 400, 413, 415, 422}  # a changed number is another number
    assert statuses.count(400) + statuses.count(422) > 100


def test_compressed_arrow_is_refused_for_nothing_bounds_what_it_becomes(server: Server) -> None:
    for codec in ("zstd", "lz4"):
        answer = server.client.post(
            f"{server.url}/score", content=stream_of([ROW] * 50, compression=codec), headers={"Content-Type": ARROW}
        )
        assert answer.status_code == 415 and "without compression" in answer.json()["error"]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (SCHEMA.remove(0), "1 of 5 columns are missing: 'price'"),
        (SCHEMA.append(pa.field("citty", pa.string())), "no column 'citty'; did you mean 'city'?"),
        (SCHEMA.append(SCHEMA.field(0)), "'price' is there 2 times"),
        (SCHEMA.set(2, pa.field("city", pa.duration("s"))), "'city' has type duration[s]: give text, numbers"),
        (SCHEMA.set(0, pa.field("price", pa.string())), "'price' has type string: give numbers"),
        (SCHEMA.set(4, pa.field("tags", pa.list_(pa.list_(pa.string())))), "give lists of text"),
        (SCHEMA.set(4, pa.field("tags", pa.string())), "give lists of text"),
    ],
)
def test_arrow_columns_that_do_not_fit_are_named(server: Server, schema: pa.Schema, message: str) -> None:
    batch = pa.record_batch([pa.nulls(1, field.type) for field in schema], schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(batch)
    answer = server.client.post(f"{server.url}/score", content=bytes(sink.getvalue()), headers={"Content-Type": ARROW})
    assert answer.status_code == 422 and message in answer.json()["error"]
