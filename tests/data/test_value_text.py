"""One text for a value of a category, whatever type a file or a request gives it."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig, SplitConfig
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.serving import LimitsConfig
from pipeline.data.dataset import Dataset
from pipeline.data.prepare.run import prepare
from pipeline.data.raw.value_types import to_text, value_to_text
from pipeline.runtime.errors import DataError
from pipeline.serving.http.request_rows import ARROW_TYPE, JSON_TYPE, RequestReader
from pipeline.serving.scoring.scorer import as_table
from tests.support.messages import names

VALUES = [3.0, -0.0, 12345678901.0, 9007199254740991.0, 2.5, 0.1, 1e20, None, True, "3.0", 7]
SPELLED = ["3", "0", "12345678901", "9007199254740991", "2.5", "0.1", "1e+20", None, "true", "3.0", "7"]


def _prepare(tmp_path: Path, source: Path, columns: dict[str, Any], **settings: Any) -> Dataset:
    split = SplitConfig(validation_fraction=0.0, test_fraction=0.0)
    data = DataConfig(
        name="rows", path=str(tmp_path / "data"), columns=ColumnsConfig(**columns), split=split, **settings
    )
    return prepare(PrepareJob(data=data, source=str(source))).dataset


def _vocabulary(tmp_path: Path, name: str) -> dict[str, int]:
    rows = pq.read_table(tmp_path / "data" / "vocabulary" / f"{name}.parquet").to_pylist()
    return {row["value"]: row["count"] for row in rows}


def test_whole_numbers_have_neither_point_nor_exponent() -> None:
    fractions = [value for value in VALUES if isinstance(value, float)]
    expected = SPELLED[: len(fractions)]
    assert to_text(pa.array([*fractions, None])).to_pylist() == [*expected, None]
    assert to_text(pa.array([2.5, 0.1, 1e20])).to_pylist() == ["2.5", "0.1", "1e+20"]
    assert to_text(pa.array([16777216.0, 1e10], pa.float32())).to_pylist() == ["16777216", "10000000000"]
    assert to_text(pa.array([True, False])).to_pylist() == ["true", "false"]
    assert [value_to_text(value) for value in VALUES] == SPELLED
    for value in ([1], {"a": 1}):
        with pytest.raises(ValueError, match="one value"):
            value_to_text(value)


def test_a_column_of_whole_numbers_is_one_vocabulary_in_files_with_and_without_missing_values(tmp_path: Path) -> None:
    """As pandas writes it: whole numbers in one file, fractions in another with a missing value, nothing in a third."""
    users = [12345678901, 12345678902, 3]
    source = tmp_path / "rows"
    source.mkdir()
    for name, column in {
        "1": pa.array([None] * 3),
        "2": pa.array(users),
        "3": pa.array([float(users[0]), None, 3.0]),
    }.items():
        pq.write_table(pa.table({"y": [0, 1, 0], "user": column}), source / f"{name}.parquet")
    _prepare(tmp_path, source, {"label": "y", "sparse": ["user"]}, format="parquet")
    assert _vocabulary(tmp_path, "user") == {"12345678901": 2, "12345678902": 1, "3": 2}
    pq.write_table(pa.table({"y": [0], "user": ["3.0"]}), source / "4.parquet")
    with pytest.raises(DataError, match=names("4.parquet 'user' text 3.parquet fractions")):
        _prepare(tmp_path / "again", source, {"label": "y", "sparse": ["user"]}, format="parquet")


def test_json_lines_are_spelled_as_parquet_is_and_text_of_lists_is_split(tmp_path: Path) -> None:
    rows = [
        {"y": 1, "c": 1, "m": ["a", None, 1.0]},
        {"y": 0, "c": 1.0, "m": "a|b"},
        {"y": 1, "c": True, "m": ""},
        {"y": 0, "c": "true", "m": None},
        {"y": 1, "c": [1], "m": []},
        {"y": 0, "c": {"a": 1}, "m": []},
        {"y": 0, "c": 5, "m": {"a": 1}},
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"label": "y", "sparse": ["c"], "multi_hot": ["m"]}
    dataset = _prepare(tmp_path, source, columns, format="jsonl", max_quarantined_fraction=0.5)
    assert _vocabulary(tmp_path, "c") == {"1": 2, "true": 2}
    assert _vocabulary(tmp_path, "m") == {"a": 2, "b": 1, "1": 1}
    assert dataset.quarantined_rows == 3
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "data" / "quarantine.jsonl").read_text().splitlines()]
    assert reasons[0] == "c has a list instead of one value" and "m is " in reasons[2]


@pytest.mark.parametrize("num_rows", [1, 50])
def test_requests_are_spelled_as_prepare_spells_files(num_rows: int) -> None:
    columns = ColumnsConfig(label="y", sparse=["c"], multi_hot=["m"])
    reader = RequestReader(columns, LimitsConfig())
    for value, text in zip(VALUES, SPELLED, strict=True):
        body = {"rows": [{"c": value, "m": [value]}] * num_rows}
        read = as_table(reader.read(json.dumps(body).encode(), JSON_TYPE))
        assert read.to_pylist() == [{"c": text, "m": [text or ""]}] * num_rows
        sent = pa.table({"c": pa.array([value] * num_rows), "m": pa.array([[value, None], None] * num_rows)[:num_rows]})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, sent.schema) as writer:
            writer.write_table(sent)
        read = as_table(reader.read(bytes(sink.getvalue()), ARROW_TYPE))
        assert to_text(read["c"]).to_pylist() == [text] * num_rows
        assert read["m"].to_pylist() == ([[text, None], None] * num_rows)[:num_rows]


def test_large_whole_numbers_are_dense_features_in_requests_too() -> None:
    reader = RequestReader(ColumnsConfig(label="y", dense=["x"], sparse=["c"]), LimitsConfig())
    sent = pa.table({"x": [2**62 + 1], "c": ["a"]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, sent.schema) as writer:
        writer.write_table(sent)
    assert as_table(reader.read(bytes(sink.getvalue()), ARROW_TYPE))["x"].to_pylist() == [2.0**62]


def test_dates_and_decimals_are_read_in_requests_as_in_files(tmp_path: Path) -> None:
    """A request that is sent as the Parquet rows were written has the values that the vocabularies hold."""
    rows = pa.table(
        {
            "y": [1, 0],
            "x": pa.array([Decimal("1.50"), None]),
            "b": [True, False],
            "day": [date(2026, 11, 1), date(2026, 11, 2)],
            "price": pa.array([Decimal("9.90"), Decimal("-1.00")]),
            "days": pa.array([[date(2026, 11, 3)], []]),
        }
    )
    pq.write_table(rows, tmp_path / "rows.parquet")
    columns = {"label": "y", "dense": ["x", "b"], "sparse": ["day", "price"], "multi_hot": ["days"]}
    _prepare(tmp_path, tmp_path / "rows.parquet", columns, format="parquet")
    sent, sink = rows.drop_columns("y"), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, sent.schema) as writer:
        writer.write_table(sent)
    reader = RequestReader(ColumnsConfig(**columns), LimitsConfig())
    read = as_table(reader.read(bytes(sink.getvalue()), ARROW_TYPE)).to_pydict()
    assert (read["x"], read["b"]) == ([1.5, None], [1.0, 0.0])
    for name in ("day", "price"):
        assert set(read[name]) == _vocabulary(tmp_path, name).keys()
    assert set(read["price"]) == {"9.9", "-1"}, "as the numbers 9.9 and -1 are written"
    assert {value for values in read["days"] for value in values} == _vocabulary(tmp_path, "days").keys()
