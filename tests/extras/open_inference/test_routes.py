"""The Open Inference Protocol gives the scores of /score, for full rows and for a user with items."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pipeline.config.serving import LimitsConfig
from pipeline.extras.open_inference.tensors import read_tensors
from pipeline.serving.http.request_rows import BadRequest, RequestReader
from pipeline.serving.scoring.scorer import UserItems, as_table
from tests.serving.servers import LIMITS, Server, server_of, write_artifact
from tests.serving.stand_in import COLUMNS, REFUSED_CITY, score_of
from tests.support.messages import mentions

PRICE = {"name": "price", "shape": [2, 1], "datatype": "FP32", "data": [[1.5], [None]]}
CITY = {"name": "city", "shape": [2], "datatype": "BYTES", "data": ["Rom", "Bern"]}
DEVICE = {"name": "device", "shape": [2], "datatype": "INT64", "data": [7, 8]}
TAGS = {"name": "tags", "shape": [2, 2], "datatype": "BYTES", "data": ["x", "y", "z", "x"]}
ROWS = [
    {"price": 1.5, "city": "Rom", "device": "7", "tags": ["x", "y"]},
    {"city": "Bern", "device": "8", "tags": ["z", "x"]},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server_of(write_artifact(tmp_path_factory.mktemp("artifact"), "v1"), *LIMITS) as server:
        yield server


def infer(server: Server, *inputs: dict[str, Any], path: str = "/v2/models/model/infer", **more: Any) -> httpx.Response:
    return server.client.post(f"{server.url}{path}", json={"inputs": inputs, **more})


@pytest.mark.long
def test_inputs_are_scored_as_rows(server: Server) -> None:
    answer = infer(server, PRICE, CITY, DEVICE, TAGS, id="7", outputs=[{"name": "score"}]).json()
    wanted = {"name": "score", "shape": [2], "datatype": "FP32", "data": [score_of(row, "v1") for row in ROWS]}
    assert answer == {"model_name": "model", "model_version": "v1", "id": "7", "outputs": [wanted]}
    versioned = infer(server, PRICE, CITY, DEVICE, TAGS, path="/v2/models/model/versions/v1/infer").json()
    assert versioned["outputs"] == [wanted] and "id" not in versioned
    counted = server.client.get(f"{server.url}/metrics").text
    assert 'pipeline_serving_requests_total{path="/v2/models/{model}/infer",status="200"} 2.0' in counted


def test_health_and_metadata_are_answered(server: Server) -> None:
    def get(path: str) -> Any:
        return server.client.get(f"{server.url}{path}").json()

    assert get("/v2/health/live") == {"live": True} and get("/v2/health/ready") == {"ready": True}
    assert get("/v2/models/model/ready") == {"name": "model", "ready": True} and "version" in get("/v2")
    about = get("/v2/models/model/versions/v1")
    assert about["versions"] == ["v1"] and [each["name"] for each in about["outputs"]] == ["score"]
    assert {each["name"]: (each["datatype"], each["shape"]) for each in about["inputs"]} == {
        "price": ("FP64", [-1]), "age": ("FP64", [-1]), "city": ("BYTES", [-1]), "device": ("BYTES", [-1]),
        "tags": ("BYTES", [-1, -1]),
    }  # fmt: skip


def test_what_is_not_there_is_named(server: Server) -> None:
    assert mentions(infer(server, PRICE, path="/v2/models/other/infer").json()["error"], "'other' 'model'")
    other = infer(server, PRICE, path="/v2/models/model/versions/v0/infer")
    assert other.status_code == 404 and mentions(other.json()["error"], "v0 v1")
    assert mentions(infer(server, PRICE, outputs=[{"name": "scroe"}]).json()["error"], "'scroe' score")
    nowhere = infer(server, {**CITY, "data": ["Rom", REFUSED_CITY]})
    assert nowhere.status_code == 422 and mentions(nowhere.json()["error"], f"1 row 1: {REFUSED_CITY}")


def read(*inputs: dict[str, Any]) -> Any:
    reader = RequestReader(COLUMNS, LimitsConfig(rows=4, values_per_cell=3))
    return read_tensors(json.dumps({"inputs": inputs}).encode(), reader)[1]


def test_one_row_next_to_several_is_a_user() -> None:
    asked = read({**CITY, "shape": [1], "data": ["Rom"]}, PRICE, {**TAGS, "shape": [1], "data": ["x|y"]})
    assert isinstance(asked, UserItems) and asked.items.schema.names == ["price"]
    row = {"age": None, "city": "Rom", "device": None, "tags": ["x", "y"]}
    assert as_table(asked).to_pylist() == [{**row, "price": 1.5}, {**row, "price": None}]
    assert as_table(read({**PRICE, "shape": [1], "data": [10**400]}))["price"].to_pylist() == [float("inf")]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "inputs empty"),
        ([{**PRICE, "name": "prise"}], "'prise' price"),
        ([PRICE, PRICE], "two 'price'"),
        ([{**PRICE, "datatype": "BYTES"}], "'price' BYTES FP32"),
        ([{**CITY, "datatype": "FP32"}], "'city' FP32 BYTES"),
        ([{**CITY, "data": [1, "Rom"]}], "'city' '1' 0 BYTES"),
        ([{**PRICE, "shape": [3]}], "'price' [3] 2"),
        ([{**PRICE, "shape": [2, 2]}], "'price' [2, 2]"),
        ([{**PRICE, "shape": [-1]}], "'price' [-1]"),
        ([PRICE, {**CITY, "shape": [3], "data": ["a", "b", "c"]}], "'price' 2 3"),
        ([{**CITY, "shape": [5], "data": ["a"] * 5}], "5 limits.rows=4"),
        ([{**CITY, "shape": [0], "data": []}], "0 rows"),
        ([{**TAGS, "shape": [1, 4]}], "'tags' 4 limits.values_per_cell 3"),
        ([{**TAGS, "shape": [4], "datatype": "INT32", "data": [1, 2, 3, 4]}], "'tags' [4]"),
        ([{**PRICE, "parameters": {"binary_data_size": 8}}], "'price' binary"),
        ([{"name": "price"}], "shape inputs"),
        ([{**PRICE, "data": [[]] * 100}], "limits.rows=4"),
    ],
)
def test_tensors_that_do_not_fit_are_named(inputs: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(*inputs)
    assert caught.value.status in (413, 415, 422) and mentions(caught.value.message, words)
