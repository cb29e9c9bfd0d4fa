"""Every type, in every place and format, for prepare, predict and the server: a value with one id, or a clear refusal."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipeline.checkpoint.vocabularies import read_values
from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig
from pipeline.config.serving import LimitsConfig
from pipeline.data.dataset import load_dataset
from pipeline.data.raw.blocks import Block
from pipeline.data.raw.layout import Layout
from pipeline.data.raw.rows import parse_block
from pipeline.data.raw.value_types import spelled
from pipeline.data.read.value_index import index_values
from pipeline.runtime.errors import DataError
from pipeline.serving.artifact.raw_schema import schema_of
from pipeline.serving.http.request_rows import ARROW_TYPE, JSON_TYPE, BadRequest, RequestReader
from pipeline.serving.scoring.raw_rows import RowEncoder
from tests.data.sources import TRAIN_ALONE, prepare_rows
from tests.support.messages import names

UUID = uuid.UUID("12345678-1234-5678-1234-56789abcdef0")
NOON = datetime(2026, 11, 1, 12, 0, 0, 500_000)
INDIA = timezone(timedelta(hours=5, minutes=30))
# name -> spelling, its value in JSON, and Arrow arrays of that one value
TYPES: dict[str, tuple[str, Any, list[pa.Array]]] = {
    "text": ("é a", "é a", [
        pa.array(["é a"]), pa.array(["é a"], pa.large_string()), pa.array(["é a"], pa.string_view()),
        pa.array(["é a".encode()]), pa.array(["é a".encode()], pa.binary_view()), pa.array(["é a"]).dictionary_encode(),
        pa.array(["é a".encode()]).dictionary_encode(), pc.run_end_encode(pa.array(["é a"])),
    ]),
    "whole": ("12345678901", 12345678901, [
        pa.array([12345678901]), pa.array([12345678901], pa.uint64()), pa.array([12345678901.0]),
        pa.array([Decimal("12345678901")]), pa.array([Decimal("12345678901.00")]),
    ]),
    "large": (str(2**64 - 1), 2**64 - 1, [pa.array([2**64 - 1], pa.uint64()), pa.array([Decimal(2**64 - 1)])]),
    "fraction": ("-2.5", -2.5, [
        pa.array([-2.5]), pa.array([-2.5], pa.float32()), pa.array([-2.5], pa.float16()), pa.array([Decimal("-2.50")]),
    ]),
    "truth": ("true", True, [pa.array([True])]),
    "date": ("2026-11-01", "2026-11-01", [pa.array([date(2026, 11, 1)]), pa.array([date(2026, 11, 1)], pa.date64())]),
    "clock": ("12:00:00.5", "12:00:00.5", [pa.array([time(12, 0, 0, 500_000)])]),
    "instant": ("2026-11-01 12:00:00.5", "2026-11-01 12:00:00.5", [
        pa.array([NOON], pa.timestamp(unit)) for unit in ("ms", "us", "ns")
    ]),
    "zoned": ("2026-11-01 12:00:00.5Z", "2026-11-01 12:00:00.5Z", [
        pa.array([NOON.replace(tzinfo=UTC)], pa.timestamp("us", "UTC")),
        pa.array([NOON.replace(tzinfo=UTC).astimezone(INDIA)], pa.timestamp("ns", "Asia/Kolkata")),
    ]),
    "uuid": (str(UUID), str(UUID), [pa.array([UUID.bytes], pa.uuid())]),
}  # fmt: skip
COLUMNS: dict[str, Any] = {"label": "y", "sparse": list(TYPES), "multi_hot": [f"{name}s" for name in TYPES]}


def _lists(array: pa.Array, kind: str) -> pa.Array:
    """Two rows: a list of the value, and a missing list."""
    twice = pa.concat_arrays([array.dictionary_decode() if pa.types.is_dictionary(array.type) else array] * 2)
    if kind == "fixed":
        return pc.if_else(pa.array([True, False]), pa.FixedSizeListArray.from_arrays(twice, 1), None)
    return pa.ListArray.from_arrays(pa.array([0, 1, 1]), array, mask=pa.array([False, True]))


def _table(number: int) -> pa.Table:
    """Of each type its array `number`: a row with the value, and one without."""
    columns: dict[str, pa.Array] = {"y": pa.array([1, 0])}
    for name, (_, _, arrays) in TYPES.items():
        array = arrays[number % len(arrays)]
        columns[name] = _with_null(array)
        columns[f"{name}s"] = _lists(arrays[0] if _is_run(array) else array, "list")
    return pa.table(columns)


def _is_run(array: pa.Array) -> bool:
    return pa.types.is_run_end_encoded(array.type)


def _with_null(array: pa.Array) -> pa.Array:
    if _is_run(array):
        return pc.run_end_encode(pa.array([array[0].as_py(), None]))
    return pa.concat_arrays([array, pa.nulls(1, array.type)])


def _write(folder: Path, kind: str) -> Path:
    """A source of one value and one missing value a type; Parquet has it a second time, by its first array."""
    rows = [
        {"y": 1} | {name: value for name, (_, value, _) in TYPES.items()} | {f"{name}s": [value] for name, (_, value, _) in TYPES.items()},
        {"y": 0} | dict.fromkeys([*TYPES, *(f"{name}s" for name in TYPES)]),
    ]  # fmt: skip
    folder.mkdir()
    if kind == "jsonl":
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        texts = [text for text, _, _ in TYPES.values()]
        lines = [",".join(rows[0]), ",".join(["1", *texts, *texts]), "0" + "," * 2 * len(TYPES)]
        (folder / "rows.csv").write_text("\n".join([*lines, ""]))
    else:
        for number in range(2):
            pq.write_table(_table(0), folder / f"{number}.parquet")
    return folder


def _read(table: pa.Table, columns: dict[str, Any]) -> dict[str, Any]:
    """What predict and the server's encoder read in a table."""
    layout = Layout(ColumnsConfig(**columns), "parquet")
    parsed = parse_block(layout, tuple(table.column_names), Block(1, 0, table.num_rows, table=table))
    assert not parsed.quarantined
    return {
        name: spelled(parsed.table[name], "text").to_pylist() for name in [*columns["sparse"], *columns["multi_hot"]]
    }


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_value_has_one_id_in_every_format_place_and_verb(tmp_path: Path, kind: str) -> None:
    source = _write(tmp_path / "rows", kind)
    prepare_rows(tmp_path, source, COLUMNS, format=kind, split=TRAIN_ALONE)
    dataset = load_dataset(str(tmp_path / "data"))
    names_of = [feature.name for feature in dataset.sparse_features]
    vocabularies = {
        feature.name: index_values(read_values(str(tmp_path / "data" / str(feature.vocabulary))))
        for feature in dataset.sparse_features
    }
    data = DataConfig(name="rows", path=str(tmp_path / "data"), format=kind, columns=ColumnsConfig(**COLUMNS))
    encoder = RowEncoder(schema_of(dataset, names_of, data.columns, {}), vocabularies)
    for name, (text, _, _) in TYPES.items():
        for column in (name, f"{name}s"):
            found = pq.read_table(tmp_path / "data" / "vocabulary" / f"{column}.parquet")["value"].to_pylist()
            assert found == [text], (kind, column)
    reader = RequestReader(ColumnsConfig(**COLUMNS | {"label": ""}), LimitsConfig())
    row = {name: value for name, (_, value, _) in TYPES.items()}
    row |= {f"{name}s": [value] for name, value in row.items()}
    body = json.dumps({"rows": [row, {}]}).encode()
    requests = [reader.read(body, JSON_TYPE)]
    for number in range(8):
        table = _table(number).drop_columns("y")
        expanding = [field.name for field in table.schema if "view" in str(field.type) or "run_end" in str(field.type)]
        if expanding:
            with pytest.raises(BadRequest, match=names(f"{expanding[0]!r} type")):
                reader.read(_stream(table), ARROW_TYPE)
        else:
            requests.append(reader.read(_stream(table), ARROW_TYPE))
        encoded = encoder.encode(table)  # as predict reads a Parquet file
        assert encoded.values.tolist() == [1, 0] * len(TYPES) + [1] * len(TYPES), number
    for request in requests:
        assert encoder.encode(request).values.tolist() == [1, 0] * len(TYPES) + [1] * len(TYPES)


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def test_fixed_lists_and_views_of_lists_are_lists() -> None:
    values = pa.array([[1.0, 2.5], None, [3.0, 4.0]], pa.list_(pa.float32(), 2))
    views = pa.array([[1.0, 2.5], None, [3.0, 4.0]], pa.list_view(pa.float32()))
    for array in (values, views, values.slice(0), pa.array(values.to_pylist(), pa.large_list(pa.float64()))):
        table = pa.table({"c": ["a"] * 3, "m": array})
        read = _read(table, {"label": "", "sparse": ["c"], "multi_hot": ["m"]})
        assert read["m"] == [["1", "2.5"], None, ["3", "4"]]


