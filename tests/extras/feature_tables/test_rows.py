"""Rows that leave out what a feature table has read as rows that have it, from JSON and Arrow; tables that do not fit are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.config.serving import LimitsConfig
from pipeline.extras.feature_tables.export import read_feature_tables
from pipeline.extras.feature_tables.tables import FeatureTable, Tables, hashes_of
from pipeline.extras.open_inference.tensors import read_tensors
from pipeline.runtime.errors import ServingError
from pipeline.serving.http.batching import ServerMetrics
from pipeline.serving.http.openapi import openapi_page
from pipeline.serving.http.request_rows import ARROW_TYPE, JSON_TYPE, BadRequest, RequestReader
from pipeline.serving.scoring.scorer import AnyRows, ColumnLists, JoinedRows, UserItems, as_table, schema_of
from tests.serving.stand_in import StandIn
from tests.support.messages import names

COLUMNS = ColumnsConfig(label="", dense=["age", "price"], sparse=["user", "city", "brand"], multi_hot=["tags"])
TYPES = schema_of(COLUMNS)
USERS = {
    "u1": {"age": 30.0, "city": "Rom", "tags": ["x", "y"]}, "u2": {"age": None, "city": None, "tags": []},
    "7": {"age": 1.5, "city": "7", "tags": None},
}  # fmt: skip
ITEMS = {"i1": {"price": 2.0, "brand": "a"}, "i2": {"price": None, "brand": "b"}}  # the model does not read `item`


def write(path: Path, key: str, rows: dict[str, dict[str, Any]], **changes: Any) -> str:
    table = pa.Table.from_pylist([{key: each, **row} for each, row in rows.items()])
    for name, column in changes.items():
        table = table.append_column(name, column) if column is not None else table.drop_columns([name])
    pq.write_table(table, path)
    return str(path)


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    files = {
        "user": write(tmp_path / "users.parquet", "user", USERS),
        "item": write(tmp_path / "items.parquet", "item", ITEMS),
    }
    found = []
    for key, table in read_feature_tables(files, TYPES):
        (batch,) = table.to_batches()
        types = pa.schema([TYPES.field(name) for name in batch.schema.names[2:]])
        found.append(
            FeatureTable(key, batch.column(0).to_numpy(), batch.column(1), batch.select(types.names), types, 1)
        )
    return Tables(found, COLUMNS)


def read(tables: Tables | None, body: object) -> AnyRows:
    return RequestReader(COLUMNS, LimitsConfig(), tables=tables).read(json.dumps(body).encode(), JSON_TYPE)


def read_arrow(tables: Tables | None, table: pa.Table) -> AnyRows:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return RequestReader(COLUMNS, LimitsConfig(), tables=tables).read(sink.getvalue().to_pybytes(), ARROW_TYPE)


def values(rows: AnyRows) -> list[dict[str, object]]:
    table = as_table(rows)
    assert sorted(table.column_names) == sorted(TYPES.names)
    return table.select(TYPES.names).to_pylist()


def whole(row: dict[str, Any]) -> dict[str, Any]:
    """The row with every column, without the item's id."""
    row = {**USERS.get(str(row.get("user")), {}), **ITEMS.get(str(row.get("item")), {}), **row}
    return {name: value for name, value in row.items() if name != "item"}


ROWS: list[dict[str, Any]] = [
    {"user": "u1", "item": "i2"}, {"user": "u2", "item": "i1", "age": 5.0}, {"user": 7}, {"item": "i1", "city": None},
    {"user": "nobody", "item": "nothing"}, {"user": "u1", "tags": None, "item": "i1", "brand": "own"}, {},
]  # fmt: skip


def test_rows_of_ids_are_filled_cell_by_cell_and_what_is_sent_wins(tables: Tables) -> None:
    asked = read(tables, {"rows": ROWS})
    assert isinstance(asked, ColumnLists) and asked.schema == TYPES
    assert values(asked) == values(read(None, {"rows": list(map(whole, ROWS))}))
    assert values(read(tables, {"rows": ROWS[:1]})) == values(asked)[:1]
    assert values(read(tables, {"rows": []})) == []


@pytest.mark.parametrize(
    "user", [{"user": "u1"}, {"user": "u1", "age": 3.0, "city": None}, {"user": "nobody"}, {}, {"brand": "c"}]
)
def test_a_user_with_items_is_filled_as_its_full_rows(tables: Tables, user: dict[str, Any]) -> None:
    for items in (
        [{"item": "i1"}, {"item": "i2"}], [{"item": "i1", "price": 9.0}, {"item": "i2"}], [{"price": 1.0}, {}],
        [{"tags": ["z"]}, {"item": "i2"}], [{"tags": None}, {}],
    ):  # fmt: skip
        asked = read(tables, {"user": user, "items": items})
        assert isinstance(asked, UserItems)
        full = [whole({**each, **user}) for each in items]
        assert values(asked) == values(read(None, {"rows": full})), items
    asked = read(tables, {"user": {"user": "u1"}, "items": [{"item": "i1"}, {"item": "i2"}]})
    assert isinstance(asked, UserItems) and set(asked.items.schema.names) == {
        "price",
        "brand",
    }  # the user is encoded once


