"""A real server process: scores, limits, faults and switches, as a client sees them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

from benchmarks import serving_load
from tests.serving.servers import LIMITS, REPOSITORY, ROW, Server, server_of, write_artifact
from tests.serving.stand_in import REFUSED_CITY, score_of

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server_of(write_artifact(tmp_path_factory.mktemp("artifact"), "v1"), *LIMITS) as server:
        yield server


def post(server: Server, rows: object, **keywords: object) -> httpx.Response:
    return server.client.post(f"{server.url}/score", json={"rows": rows}, timeout=30, **keywords)  # type: ignore[arg-type]


def stream_of(rows: list[dict[str, object]], schema: pa.Schema = SCHEMA, **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return bytes(sink.getvalue())


def test_json_rows_are_scored_in_their_order(server: Server) -> None:
    rows = [{**ROW, "age": age} for age in range(50)] + [{}, {"city": 7}, {"tags": [1, "y"], "price": None}]
    answer = post(server, rows)
    assert answer.status_code == 200 and answer.headers["x-artifact-version"] == "v1"
    as_text = [*rows[:51], {"city": "7"}, {"tags": ["1", "y"]}]
    assert answer.json() == {"artifact": "v1", "scores": [score_of(row, "v1") for row in as_text], "bad_rows": []}
    assert post(server, []).json()["scores"] == []


def test_arrow_goes_in_and_out(server: Server) -> None:
    rows = [{**ROW, "age": age} for age in range(20)]
    rows[3]["city"] = REFUSED_CITY
    answer = server.client.post(f"{server.url}/score", content=stream_of(rows), headers={"Content-Type": ARROW})
    assert answer.headers["content-type"] == ARROW
    table = pa.ipc.open_stream(answer.content).read_all()
    assert table["score"].to_pylist() == [None if row["city"] == REFUSED_CITY else score_of(row, "v1") for row in rows]
    assert table["reason"].to_pylist()[3] == f"city is {REFUSED_CITY!r}"
    assert table.schema.metadata == {b"artifact": b"v1"}
    as_json = server.client.post(
        f"{server.url}/score", content=stream_of(rows), headers={"Content-Type": ARROW, "Accept": "application/json"}
    )
    assert as_json.json()["bad_rows"] == [{"row": 3, "reason": f"city is {REFUSED_CITY!r}"}]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.large_string(), ["Rom", None]), (pa.dictionary(pa.int8(), pa.string()), ["Rom", "Bern"]), (pa.int64(), [7, 8]), (pa.null(), [None, None]),
    ],
)  # fmt: skip
def test_arrow_columns_may_have_any_type_that_reads_as_prepare_would(
    server: Server, kind: pa.DataType, values: list[object]
) -> None:
    schema = SCHEMA.set(SCHEMA.get_field_index("city"), pa.field("city", kind))
    rows = [{**ROW, "city": value} for value in values]
    answer = httpx.post(
        f"{server.url}/score",
        content=stream_of(rows, schema),
        headers={"Content-Type": ARROW, "Accept": "application/json"},
    )
    assert answer.json()["scores"] == [
        score_of({**row, "city": row["city"] and str(row["city"])}, "v1") for row in rows
    ]


def test_a_row_that_cannot_be_scored_costs_no_other_row_its_score(server: Server) -> None:
    answer = post(server, [ROW, {**ROW, "city": REFUSED_CITY}])
    assert answer.status_code == 200
    assert answer.json()["scores"] == [score_of(ROW, "v1"), None]
    alone = post(server, [{"city": REFUSED_CITY}])
    assert (alone.status_code, alone.json()["bad_rows"]) == (422, [{"row": 0, "reason": f"city is {REFUSED_CITY!r}"}])


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
    "a fraction for a category": (422, {"rows": [{"city": 1.5}]}, "at `$.rows[0].city`"),
    "an object for a category": (422, {"rows": [{"city": {"$ne": 1}}]}, "got `object`"),
    "no rows": (422, {"row": []}, "unknown field `row`"),
    "a list": (422, [1], "Expected `object`, got `array`"),
    "too many rows": (422, {"rows": [{}] * 201}, "length <= 200"),
    "too many values": (422, {"rows": [{"tags": ["x"] * 21}]}, "length <= 20"),
}


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
    "an exponent": b'{"rows": [{"price": 1e999999}]}',
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
        (b"GET / HTTP/1.1\nHost: localhost\nContent-Length: 1\nContent-Length: 2\n\n", b"HTTP/1.1 400 "),
        (b"POST /score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", b"HTTP/1.1 400 "),
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


def test_a_connection_too_many_is_told_so_and_the_others_go_on(tmp_path: Path) -> None:
    with server_of(write_artifact(tmp_path, "v1"), "limits.connections=3") as server:
        assert post(server, [ROW]).status_code == 200  # on a connection that stays open
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            assert client.recv(100).startswith(b"HTTP/1.1 503 ")
        assert post(server, [ROW]).status_code == 200
        idle.pop().close()
        time.sleep(0.2)
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_the_benchmarks_load_generator_counts_answers(server: Server) -> None:
    body = json.dumps({"rows": [ROW]}).encode()
    found = serving_load.post(server.port, [body, b"no JSON"], "application/json", 2, 0.5)
    assert found.others > 0 and len(found.seconds) > 0 and found.percentile_ms(50) <= found.percentile_ms(99)
    slow = serving_load.post(server.port, [body], "application/json", 1, 0.5, rate=10.0)
    assert 3 <= len(slow.seconds) <= 7


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
        (SCHEMA.set(2, pa.field("city", pa.float64())), "'city' has type double: give text or whole numbers"),
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


def test_the_pages_say_what_there_is(server: Server) -> None:
    page = server.client.get(f"{server.url}/openapi.json").json()
    row = page["paths"]["/score"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]["rows"][
        "items"
    ]
    assert list(row["properties"]) == ["price", "age", "city", "device", "tags"]
    docs = server.client.get(f"{server.url}/docs").text
    assert "curl" in docs and "citty" not in docs and "http://127.0.0.1" in docs and "<script" not in docs
    assert server.client.get(f"{server.url}/health").json() == {"status": "ready", "artifact": "v1"}


def test_metrics_count_what_was_done(server: Server) -> None:
    before = [
        server.metric(name) for name in ("rows_total", "bad_rows_total", 'requests_total{path="/score",status="200"}')
    ]
    post(server, [ROW, ROW, {**ROW, "city": REFUSED_CITY}])
    after = [
        server.metric(name) for name in ("rows_total", "bad_rows_total", 'requests_total{path="/score",status="200"}')
    ]
    assert [now - then for now, then in zip(after, before, strict=True)] == [3, 1, 1]
    assert server.metric('artifact{version="v1"}') == 1 and server.metric("queue_rows") == 0


def test_requests_that_arrive_together_are_scored_together_and_too_many_are_put_off(tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path, "v1", delay_s=0.05)
    options = ["batching.max_rows=64", "batching.queue_rows=64", "batching.latency_budget_ms=400"]
    with server_of(artifact, *options) as server, ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda age: post(server, [{**ROW, "age": age}] * 4), range(120)))
        by_status = {status: [one for one in answers if one.status_code == status] for status in (200, 503)}
        assert sum(map(len, by_status.values())) == 120 and by_status[200] and by_status[503]
        assert all(1 <= int(one.headers["retry-after"]) <= 10 for one in by_status[503])
        for age, answer in enumerate(answers):
            if answer.status_code == 200:
                assert answer.json()["scores"] == [score_of({**ROW, "age": age}, "v1")] * 4
        assert server.metric("batch_rows_count") < len(by_status[200])  # fewer batches than requests
        assert server.metric("overloads_total") == len(by_status[503])


class Load:
    """Threads that post without a pause and keep what came back."""

    def __init__(self, url: str, num_threads: int = 4) -> None:
        self.failures: list[str] = []
        self.versions: list[str] = []
        self._url, self._stopped = url, threading.Event()
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
        with httpx.Client(timeout=30) as client:
            while not self._stopped.is_set():
                rows = [{**ROW, "age": chance.randrange(90)} for _ in range(chance.randrange(1, 8))]
                try:
                    answer = client.post(f"{self._url}/score", json={"rows": rows})
                    values = answer.json()
                    if answer.status_code != 200 or values["scores"] != [
                        score_of(row, values["artifact"]) for row in rows
                    ]:
                        self.failures.append(f"{answer.status_code} {answer.text[:200]}")
                    self.versions.append(values.get("artifact", ""))
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))


def point(link: Path, target: Path) -> None:
    staged = link.with_name(f"{link.name}.new")
    staged.symlink_to(target)
    os.replace(staged, link)


def test_a_switch_under_load_drops_no_request_and_mixes_no_scores(tmp_path: Path) -> None:
    artifacts = [write_artifact(tmp_path / version, version, delay_s=0.002) for version in ("v1", "v2")]
    link = tmp_path / "current"
    point(link, artifacts[0])
    with server_of(link) as server, Load(server.url) as load:
        for number in range(1, 13):
            point(link, artifacts[number % 2])
            until = time.monotonic() + 30
            while server.metric("artifact_switches_total") < number and time.monotonic() < until:
                time.sleep(0.02)
        switches = server.metric("artifact_switches_total")
    assert load.failures == []
    assert switches == 12 and {"v1", "v2"} == set(load.versions) and len(load.versions) > 100


def test_a_bad_artifact_is_refused_and_the_one_before_goes_on(tmp_path: Path) -> None:
    good, bad = write_artifact(tmp_path / "good", "v1"), write_artifact(tmp_path / "bad", "v2", damaged=True)
    link = tmp_path / "current"
    point(link, good)
    with server_of(link) as server, Load(server.url, 2) as load:
        point(link, bad)
        server.wait_for("does not match its checksum")
        os.remove(link)  # and nothing at all
        server.wait_for("neither an artifact nor a registry")
        assert server.metric("artifact_refusals_total") == 1
        assert server.client.get(f"{server.url}/health/ready").json() == {"status": "ready", "artifact": "v1"}
        point(link, write_artifact(tmp_path / "mended", "v3"))
        server.wait_for("artifact v3 serves now")
        assert server.log().count("v1 goes on") == 1
    assert load.failures == [] and set(load.versions) <= {"v1", "v3"}


def test_a_folder_that_is_replaced_is_taken_up(tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path / "artifact", "v1")
    with server_of(artifact) as server, Load(server.url, 2) as load:
        os.rename(artifact, tmp_path / "old")
        os.rename(write_artifact(tmp_path / "new", "v2"), artifact)
        server.wait_for("artifact v2 serves now")
    assert load.failures == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_answers_what_is_under_way(tmp_path: Path, number: signal.Signals) -> None:
    artifact = write_artifact(tmp_path, "v1", delay_s=1.0)
    with server_of(artifact) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, server, [ROW])
        time.sleep(0.4)
        server.process.send_signal(number)
        assert waiting.result().json()["scores"] == [score_of(ROW, "v1")]
        assert server.process.wait(20) == (0 if number == signal.SIGTERM else 130)
        with pytest.raises(httpx.ConnectError):
            post(server, [ROW])


def test_readiness_ends_before_the_server_does(tmp_path: Path) -> None:
    with server_of(write_artifact(tmp_path, "v1"), "server.shutdown_delay_s=1.5") as server:
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.client.get(f"{server.url}/health/ready").status_code == 503
        assert server.client.get(f"{server.url}/health/live").status_code == 200
        assert post(server, [ROW]).status_code == 200
        assert server.process.wait(20) == 0


def run(*overrides: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.serving.servers", *overrides],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
    )


def test_what_keeps_a_server_from_starting_is_one_line(tmp_path: Path, server: Server) -> None:
    good = write_artifact(tmp_path / "good", "v1")
    cases = {
        "another program listens there": [f"artifact={good}", f"server.port={server.port}"],
        "neither an artifact nor a registry": [f"artifact={tmp_path}/none", "server.port=0"],
        "did you mean 'batching.max_rows'": [f"artifact={good}", "batching.max_row=3"],
    }
    for message, overrides in cases.items():
        done = run(*overrides)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr and len(done.stderr.splitlines()) == 1
    (tmp_path / "uvicorn.py").write_text("raise ImportError('not here')")
    done = run(f"artifact={good}", "server.port=0", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and "pip install 'torchrec-pipeline[serve]'" in done.stderr
