"""A real server process: scores, batches, pages and its start, as a client sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

from benchmarks import serving_load
from tests.serving.requests import ARROW, SCHEMA, post, stream_of
from tests.serving.servers import LIMITS, ROW, Server, server_of, write_artifact
from tests.serving.stand_in import REFUSED_CITY, score_of
from tests.support.forks import run_warm
from tests.support.messages import mentions


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server_of(write_artifact(tmp_path_factory.mktemp("artifact"), "v1"), *LIMITS) as server:
        yield server


@pytest.mark.long
def test_json_rows_are_scored_in_their_order(server: Server) -> None:
    rows = [{**ROW, "age": age} for age in range(50)] + [{}, {"city": 7}, {"tags": [1, "y"], "price": None}]
    answer = post(server, rows)
    assert answer.status_code == 200 and answer.headers["x-artifact-version"] == "v1"
    as_text = [*rows[:51], {"city": "7"}, {"tags": ["1", "y"]}]
    assert answer.json() == {"artifact": "v1", "scores": [score_of(row, "v1") for row in as_text], "bad_rows": []}
    assert post(server, []).json()["scores"] == []


def test_a_user_with_items_is_scored_as_full_rows(server: Server) -> None:
    user, items = {"age": 30, "city": "Rom"}, [{"price": price, "device": "a", "tags": ["x"]} for price in range(40)]
    wanted = [score_of({**user, **item}, "v1") for item in items]
    answer = server.client.post(f"{server.url}/score", json={"user": user, "items": items})
    assert answer.json() == {"artifact": "v1", "scores": wanted, "bad_rows": []}
    body = stream_of([{"user": user, "items": items}, {"user": user, "items": items[3:4]}], None)
    arrow = server.client.post(f"{server.url}/score", content=body, headers={"Content-Type": ARROW})
    assert pa.ipc.open_stream(arrow.content).read_all()["score"].to_pylist() == [*wanted, wanted[3]]
    refused = server.client.post(f"{server.url}/score", json={"user": user, "items": [{"age": 3}]})
    assert refused.status_code == 422 and mentions(refused.json()["error"], "items[0] 'age' user")


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


def test_the_benchmarks_load_generator_counts_answers(server: Server) -> None:
    body = json.dumps({"rows": [ROW]}).encode()
    found = serving_load.post(server.port, [body, b"no JSON"], "application/json", 2, 0.5)
    assert found.others > 0 and len(found.seconds) > 0 and found.percentile_ms(50) <= found.percentile_ms(99)
    slow = serving_load.post(server.port, [body], "application/json", 1, 0.5, rate=10.0)
    assert 3 <= len(slow.seconds) <= 7


def test_the_pages_say_what_there_is(server: Server) -> None:
    page = server.client.get(f"{server.url}/openapi.json").json()
    row = page["paths"]["/score"]["post"]["requestBody"]["content"]["application/json"]["schema"]["anyOf"][0][
        "properties"
    ]["rows"]["items"]
    assert list(row["properties"]) == ["price", "age", "city", "device", "tags"]
    docs = server.client.get(f"{server.url}/docs").text
    assert "curl" in docs and "citty" not in docs and f"{server.url}/score" in docs and "<script" not in docs
    assert "prefers-color-scheme" in docs and "white-space: pre-wrap" in docs, (
        "the look of all pages, and no line cut off"
    )
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


@pytest.mark.long
def test_requests_that_arrive_together_are_scored_together_and_too_many_are_put_off(tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path, "v1", delay_s=0.05)
    options = ["batching.max_rows=64", "batching.queue_rows=64", "batching.latency_budget_ms=60000"]
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


@pytest.mark.long
def test_what_keeps_a_server_from_starting_is_one_line(tmp_path: Path, server: Server) -> None:
    good = write_artifact(tmp_path / "good", "v1")
    cases = {
        f":{server.port}": [f"artifact={good}", f"server.port={server.port}"],
        f"{tmp_path}/none": [f"artifact={tmp_path}/none", "server.port=0"],
        "batching.max_rows": [f"artifact={good}", "batching.max_row=3"],
    }
    for message, overrides in cases.items():
        done = run_warm("tests.serving.servers", *overrides)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr and len(done.stderr.splitlines()) == 1
    done = run_warm("tests.serving.without_uvicorn", f"artifact={good}", "server.port=0")
    assert done.returncode == 2 and "pip install 'torchrec-pipeline[serve]'" in done.stderr
