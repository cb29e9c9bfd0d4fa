"""A user with items: the same rows as full rows, from JSON and Arrow, and a clear error for what does not fit."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.config.serving import LimitsConfig
from pipeline.runtime.errors import ServingError
from pipeline.serving.http.request_rows import ARROW_TYPE, JSON_TYPE, BadRequest, RequestReader
from pipeline.serving.scoring.scorer import AnyRows, JoinedRows, UserItems, as_table, concat_rows
from tests.serving.stand_in import COLUMNS
from tests.support.messages import mentions, names

USER = {"age": 30, "city": "Rom", "tags": ["x", "y"]}
ITEMS = [{"price": 1.5, "device": "a"}, {"price": None}, {"device": 7}]
FULL = [{**USER, **item} for item in ITEMS]
LIMITS = LimitsConfig(rows=5, body_mb=0.01)


def read(body: object, columns: ColumnsConfig = COLUMNS) -> AnyRows:
    return RequestReader(columns, LIMITS).read(json.dumps(body).encode(), JSON_TYPE)


def read_arrow(rows: list[dict[str, object]], schema: pa.Schema | None = None) -> AnyRows:
    table = pa.Table.from_pylist(rows, schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return RequestReader(COLUMNS, LIMITS).read(sink.getvalue().to_pybytes(), ARROW_TYPE)


def values(rows: AnyRows) -> list[dict[str, object]]:
    return as_table(rows).select(COLUMNS.dense + COLUMNS.sparse + COLUMNS.multi_hot).to_pylist()


def test_a_user_with_items_reads_as_full_rows() -> None:
    asked = read({"user": USER, "items": ITEMS})
    assert isinstance(asked, UserItems) and asked.user.num_rows == 1
    assert values(asked) == values(read({"rows": FULL}))
    without_city = read({"user": {"age": 30}, "items": [{"price": 1.0}]})  # missing for the user, who is encoded once
    assert values(without_city) == values(read({"rows": [{"age": 30, "price": 1.0}]}))
    assert without_city.items.schema.names == ["price"]
    assert read({"user": {"age": 30}, "items": [{"price": 1.0, "city": None}]}).items.schema.names == ["price"]


def test_names_that_fields_of_a_struct_cannot_have_are_read_for_users_and_items_too() -> None:
    columns = ColumnsConfig(label="", dense=['a"b'], sparse=["c\\d"])
    asked = read({"user": {'a"b': 2}, "items": [{"c\\d": "x"}, {"c\\d": "y"}]}, columns)
    assert as_table(asked).to_pylist() == [{'a"b': 2.0, "c\\d": "x"}, {'a"b': 2.0, "c\\d": "y"}]


def test_an_arrow_stream_has_a_row_for_each_user() -> None:
    whole = [{**item, "device": str(item.get("device", ""))} for item in ({"price": None, **item} for item in ITEMS)]
    one = read_arrow([{"user": USER, "items": whole}])
    assert isinstance(one, UserItems) and values(one) == values(read({"rows": [{**USER, **item} for item in whole]}))
    two = read_arrow([{"user": USER, "items": whole}, {"user": {**USER, "age": 4}, "items": whole[:1]}])
    assert isinstance(two, JoinedRows) and [row["age"] for row in values(two)] == [30, 30, 30, 4]
    assert values(two.slice(2, 2)) == values(two)[2:]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "rows user items"),
        ({"rows": [], "user": {}, "items": [{}]}, "rows user"),
        ({"user": USER}, "user items"),
        ({"items": ITEMS}, "items user"),
        ({"user": USER, "items": []}, "items one"),
        ({"user": USER, "items": [{"price": 1}, {"age": 3}]}, "items[1] 'age'"),
        ({"user": USER, "items": [{"price": 1}, {"age": None}]}, "items[1] 'age'"),
        ({"user": {"aeg": 3}, "items": [{}]}, "aeg age $.user"),
        ({"user": USER, "items": [{"price": "x"}]}, "$.items[0].price"),
        ({"user": USER, "items": [{}] * 6}, "6 limits.rows=5"),
        ({"user": [USER], "items": [{}]}, "$.user"),
        ({"user": USER, "items": {"price": 1}}, "$.items"),
    ],
)
def test_what_does_not_fit_is_named(body: object, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(body)
    assert caught.value.status == 422 and mentions(caught.value.message, words)


STRUCTS = pa.schema(
    [
        ("user", pa.struct([("age", pa.int32()), ("city", pa.string()), ("tags", pa.list_(pa.string()))])),
        ("items", pa.list_(pa.struct([("price", pa.float64()), ("device", pa.string())]))),
    ]
)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no user"),
        ([{"user": None, "items": [{}]}], "user null 1"),
        ([{"user": USER, "items": None}], "items null 1"),
        ([{"user": USER, "items": []}], "items row 0 empty"),
        ([{"user": USER, "items": [{}, None]}], "1 2 items null"),
        ([{"user": USER, "items": [{}] * 6}], "limits.rows=5"),
        ([{"user": USER, "items": [{}] * 3000}], "MiB limits.body_mb"),
    ],
)  # fmt: skip
def test_arrow_users_and_items_that_do_not_fit_are_named(rows: list[dict[str, object]], words: str) -> None:
    with pytest.raises((BadRequest, ServingError)) as caught:
        read_arrow(rows, STRUCTS)
    assert mentions(caught.value, words)


def test_an_arrow_column_of_both_or_of_neither_is_named() -> None:
    both = [{"user": {**USER, "device": "a"}, "items": [{"price": 1.0, "device": "a"}]}]
    with pytest.raises(BadRequest, match=names("'device' user items")):
        read_arrow(both)
    with pytest.raises(BadRequest, match=names("2 of 5 'price'")):
        read_arrow([{"user": USER, "items": [{}]}], STRUCTS.set(1, pa.field("items", pa.list_(pa.struct([])))))


def test_rows_in_python_are_checked_too() -> None:
    user, items = pa.table({"age": [1.0]}), pa.table({"price": [1.0, 2.0]})
    assert UserItems(user, items).slice(1, 1).to_table().to_pylist() == [{"age": 1.0, "price": 2.0}]
    for parts, words in (
        ((concat_rows([user, user]), items), "user 2 rows one"),
        ((user, items.slice(0, 0)), "no items"),
        ((user, items.append_column("age", [[1.0, 2.0]])), "'age' user items"),
    ):
        with pytest.raises(ServingError, match=names(words)):
            UserItems(*parts)
