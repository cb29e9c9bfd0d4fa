"""Columns that are made of others: what each transform gives, the same in shards and for raw rows, and what is refused."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.vocabularies import read_values
from pipeline.cli.command_line import load_config
from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig, SplitConfig
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.registry import register
from pipeline.config.transforms import TransformConfig, make_transform
from pipeline.data.dataset import load_dataset
from pipeline.data.prepare.run import prepare
from pipeline.data.raw.derived import derive
from pipeline.data.read.value_index import index_values
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.serving.artifact.raw_schema import schema_of, schema_problem
from pipeline.serving.scoring.raw_rows import RowEncoder
from pipeline.serving.scoring.scorer import ColumnLists
from pipeline.serving.scoring.scorer import schema_of as types_of
from tests.data.criteo_rows import read_split
from tests.support.examples import examples
from tests.support.messages import names

COLUMNS = ["click", "price", "city", "device", "words", "stats", "when", "seconds"]
TRANSFORMS: dict[str, dict[str, Any]] = {
    "price_clipped": {"kind": "clip", "column": "price", "low": 0.0, "high": 50.0},
    "price_log": {"kind": "log", "column": "price_clipped"},
    "price_std": {"kind": "standardise", "column": "price"},
    "price_bucket": {"kind": "bucketise", "column": "price", "edges": [1.0, 10.0, 30.0]},
    "price_quantile": {"kind": "bucketise", "column": "price_log", "quantiles": 4},
    "place": {"kind": "lower", "column": "city"},
    "place_device": {"kind": "cross", "columns": ["place", "device"]},
    "word": {"kind": "split", "column": "words"},
    "clicks_here": {"kind": "lookup", "map": "stats", "column": "city", "number": True},
    "seen_here": {"kind": "lookup", "map": "stats", "column": "device"},
    "hour": {"kind": "hour", "column": "when", "timezone": "Europe/Rome"},
    "weekday": {"kind": "weekday", "column": "seconds"},
}
ROW = {
    "click": 1,
    "price": 20.0,
    "city": " Rome ",
    "device": "tv",
    "words": "a b a",
    "stats": "tv:3, Rome:7",
    "when": "2024-07-01T23:30:00",
    "seconds": "1719876600",
}


def _config(path: Path, **more: Any) -> DataConfig:
    columns = ColumnsConfig(label="click", dense=["price"], sparse=["device"], timestamp="seconds")
    settings = {"split": SplitConfig("time", 0.2, 0.0), "transforms": TRANSFORMS, **more}
    return DataConfig(name="made", path=str(path / "ds"), format="csv", columns=columns, **settings)


def _prepare(folder: Path, rows: list[dict[str, Any]], **more: Any) -> None:
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    prepare(PrepareJob(data=_config(folder, **more), source=str(folder / "rows.csv")))


def _encoder(folder: Path) -> RowEncoder:
    dataset = load_dataset(f"{folder}/ds")
    schema = schema_of(dataset, dataset.sparse_feature_names, ColumnsConfig(), {})
    assert schema_problem(schema, {}) == ""
    vocabularies = {
        feature.name: index_values(read_values(f"{folder}/ds/{feature.vocabulary}"))
        for feature in dataset.sparse_features
    }
    return RowEncoder(schema, vocabularies)


def _raw(encoder: RowEncoder, rows: list[dict[str, Any]], as_lists: bool) -> pa.Table | ColumnLists:
    schema = types_of(encoder.layout.columns)
    columns = [[None if row[name] == "" else row[name] for row in rows] for name in schema.names]
    lists = ColumnLists(schema, columns, len(rows))
    return lists if as_lists else lists.to_table()


def _assert_served_rows_are_prepared_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    dataset, encoder = load_dataset(f"{folder}/ds"), _encoder(folder)
    shards = pa.concat_tables([read_split(folder / "ds", dataset, name) for name in ("train", "validation")])
    for way in ("lists", "table", "many rows"):  # the last without the shorter way of a few rows
        raw = _raw(encoder, rows, way == "lists")
        encoded = encoder.encode(raw) if way != "many rows" else encoder.encode_as_prepare(raw)
        assert encoded.kept.tolist() == list(range(len(rows)))
        dense = np.stack([shards[name].to_numpy() for name in dataset.dense_features], axis=1)
        np.testing.assert_array_equal(encoded.dense.numpy(), dense)
        ends = encoded.offsets.numpy()[:: len(rows)]
        for number, name in enumerate(dataset.sparse_feature_names):
            column = shards[name].combine_chunks()
            ids = column.flatten() if pa.types.is_list(column.type) else column
            assert encoded.values.numpy()[ends[number] : ends[number + 1]].tolist() == ids.to_pylist(), name


def test_what_each_transform_makes_of_a_row(tmp_path: Path) -> None:
    table = pa.table({name: [ROW[name], None] for name in COLUMNS[1:]})
    made = derive(table, _made()).select(list(TRANSFORMS)).to_pylist()
    assert made[0] == {
        "price_clipped": 20.0,
        "price_log": float(np.log1p(20.0)),
        "price_std": 20.0,
        "price_bucket": 20.0,
        "price_quantile": float(np.log1p(20.0)),
        "place": "rome",
        "place_device": "rome\x1ftv",
        "word": ["a", "b", "a"],
        "clicks_here": None,
        "seen_here": "3",
        "hour": "1",
        "weekday": "0",
    }
    assert set(map(str, made[1].values())) == {"None"}


def _made() -> dict[str, TransformConfig]:
    return {column: make_transform(column, values) for column, values in TRANSFORMS.items()}


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"kind": "log", "column": "x", "signed": True}, [-float(np.log1p(2.0)), None, float(np.log1p(3.0))]),
        ({"kind": "log", "column": "x"}, [0.0, None, float(np.log1p(3.0))]),
        ({"kind": "clip", "column": "x", "low": -1.0}, [-1.0, None, 3.0]),
        ({"kind": "lower", "column": "t", "strip": False}, [" ab ", None, "{}"]),
        ({"kind": "split", "column": "m", "separator": ","}, [["k:1", " j: 2 "], None, ['{"k": 1.5', ' "j": [1]}']]),
        ({"kind": "lookup", "map": "m", "column": "k"}, ["1", None, "1.5"]),
        ({"kind": "lookup", "map": "m", "column": "k", "number": True}, [1.0, None, 1.5]),
        ({"kind": "lookup", "map": "m", "column": "j"}, ["2", None, None]),
        ({"kind": "hour", "column": "time"}, ["23", None, "2"]),
        ({"kind": "hour", "column": "time", "timezone": "Asia/Tokyo"}, ["8", None, "11"]),
        ({"kind": "weekday", "column": "time"}, ["0", None, "3"]),
        ({"kind": "hour", "column": "ms", "unit": "ms"}, ["0", None, "1"]),
        ({"kind": "hour", "column": "stamp"}, ["5", None, "6"]),
    ],
)
def test_values_by_hand(values: dict[str, Any], wanted: list[Any]) -> None:
    times = pa.array([5 * 3600, None, 6 * 3600 + 1], pa.timestamp("s"))
    table = pa.table(
        {
            "x": [-2.0, None, 3.0],
            "t": [" aB ", None, "{}"],
            "m": ["k:1, j: 2 ", None, '{"k": 1.5, "j": [1]}'],
            "k": ["k", "k", "k"],
            "j": ["j", "j", "j"],
            "time": ["2024-07-01T23:30:00", "noon", "2024-07-04 04:00:00+02:00"],
            "ms": ["1000", None, "3600000"],
            "stamp": times,
        }
    )
    assert derive(table, {"made": make_transform("made", values)})["made"].to_pylist() == wanted


TEXT = st.sampled_from(["", "Rome", "rome", " Ünï ", "x\ty", "a:1", "{", '{"Rome": 2}', "ROME "])
NUMBERS = st.one_of(st.just(""), st.floats(-1e6, 1e6, width=32), st.integers(-5, 60))
TIMES = st.sampled_from(
    ["", "2024-07-01T23:30:00", "2024-02-29", "1719876600", "no time", "2024-07-04T04:00:00+02:00", "9" * 18]
)
ROWS = st.fixed_dictionaries(
    {
        "click": st.integers(0, 1),
        "price": NUMBERS,
        "city": TEXT,
        "device": TEXT,
        "words": TEXT,
        "stats": st.sampled_from(["", "Rome:3,a:x", '{"Rome": 1e3, "a": null}', "{broken", "Rome:nan,:2", "rome:1e39"]),
        "when": TIMES,
        "seconds": st.integers(0, 2**31),
    }
)


@pytest.mark.long
@examples(25)
@given(st.lists(ROWS, min_size=5, max_size=40, unique_by=lambda row: row["seconds"]))
def test_raw_rows_are_served_as_they_were_prepared(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("made")
    rows = sorted(rows, key=lambda row: int(row["seconds"]))  # in the order of the splits
    _prepare(folder, rows)
    texts = [{**row, "seconds": str(row["seconds"])} for row in rows]
    _assert_served_rows_are_prepared_rows(folder, texts)


def test_what_is_learnt_is_of_the_training_rows_and_only_what_is_read_is_asked_for(tmp_path: Path) -> None:
    rows = [{**ROW, "price": float(number), "seconds": str(1_700_000_000 + number)} for number in range(100)]
    _prepare(tmp_path, rows)
    dataset, encoder = load_dataset(f"{tmp_path}/ds"), _encoder(tmp_path)
    about = dataset.dense_columns["price_std"]
    assert (about["mean"], about["std"]) == (pytest.approx(39.5), pytest.approx(np.arange(80).std()))
    assert dataset.sparse_feature("price_bucket").boundaries == [1.0, 10.0, 30.0]
    learnt = dataset.sparse_feature("price_quantile").boundaries or []
    assert np.expm1(learnt) == pytest.approx([20.0, 40.0], abs=1.0)  # all above 50 are one value, which ties
    assert dataset.dense_features == ["price", "price_clipped", "price_log", "price_std", "clicks_here"]
    assert set(encoder.schema.columns) == set(COLUMNS) - {"click"}
    alone = encoder.schema.of_features(["place_device"], dense=())
    assert alone.columns == {"city": "sparse", "device": "sparse"} and len(alone.transforms) == 2
    hour = schema_problem(alone.of_features(["place_device"]), {})
    assert hour == ""


def test_another_declaration_is_another_data_set(tmp_path: Path) -> None:
    rows = [{**ROW, "seconds": str(number)} for number in range(20)]
    _prepare(tmp_path, rows)
    first = load_dataset(f"{tmp_path}/ds")
    _prepare(tmp_path, rows)
    assert load_dataset(f"{tmp_path}/ds").fingerprint() == first.fingerprint()
    changed = {**TRANSFORMS, "price_clipped": {**TRANSFORMS["price_clipped"], "high": 40.0}}
    with pytest.raises(DataError, match=names("transforms")):
        _prepare(tmp_path, rows, transforms=changed)


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ({"x": {"kind": "bucketize", "column": "price"}}, "data.transforms.x.kind bucketise"),
        ({"x": {"kind": "clip", "colum": "price", "low": 0}}, "data.transforms.x.colum column"),
        ({"x": {"kind": "clip", "low": 0}}, "data.transforms.x.column"),
        ({"x": {"kind": "clip", "column": "price"}}, "data.transforms.x low high"),
        ({"x": {"kind": "clip", "column": "price", "low": "0"}}, "data.transforms.x.low '0' float"),
        ({"x": {"column": "price"}}, "data.transforms.x kind"),
        ({"x": {"kind": "bucketise", "column": "price"}}, "edges quantiles"),
        ({"x": {"kind": "bucketise", "column": "price", "edges": [2, 1]}}, "edges [2, 1]"),
        ({"x": {"kind": "hour", "column": "when", "timezone": "Europe/Rom"}}, "Europe/Rom"),
        ({"x": {"kind": "log", "column": "y"}, "y": {"kind": "log", "column": "price"}}, "data.transforms.x y"),
        ({"x": {"kind": "log", "column": "device"}}, "data.transforms.x device"),
        ({"x": {"kind": "lower", "column": "price"}}, "data.transforms.x price"),
        ({"x": {"kind": "log", "column": "click"}}, "data.transforms.x click"),
        ({"device": {"kind": "lower", "column": "city"}}, "data.transforms.device"),
        ({"x": {"kind": "cross", "columns": ["device"]}}, "cross device"),
        ({"x": {"kind": "lower", "column": "q"}, "y": {"kind": "log", "column": "q"}}, "data.transforms.y q"),
    ],
)
def test_what_cannot_be_made_is_said(tmp_path: Path, transforms: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        _config(tmp_path, transforms=transforms)


def test_a_column_that_the_source_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=names("'citty' city")):
        _prepare(tmp_path, [ROW] * 10, transforms={"x": {"kind": "lower", "column": "citty"}})


def test_transforms_are_declared_on_the_command_line() -> None:
    words = ["data=user_item", "source=x", "data.transforms.genre_lower={kind: lower, column: item_genre}"]
    job = load_config(PrepareJob, words)
    assert job.data.transforms == {"genre_lower": {"kind": "lower", "column": "item_genre"}}
    with pytest.raises(ConfigError, match=names("lower")):
        load_config(PrepareJob, [*words[:2], "data.transforms.x={kind: lowre, column: item_genre}"])


def test_an_artifact_with_a_transform_that_is_not_there_is_no_artifact(tmp_path: Path) -> None:
    _prepare(tmp_path, [{**ROW, "seconds": str(number)} for number in range(20)])
    schema = _encoder(tmp_path).schema
    schema.transforms[0]["kind"] = "clap"
    assert "clip" in schema_problem(schema, {})


def test_a_transform_of_ones_own_is_one_class() -> None:
    from dataclasses import dataclass

    @register("transform", "reversed_text")
    @dataclass(frozen=True)
    class Reversed(TransformConfig):
        column: str

        @property
        def inputs(self) -> dict[str, str]:
            return {self.column: "text"}

        def apply(self, columns: Any) -> pa.Array:
            import pyarrow.compute as pc

            return pc.utf8_reverse(columns[0])

    made = make_transform("x", {"kind": "reversed_text", "column": "city"})
    assert derive(pa.table({"city": ["abc"]}), {"x": made})["x"].to_pylist() == ["cba"]