def test_arrow_rows_tensors_and_tables_of_python_are_filled_by_column(tables: Tables) -> None:
    ids = pa.table({"user": ["u1", "nobody", None], "item": ["i2", "i1", "i1"]})
    wanted = values(read(None, {"rows": [whole(row) for row in ids.to_pylist()]}))
    assert values(read_arrow(tables, ids)) == wanted
    assert values(tables.fill(ids).select(TYPES.names)) == wanted
    numbers = pa.table({"user": pa.array([7]).dictionary_encode(), "age": [None], "item": ["i1"]})
    assert values(tables.fill(numbers).select(TYPES.names))[0] == {
        **whole({"user": "7", "item": "i1"}),
        "age": None,
        "user": 7,
    }
    asked = [
        {"user": {"user": "u1"}, "items": [{"item": "i1"}, {"item": "i2"}]},
        {"user": {"user": "7"}, "items": [{"item": "i1"}]},
    ]
    found = read_arrow(tables, pa.Table.from_pylist(asked))
    full = [whole({**each["user"], **item}) for each in asked for item in each["items"]]
    assert isinstance(found, JoinedRows) and values(found) == values(read(None, {"rows": full}))
    with pytest.raises(BadRequest, match=names("2 of 6 'price' 'brand'")):
        read_arrow(tables, ids.select(["user"]))
    body = {
        "inputs": [
            {"name": "user", "shape": [1], "datatype": "BYTES", "data": ["u1"]},
            {"name": "item", "shape": [2], "datatype": "BYTES", "data": ["i1", "i2"]},
        ]
    }
    _, rows = read_tensors(json.dumps(body).encode(), RequestReader(COLUMNS, LimitsConfig(), tables=tables))
    assert values(rows) == values(read(None, {"rows": full[:2]}))


def test_ids_are_counted_and_pages_name_what_may_be_left_out(tables: Tables) -> None:
    metrics = ServerMetrics()
    reader = RequestReader(COLUMNS, LimitsConfig(), tables=tables)
    reader.count_ids = metrics.count_ids
    reader.read(json.dumps({"rows": ROWS}).encode(), JSON_TYPE)
    reader.read(json.dumps({"user": {"user": "u1"}, "items": [{"item": "i1"}, {"item": "no"}]}).encode(), JSON_TYPE)
    text = {each.name: {s.labels["column"]: s.value for s in each.samples if s.name.endswith("_total")}
            for each in metrics.registry.collect() if "feature_table" in each.name}  # fmt: skip
    assert text["pipeline_serving_feature_table_ids"] == {"user": 8, "item": 9}
    assert text["pipeline_serving_feature_table_unknown_ids"] == {"user": 3, "item": 4}
    scorer = StandIn("1")
    scorer.feature_tables, scorer.columns = tables, COLUMNS  # type: ignore[attr-defined]
    row = openapi_page(scorer, LimitsConfig())["paths"]["/score"]["post"]["requestBody"]["content"][JSON_TYPE]
    properties = row["schema"]["anyOf"][0]["properties"]["rows"]["items"]["properties"]
    assert {name for name, about in properties.items() if "feature table" in about.get("description", "")} == {
        "age", "price", "city", "brand", "tags",
    } and "item" in properties  # fmt: skip


def test_ids_of_one_hash_are_told_apart() -> None:
    hashes, ages = np.repeat(hashes_of(["a"]), 3), pa.record_batch({"age": [1.0, 2.0, 3.0]})
    table = FeatureTable("user", hashes, pa.array(["b", "a", "c"]), ages, pa.schema([TYPES.field("age")]), 3)
    assert table.rows_of(["a", "d", None]).tolist() == [1, -1, -1]


@pytest.mark.parametrize(
    ("key", "changes", "words"),
    [
        ("users", {}, "feature_tables.users 'users' 'user'"),
        ("user", {"color": pa.array(["a", "b", "c"])}, "1 'color' not read"),
        ("user", {"price": pa.array(["a", "b", "c"])}, "'price' string numbers"),
        ("user", {"brand": pa.array([["a"], ["b"], []])}, "'brand' list"),
        ("user", {"age": None, "city": None, "tags": None}, "no other column"),
        ("user", {"item": pa.array(["a", "b", "c"])}, "'item' not read"),
    ],
)
def test_a_table_that_does_not_fit_is_named(tmp_path: Path, key: str, changes: dict[str, Any], words: str) -> None:
    path = write(tmp_path / "users.parquet", "user", USERS, **changes)
    with pytest.raises(ServingError, match=names(words)):
        list(read_feature_tables({key: path}, TYPES))


def test_ids_and_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = tmp_path / "users.parquet"
    for ids, words in ((["a", "b", "a", "b"], "2 of 2 'a' 2"), (["a", None, "", "b"], "2 of 4 no id"), ([], "no rows")):
        pq.write_table(
            pa.table({"user": pa.array(ids, pa.string()), "age": pa.array([1.0] * len(ids), pa.float64())}), path
        )
        with pytest.raises(ServingError, match=names(words)):
            list(read_feature_tables({"user": str(path)}, TYPES))
    folder = tmp_path / "spark"
    folder.mkdir()
    write(folder / "a.parquet", "user", {"u1": {"age": 1.0}})
    write(folder / "b.parquet", "user", {"u2": {"city": "x"}})
    with pytest.raises(ServingError, match=names("b.parquet a.parquet columns")):
        list(read_feature_tables({"user": str(folder)}, TYPES))
    (folder / "b.parquet").write_text("user,age\n")
    with pytest.raises(ServingError, match=names("b.parquet Parquet")):
        list(read_feature_tables({"user": str(folder)}, TYPES))
    with pytest.raises(ServingError, match=names("feature_tables.user no file")):
        list(read_feature_tables({"user": str(tmp_path / "none.parquet")}, TYPES))
    two = {"user": write(path, "user", USERS), "brand": write(tmp_path / "b.parquet", "brand", {"a": {"age": 1.0}})}
    with pytest.raises(ServingError, match=names("'age' feature_tables.user")):
        list(read_feature_tables(two, TYPES))