REFUSED: dict[str, pa.Array] = {
    "fixed_size_binary": pa.array([b"0123456789abcdef"], pa.binary(16)),
    "duration": pa.array([timedelta(1)]),
    "struct": pa.array([{"a": 1}]),
    "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
    "list list": pa.array([[[1]]]),
    "month": pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("role", ["sparse", "multi_hot", "dense", "timestamp"])
def test_a_type_that_is_not_read_is_refused_by_name_everywhere(tmp_path: Path, kind: str, role: str) -> None:
    array = REFUSED[kind]
    columns: dict[str, Any] = {"label": "y", "sparse": ["c"]}
    columns |= {"timestamp": "m"} if role == "timestamp" else {role: [*columns.get(role, []), "m"]}
    table = pa.table({"y": [1], "c": ["a"], "m": array})
    try:
        pq.write_table(table, tmp_path / "rows.parquet")
    except pa.ArrowNotImplementedError:
        pass  # Parquet has no such type
    else:
        settings: dict[str, Any] = {"split": TRAIN_ALONE}
        if role == "timestamp":
            from pipeline.config.data import SplitConfig

            settings["split"] = SplitConfig(kind="time")
        with pytest.raises(DataError, match=names(f"rows.parquet 'm' {kind}")):
            prepare_rows(tmp_path, tmp_path / "rows.parquet", columns, format="parquet", **settings)
    if role != "timestamp":
        with pytest.raises(BadRequest, match=names(f"'m' {kind} give")):
            reader = RequestReader(ColumnsConfig(**columns), LimitsConfig())
            reader.read(_stream(table.drop_columns("y")), ARROW_TYPE)


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        (["2023-11-14 22:13:20 UTC", "2023-11-14 22:13:21 UTC"], 0),
        (["2023-11-14 22:13:20.123456789", "2023-11-14T22:13:21.5Z"], 0.123456),
        (["1700000000.5", "1700000060.25"], 0.5),
        (["2023-11-14 22:13:20 +0000 UTC", "2023-11-15 03:43:21+05:30"], 0),
    ],
)
def test_times_are_read_as_other_programs_write_them(times: list[str], seconds: float) -> None:
    from pipeline.data.raw.parse_cells import parse_times

    found, bad = parse_times(pa.chunked_array([pa.array([*times, None])]))
    assert bad in ([], [2]) and found[0].as_py() == round((1_700_000_000 + seconds) * 1e6) and found[2].as_py() is None
    assert found[1].as_py() > found[0].as_py()
