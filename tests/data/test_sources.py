"""Sources as people have them: words for missing values, lists as JSON, delimiters, no header, JSON lines, splits, transforms."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.labels import LabelConfig
from pipeline.config.splits import SplitConfig
from pipeline.data.dataset import Dataset, load_dataset
from pipeline.data.prepare import prepare as preparation
from pipeline.data.prepare.limit import most_rows_to_come
from pipeline.data.prepare.run import PrepareSummary, describe, prepare
from pipeline.data.prepare.time_units import count_units
from pipeline.data.raw import rows as raw_rows
from pipeline.data.raw.layout import Layout, check_columns
from pipeline.data.raw.source import Block, Source, TextReader, find_sources
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.serving.artifact.package import schema_of
from pipeline.serving.scoring.column_lists import ColumnLists
from pipeline.serving.scoring.raw_rows import RowEncoder
from pipeline.serving.scoring.scorer import schema_of as schema_of_columns
from tests.data.criteo_rows import read_split
from tests.support.messages import mentions, names

COLUMNS = {"label": "y", "dense": ["x"], "sparse": ["c"], "multi_hot": ["m"]}
TRAIN_ALONE = SplitConfig(validation_fraction=0.0, test_fraction=0.0)


def _prepare(
    tmp_path: Path, source: Path | str, columns: dict[str, Any] | None = None, **settings: Any
) -> PrepareSummary:
    settings = {"format": "csv", "split": TRAIN_ALONE, "max_quarantined_fraction": 0.0, **settings}
    data = DataConfig(
        name="rows", path=str(tmp_path / "data"), columns=ColumnsConfig(**(columns or COLUMNS)), **settings
    )
    return prepare(PrepareJob(data=data, source=str(source)))


def _write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join([*lines, ""]))
    return path


def _rows(tmp_path: Path, dataset: Dataset, split: str = "train") -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = read_split(tmp_path / "data", dataset, split).to_pydict()
    return found


@pytest.mark.parametrize(
    ("column", "kind", "words"),
    [("m", "list<element: int64>", "sparse"), ("c", "int64", "multi_hot"), ("m", "list<element: int64>", "timestamp")],
)
def test_a_column_of_the_wrong_shape_is_named_with_its_type_and_the_key_to_use(
    tmp_path: Path, column: str, kind: str, words: str
) -> None:
    source = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"y": [0, 1], "x": [0.5, 1.0], "c": [3, 4], "m": [[1, 2], []], "t": [1, 2]}), source)
    columns = {**COLUMNS, "sparse": [], "multi_hot": [], words: column if words == "timestamp" else [column]}
    split = SplitConfig(kind="time") if words == "timestamp" else TRAIN_ALONE
    with pytest.raises(DataError, match=names(f"{column!r} {kind} data.columns. {words}")):
        _prepare(tmp_path, source, columns, format="parquet", split=split)


def test_words_for_missing_values_are_missing_in_every_kind_of_column(tmp_path: Path) -> None:
    lines = ["y,x,c,m", "1,NULL,NULL,1|NULL|2", "0,2.5,\\N,NULL", "1,,a,", "0,1e1,b,2"]
    kept = {**COLUMNS, "null_values": ["NULL", "\\N"]}
    rows = _rows(
        tmp_path, _prepare(tmp_path, _write(tmp_path / "rows.csv", lines), kept, dense_transform="none").dataset
    )
    assert rows["x"] == [0.0, 2.5, 0.0, 10.0]
    assert rows["c"] == [0, 0, 1, 2]
    assert [len(ids) for ids in rows["m"]] == [3, 0, 0, 1] and rows["m"][0][1] == 0
    with pytest.raises(DataError, match=names("1 of 4 line 2 x 'NULL'")):
        _prepare(tmp_path / "other", tmp_path / "rows.csv")


def test_lists_in_json_text_are_lists_in_files_and_in_requests(tmp_path: Path) -> None:
    lines = ["y;x;c;m", '1;-1;"a";"[1, 2]"', '0;2;b;"[""x,y"", null]"', "1;3;a;[]", "0;4;b;", "0;5;b;[2"]
    columns = {**COLUMNS, "list_separator": "json"}
    summary = _prepare(
        tmp_path, _write(tmp_path / "rows.csv", lines), columns, delimiter=";", max_quarantined_fraction=0.2
    )
    rows = _rows(tmp_path, summary.dataset)
    assert [len(ids) for ids in rows["m"]] == [2, 2, 0, 0] and summary.dataset.quarantined_rows == 1
    assert rows["m"][1][1] == 0
    typed = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"y": [1, 0], "x": [1, 2], "c": ["a", "b"], "m": ["[1, 2]", "[1"]}), typed)
    again = _prepare(tmp_path / "typed", typed, columns, format="parquet", max_quarantined_fraction=0.5).dataset
    assert (again.accepted_rows, again.quarantined_rows) == (1, 1)


def test_prepare_remarks_on_columns_that_may_have_been_meant_otherwise(tmp_path: Path) -> None:
    lines = [f"{n % 2},{n - 10},{'NA' if n % 3 else 'a'},[{n}, 1]" for n in range(30)]
    lines = ["y;x;c;m;k", *(line.replace(",", ";", 3) + (";r" if n == 7 else ";s") for n, line in enumerate(lines))]
    many = [lines[0], *lines[1:] * 5]
    summary = _prepare(tmp_path, _write(tmp_path / "rows.csv", many), {**COLUMNS, "sparse": ["c", "k"]}, delimiter=";")
    text = describe(summary)
    assert mentions(text, "x (50 of 150) data.dense_transforms.<column>=signed_log1p")
    assert mentions(text, "brackets m list_separator=json 'NA' c data.columns.null_values=[NA]")
    assert "one value" not in text
    _write(tmp_path / "one.csv", ["y,c", *["0,s"] * 199, "1,r"])
    summary = _prepare(tmp_path / "one", tmp_path / "one.csv", {"label": "y", "sparse": ["c"]})
    assert mentions(describe(summary), "one value 99% c")


def test_dense_columns_have_transforms_of_their_own_alike_in_serving(tmp_path: Path) -> None:
    values = [-3.0, 0.0, 4.0, math.nan, 7.0]
    lines = [
        "y,a,b,c,d",
        *(",".join(["01"[n % 2], *["" if math.isnan(v) else str(v)] * 4]) for n, v in enumerate(values)),
    ]
    columns = {"label": "y", "dense": ["a", "b", "c", "d"]}
    transforms = {"b": "signed_log1p", "c": "standardize", "d": "none"}
    split = SplitConfig(validation_fraction=0.2, test_fraction=0.0)  # the last row is not learnt from
    dataset = _prepare(
        tmp_path, _write(tmp_path / "rows.csv", lines), columns, dense_transforms=transforms, split=split
    ).dataset
    mean, std = 1 / 3, math.sqrt((10 / 3) ** 2 / 3 + (1 / 3) ** 2 / 3 + (11 / 3) ** 2 / 3)
    assert dataset.dense_columns["c"] == pytest.approx({"kind": "standardize", "mean": mean, "std": std}, abs=1e-12)
    rows = _rows(tmp_path, dataset)
    expected = {
        "a": [0, 0, math.log(5), 0], "b": [-math.log(4), 0, math.log(5), 0], "d": [-3, 0, 4, 0],
        "c": [(value - mean) / std for value in values[:3]] + [0],
    }  # fmt: skip
    for name, column in expected.items():
        assert rows[name] == pytest.approx(column, rel=1e-6)
    assert load_dataset(str(tmp_path / "data")) == dataset
    encoder = RowEncoder(schema_of(dataset, [], ColumnsConfig(), {}), {})
    table = pa.table(dict.fromkeys("abcd", pa.array([None if math.isnan(v) else v for v in values[:4]])))
    few = ColumnLists(schema_of_columns(encoder.layout.columns), [table[name].to_pylist() for name in "abcd"], 4)
    for dense in (encoder.encode(table).dense, encoder.encode(few).dense, encoder._encode_table(table).dense):
        assert dense.numpy().tolist() == [[rows[name][row] for name in "abcd"] for row in range(4)]


def test_a_file_without_a_header_and_files_with_other_orders_of_columns_are_read(tmp_path: Path) -> None:
    columns = {"label": "y", "dense": ["x"], "sparse": ["c"]}
    source = _write(tmp_path / "rows.tsv", ["1\t2.5\ta", "0\t1\tb"])
    dataset = _prepare(tmp_path, source, columns, format="tsv", header=["y", "x", "c"], dense_transform="none").dataset
    assert _rows(tmp_path, dataset) == {"y": [1, 0], "x": [2.5, 1.0], "c": [1, 2]}
    days = tmp_path / "days"
    days.mkdir()
    _write(days / "day_1.csv", ["y,x,c", "1,2.5,a"])
    _write(days / "day_2.csv", ["c,extra,y,x", "b,9,0,1"])
    dataset = _prepare(tmp_path / "days", days, columns, dense_transform="none").dataset
    assert _rows(tmp_path / "days", dataset) == {"y": [1, 0], "x": [2.5, 1.0], "c": [1, 2]}


def test_a_column_that_a_model_wants_is_named_as_such() -> None:
    for label, fix in (("y", "correct data.columns"), ("", "rename them in it to what the model was trained on")):
        layout = Layout(ColumnsConfig(label=label, sparse=["city"]), "csv")
        with pytest.raises(DataError, match=names(f"'city' 'City' {fix}")):
            check_columns(layout, ("y", "City"), "rows.csv")


def test_what_is_wrong_with_a_whole_file_is_said(tmp_path: Path) -> None:
    source = _write(tmp_path / "rows.jsonl", ['[{"y": 1, "c": "a"},', '{"y": 0, "c": "a"}]'])
    with pytest.raises(DataError, match=names("2 of 2 'y' 'c' jsonl jq")):
        _prepare(tmp_path, source, {"label": "y", "sparse": ["c"]}, format="jsonl")
    source = _write(tmp_path / "rows.csv", ["y,c,t", "0,a,1767398400", "1,a,2026-01-01"])
    with pytest.raises(DataError, match=names("lines 2 to 3 t date")):
        _prepare(tmp_path, source, {"label": "y", "sparse": ["c"], "timestamp": "t"}, split=SplitConfig(kind="time"))


def test_json_lines_are_read_and_bad_ones_quarantined(tmp_path: Path) -> None:
    objects = [{"y": 1, "x": 2.5, "c": "a", "m": [1, 2]}, {"y": 0, "c": 7, "m": []}, {"y": 0, "x": None, "m": ["q"]}]
    source = _write(tmp_path / "rows.jsonl", [*map(json.dumps, objects), "{", "[1]", '{"y": 2}'])
    dataset = _prepare(tmp_path, source, format="jsonl", dense_transform="none", max_quarantined_fraction=0.5).dataset
    rows = _rows(tmp_path, dataset)
    assert (rows["y"], rows["x"], [len(ids) for ids in rows["m"]]) == ([1, 0, 0], [2.5, 0.0, 0.0], [2, 0, 1])
    assert dataset.quarantined_rows == 3
    with pytest.raises(DataError, match=names("'z' lacks 1 of 2 y, x, c, m")):
        _prepare(tmp_path / "other", source, {"label": "y", "sparse": ["z"]}, format="jsonl")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b"y,c\n1,a\n"), "rows.csv gzip .gz"), (bytes([0x28, 0xB5, 0x2F, 0xFD]) + b"..", "rows.csv zstd"),
        (b"PK\x03\x04..", "rows.csv zip"), (b"PAR1....", "rows.csv data.format=parquet"),
        ("y,c\n1,a\n".encode("utf-16"), "rows.csv UTF-16 iconv"),
        (b"# Read me\n", "rows.csv 'y' quoted glob"), (f"{'x' * 500}\n".encode(), "rows.csv xxx..."),
        (b"y,c\n" + b"yes,a\n" * 9, "9 of 9 'yes' data.columns.label_values label_threshold"),
    ],
    ids=["gzip", "zstd", "zip", "parquet", "utf-16", "read me", "long line", "label"],
)  # fmt: skip
def test_a_file_that_is_no_text_of_these_columns_says_what_it_is(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=names(says)) as failure:
        _prepare(tmp_path, str(path), {"label": "y", "sparse": ["c"]})
    assert len(str(failure.value)) < 400


def test_a_folder_without_files_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=names("empty' folder without data files")) as failure:
        find_sources(str(tmp_path / "empty"))
    assert "did you mean" not in str(failure.value)


def test_columns_without_values_and_labels_of_one_class_are_remarked_on(tmp_path: Path) -> None:
    source = _write(tmp_path / "rows.csv", ["y,c,d", *(f"{int(row == 7)},,d{row % 3}" for row in range(100))])
    summary = _prepare(tmp_path, source, {"label": "y", "sparse": ["c", "d"]}, split=SplitConfig())
    assert len(summary.hints) == 2
    assert mentions(summary.hints[0], "y 0 in all 10 validation rows 10 test") and "train" not in summary.hints[0]
    assert mentions(summary.hints[1], "c data.ids.min_frequency")


def test_a_wrong_delimiter_is_named(tmp_path: Path) -> None:
    source = _write(tmp_path / "rows.csv", ["y;x;c", "1;2;a"])
    with pytest.raises(DataError, match=names("'y' data.delimiter=';'")):
        _prepare(tmp_path, source, {"label": "y", "dense": ["x"], "sparse": ["c"]})
    with pytest.raises(ConfigError, match=names("data.delimiter ;;")):
        DataConfig(name="x", path="x", format="csv", delimiter=";;")
    with pytest.raises(ConfigError, match=names("data.delimiter parquet")):
        DataConfig(name="x", path="x", format="parquet", delimiter=";")


def _split_source(tmp_path: Path) -> Path:
    lines = [f"{n % 2},{n},u{n % 97},{1000 + n * 7 % 500}" for n in range(3000)]
    return _write(tmp_path / "rows.csv", ["y,x,user,t", *lines])


@pytest.mark.parametrize("kind", ["random", "user"])
def test_rows_are_divided_at_random_or_by_user_whatever_the_blocks(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"label": "y", "dense": ["x"], "sparse": ["user"]}
    source, settings = _split_source(tmp_path), {"dense_transform": "none", "group_column": "user"}
    split = SplitConfig(kind=kind, validation_fraction=0.2, test_fraction=0.1)
    dataset = _prepare(tmp_path, source, columns, split=split, **settings).dataset
    held = {name: np.array(_rows(tmp_path, dataset, name)["x"], np.int64) for name in dataset.splits}
    assert sorted(np.concatenate(list(held.values()))) == list(range(3000))
    assert 0.6 < len(held["train"]) / 3000 < 0.8 and 0.04 < len(held["test"]) / 3000 < 0.17
    if kind == "user":
        users = [set(rows % 97) for rows in held.values()]
        assert not users[0] & users[1] and not users[0] & users[2] and not users[1] & users[2]
    from pipeline.data.prepare import resources

    monkeypatch.setattr(resources, "MIN_BLOCK_BYTES", 3_000)
    monkeypatch.setattr(resources, "MAX_BLOCK_BYTES", 3_000)
    again = _prepare(tmp_path / "small", source, columns, split=split, **settings).dataset
    assert _rows(tmp_path / "small", again, "test")["x"] == held["test"].tolist()
    other = SplitConfig(kind=kind, validation_fraction=0.2, test_fraction=0.1, seed=1)
    changed = _prepare(tmp_path / "seed", source, columns, split=other, **settings).dataset
    assert _rows(tmp_path / "seed", changed, "test")["x"] != held["test"].tolist()


def test_rows_are_divided_at_dates(tmp_path: Path) -> None:
    columns = {"label": "y", "dense": ["x"], "timestamp": "t"}
    source = _split_source(tmp_path)
    split = SplitConfig(kind="date", validation_from="1300", test_from="1400")
    dataset = _prepare(tmp_path, source, columns, split=split, dense_transform="none").dataset
    for name, (first, end) in {"train": (1000, 1300), "validation": (1300, 1400), "test": (1400, 1500)}.items():
        times = {1000 + int(x) * 7 % 500 for x in _rows(tmp_path, dataset, name)["x"]}
        assert times == set(range(first, end))
    with pytest.raises(DataError, match=names("validation_from=1300 test_from=1300")):
        late = SplitConfig(kind="date", validation_from="1300", test_from="1300")
        _prepare(tmp_path / "late", source, columns, split=late)
    with pytest.raises(ConfigError, match=names("validation_from date")):
        SplitConfig(kind="date")
    with pytest.raises(DataError, match=names("validation_from=2026-01-01 test_from")):  # of a column of small numbers
        _prepare(tmp_path / "dates", source, columns, split=SplitConfig(kind="date", validation_from="2026-01-01"))


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_what_is_no_time_goes_to_the_quarantine_in_every_format(tmp_path: Path, kind: str) -> None:
    """Fractions of seconds, words, and dates beside whole numbers, which are of another unit."""
    for name, times, bad in (
        ("numbers", ["1000", "1001", "1002", "1003.5", "never", "2026-01-01"], 3),
        ("dates", ["2026-01-03", "2026-01-02T10:00:00Z", "2026-01-02", "1003", "x"], 2),
    ):
        if kind == "csv":  # there either kind is a time by itself, and a column of both is refused as a whole
            times, bad = [each for each in times if each not in ("2026-01-01", "1003")], bad - 1
        table = pa.table({"y": [0] * len(times), "c": ["a"] * len(times), "t": times})
        source = tmp_path / f"{name}.{kind}"
        if kind == "parquet":
            pq.write_table(table, source)
        elif kind == "csv":
            _write(source, ["y,c,t", *(f"0,a,{each}" for each in times)])
        else:
            _write(source, [json.dumps(row) for row in table.to_pylist()])
        columns = {"label": "y", "sparse": ["c"], "timestamp": "t"}
        settings: dict[str, Any] = {"split": SplitConfig(kind="time"), "max_quarantined_fraction": 0.6}
        dataset = _prepare(tmp_path / name, source, columns, format=kind, **settings).dataset
        assert (dataset.accepted_rows, dataset.quarantined_rows) == (len(times) - bad, bad)
    pq.write_table(pa.table({"y": [0], "c": ["a"], "t": [1003.5]}), tmp_path / "fractions.parquet")
    with pytest.raises(DataError, match=names("1 of 1 t 1003.5 time")):
        _prepare(
            tmp_path / "fractions", tmp_path / "fractions.parquet", columns, format="parquet", split=settings["split"]
        )


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
def test_too_many_bad_rows_end_a_preparation_before_its_last_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from pipeline.data.prepare import resources
    from pipeline.data.raw import parquet_rows

    monkeypatch.setattr(resources, "MIN_BLOCK_BYTES", 3_000)
    monkeypatch.setattr(resources, "MAX_BLOCK_BYTES", 3_000)
    monkeypatch.setattr(parquet_rows, "MAX_BLOCK_ROWS", 500)
    read: list[int] = []
    early = preparation.refuse_early
    monkeypatch.setattr(
        preparation, "refuse_early", lambda *given: (read.append(given[2][-1].num_source_rows), early(*given))
    )
    noise = random.Random(7)  # else a gzip file of 20,000 rows is read at one go
    rows = [(n % 2 if n % 10 else 2, n / 7, f"a, {noise.random()}" * 5) for n in range(20_000)]
    source = tmp_path / f"rows.{kind}"
    table = pa.table({name: list(values) for name, values in zip("yxc", zip(*rows, strict=True), strict=True)})
    lines = ["y,x,c", *(f'{y},{x},"{c}"' for y, x, c in rows)]
    if kind == "parquet":
        pq.write_table(table, source)
    elif kind == "csv.gz":
        source.write_bytes(gzip.compress("\n".join(lines).encode()))
    else:
        _write(source, lines)
    columns = {"label": "y", "dense": ["x"], "sparse": ["c"]}
    with pytest.raises(DataError, match=names("max_quarantined_fraction 0.10% y")):
        _prepare(tmp_path, source, columns, format=kind.removesuffix(".gz"), max_quarantined_fraction=0.001)
    assert 1_000 <= read[-1] < 15_000


@pytest.mark.parametrize(
    ("name", "later", "most"),
    [
        ("a.csv", [], 450.0),  # a row has two bytes at least
        ("a.csv", ["b.csv"], 950.0),
        ("a.csv.gz", [], 10 * 100 / 100 * 900),
        ("a.csv.gz", ["b.csv.gz", "c.csv"], 9_000.0 + 10_000.0 + 500.0),
        ("a.csv", ["b.csv.gz"], None),
        ("a.parquet", [], 200.0),
        ("a.parquet", ["b.parquet"], 500.0),
        ("a.csv", ["no.parquet"], None),
    ],
)
def test_the_rows_to_come_are_bounded_by_what_is_known_of_each_file(
    tmp_path: Path, name: str, later: list[str], most: float | None
) -> None:
    """100 rows stand for the first 100 of 1,000 bytes; Parquet files have 300 rows."""
    for each in (name, *later):
        if each in ("a.parquet", "b.parquet"):
            pq.write_table(pa.table({"x": range(300)}), tmp_path / each)
    first, *others = (Source(str(tmp_path / each), each, 1_000, "") for each in (name, *later))
    assert most_rows_to_come(first, others, 100, 100, 2) == most


WIDE = ["label", *(f"d{i}" for i in range(13)), "time", *(f"c{i}" for i in range(25))]
BAD_CELLS = {
    "label": ["2", "", "yes"], "d0": ["n.a.", "1e50", "0x1", "--1"], "time": ["", "noon"],
    "c0": ['a"b', '"', "\r", "\udcff", '",x', "a,b"],
}  # fmt: skip


def test_of_wide_quoted_rows_only_those_that_may_be_unreadable_are_looked_at_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows that are kept, and the reasons of the others, are those that a look at each line finds."""
    noise = random.Random(3)
    lines = []
    for row in range(600):
        cells = {name: f"{noise.random():.4f}" if name[0] == "d" else f'v ""{row % 9}' for name in WIDE}
        cells |= {"label": str(row % 2), "time": str(1000 + row), "d3": " 1.5 " if row % 50 == 0 else "nan"}
        if row % 20 == 7:
            name = list(BAD_CELLS)[row // 20 % len(BAD_CELLS)]
            cells[name] = BAD_CELLS[name][row // 80 % len(BAD_CELLS[name])]
        if row % 100 == 13:
            del cells["c7"]
        lines.append(",".join(f'"{cell}"' for cell in cells.values()) if row != 300 else "")
    text = "\n".join([*lines, ""]).encode(errors="surrogateescape")
    dense, sparse = ([name for name in WIDE if name[0] == kind and name[1:].isdigit()] for kind in "dc")
    layout = Layout(ColumnsConfig(label="label", dense=dense, sparse=sparse, timestamp="time"), "csv", ",", True)
    one_by_one = raw_rows._why_unreadable
    reasons = [one_by_one(layout, tuple(WIDE), line) for line in text.removesuffix(b"\n").split(b"\n")]
    looked_at: list[bytes] = []
    monkeypatch.setattr(raw_rows, "_why_unreadable", lambda *given: (looked_at.append(given[2]), one_by_one(*given))[1])
    parsed = raw_rows.parse_text(layout, tuple(WIDE), Block(1, 0, len(lines), text))
    assert {row.line - 1: row.reason for row in parsed.quarantined} == {
        i: text for i, text in enumerate(reasons) if text
    }
    assert parsed.kept.tolist() == [i for i, reason in enumerate(reasons) if not reason]
    assert len(parsed.quarantined) > 25 and len(looked_at) <= len(parsed.quarantined) + 10


TEXT_ROWS = ["yes,a,1", "no,a,2", "maybe,b,3", "yes,b,nan", ",c,5", "no,c,"]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_labels_are_text_or_divided_by_a_threshold(tmp_path: Path, kind: str) -> None:
    """The same of one label and of several; what a text or a missing cell stands for is never guessed."""
    cells = [line.split(",") for line in TEXT_ROWS]
    numbers = [float(stars) if stars else None for *_, stars in cells]
    table = pa.table({"y": [y or None for y, *_ in cells], "c": [c for _, c, _ in cells], "stars": numbers})
    source = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table, source)
    elif kind == "csv":
        _write(source, ["y,c,stars", *TEXT_ROWS])
    else:
        _write(source, [json.dumps(row) for row in table.to_pylist()])
    values = {"yes": 1, "no": 0}
    settings = {"format": kind, "max_quarantined_fraction": 0.9}
    cases: dict[str, tuple[dict[str, Any], dict[str, list[int]]]] = {
        "text": ({"label": "y", "label_values": values}, {"y": [1, 0, 1, 0]}),
        "threshold": ({"label": "stars", "label_threshold": 3.0}, {"stars": [0, 0, 1, 1]}),
        "several": (
            {"labels": {"y": LabelConfig(values=values), "stars": LabelConfig(threshold=2.0, mask="y")}},
            {"y": [1, 0, 0], "stars": [0, 1, 0]},
        ),
    }
    for name, (columns, expected) in cases.items():
        summary = _prepare(tmp_path / name, source, {**columns, "sparse": ["c"]}, **settings)
        rows = _rows(tmp_path / name, summary.dataset)
        assert {label: rows[label] for label in expected} == expected, name
        assert _prepare(tmp_path / name, source, {**columns, "sparse": ["c"]}, **settings).dataset == summary.dataset
    reasons = "".join(path.read_text() for path in (tmp_path / "text" / "data").rglob("*.jsonl"))
    assert "y is 'maybe', not one of 'yes', 'no'" in reasons
    for other in ({"yes": 0, "no": 1}, {}):
        with pytest.raises(DataError, match=names("label_values other")):
            _prepare(tmp_path / "text", source, {"label": "y", "label_values": other, "sparse": ["c"]}, **settings)


@pytest.mark.parametrize(
    "setting", [{"label_values": {"yes": 1, "no": 0}}, {"timestamp": "t"}, {"list_separator": "json"}]
)
def test_rows_go_to_the_quarantine_also_where_a_block_has_no_other(tmp_path: Path, setting: dict[str, Any]) -> None:
    source = _write(tmp_path / "rows.csv", ["y,c,m,t", *["perhaps,a,?,never"] * 5])
    columns = {"label": "y", "sparse": ["c"], "multi_hot": ["m"], **setting}
    with pytest.raises(DataError, match=names("5 of 5 line 2 y 'perhaps'")):
        _prepare(tmp_path, source, columns)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"label_values": {"yes": 1}}, "labels.values 1 alone"),
        ({"label_values": {"yes": 2, "no": 0}}, "'yes' 2 0 to 1"),
        ({"label_values": {"yes": 1, "no": 0}, "label_threshold": 1.0}, "labels.values labels.threshold"),
        ({"label_threshold": math.nan}, "threshold=nan"),
        (
            {"label_threshold": 1.0, "labels": {"y": LabelConfig()}},
            "label_threshold data.columns.labels.<name>.threshold",
        ),
    ],
)
def test_texts_and_thresholds_that_cannot_be_are_refused(columns: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=names(words)):
        ColumnsConfig(**columns)


def test_a_label_of_text_says_which_key_reads_it(tmp_path: Path) -> None:
    source = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"y": ["yes", "no"], "c": ["a", "b"]}), source)
    with pytest.raises(DataError, match=names("'y' string data.columns.label_values={yes:")):
        _prepare(tmp_path, source, {"label": "y", "sparse": ["c"]}, format="parquet")


def _times(tmp_path: Path, name: str, times: Sequence[object]) -> None:
    _write(tmp_path / name, ["y,c,t", *(f"{n % 2},a,{time}" for n, time in enumerate(times))])


def test_times_in_two_units_are_refused_and_a_few_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    columns, split = {"label": "y", "sparse": ["c"], "timestamp": "t"}, SplitConfig(kind="time")
    seconds = range(1764000000, 1764000030)
    folder = tmp_path / "rows"
    folder.mkdir()
    _times(folder, "1.csv", seconds)
    for name, times in {"2.csv": [each * 1000 for each in seconds], "3.csv": ["2026-01-01"] * 4}.items():
        _times(folder, name, times)
        unit = "milliseconds" if name == "2.csv" else "microseconds"
        with pytest.raises(DataError, match=names(f"=t 30 seconds 1.csv {len(times)} {unit} {name}")):
            _prepare(tmp_path / name, folder, columns, split=split)
        (folder / name).unlink()
    _times(folder, "2.csv", [seconds[0] * 1000])
    with caplog.at_level("WARNING"):
        summary = _prepare(tmp_path / "few", folder, columns, split=split, max_quarantined_fraction=0.05)
    assert summary.dataset.accepted_rows == 31 and mentions(caplog.text, "=t 30 seconds 1 milliseconds 2.csv")


def test_numbers_that_are_no_epochs_have_no_unit() -> None:
    assert count_units(np.array([0, 17, 10**11, 5 * 10**13, -(10**9)])) == {}
    assert count_units(np.array([], np.int64)) == {}
    assert count_units(np.array([1_764_000_000, 3, 1_764_000_000_000_000_000])) == {"seconds": 1, "nanoseconds": 1}


@pytest.mark.parametrize("kind", [pa.time32("ms"), pa.duration("s")], ids=["time of day", "span"])
def test_a_time_without_a_date_is_no_timestamp(tmp_path: Path, kind: pa.DataType) -> None:
    source = tmp_path / "rows.parquet"
    times = pa.array([1, 2], pa.int32() if kind == pa.time32("ms") else pa.int64()).cast(kind)
    pq.write_table(pa.table({"y": [0, 1], "c": ["a", "b"], "t": times}), source)
    columns = {"label": "y", "sparse": ["c"], "timestamp": "t"}
    with pytest.raises(DataError, match=names(f"'t' {kind} date")):
        _prepare(tmp_path, source, columns, format="parquet", split=SplitConfig(kind="time"))


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_empty_lines_at_the_end_of_a_file_are_no_rows(tmp_path: Path, end: str) -> None:
    lines = ["y,c", *(f"{n % 2},v{n}" for n in range(9))]
    for name, text in {"plain": "", "one": end, "many": end * 40}.items():
        path = tmp_path / f"{name}.csv"
        path.write_bytes((end.join([*lines, ""]) + text).encode())
        for block_bytes in (1, 7, 64, 1 << 16):
            with TextReader(find_sources(str(path))[0], block_bytes) as reader:
                reader.header()
                read = list(reader.blocks())
            assert b"".join(block.text for block in read) == end.join([*lines[1:], ""]).encode()
            assert sum(block.num_rows for block in read) == 9
            assert [block.first_row for block in read] == [0, *np.cumsum([block.num_rows for block in read])[:-1]]
    path.write_bytes(b"y,c\n0,a\n\n1,b\n\n")
    columns = {"label": "y", "sparse": ["c"]}
    dataset = _prepare(tmp_path, path, columns, max_quarantined_fraction=0.5).dataset
    assert (dataset.accepted_rows, dataset.quarantined_rows) == (2, 1)  # in the middle one may be a lost row


def test_lines_that_end_in_a_carriage_return_alone_are_named(tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_bytes(b"y,c\r0,a\r1,b\r")
    with pytest.raises(DataError, match=names("rows.csv 2 carriage tr '\\r' '\\n'")):
        _prepare(tmp_path, source, {"label": "y", "sparse": ["c"]})


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "jsonl", "parquet"])
def test_an_empty_file_among_others_has_no_rows(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    folder, columns = tmp_path / "rows", {"label": "y", "sparse": ["c"]}
    folder.mkdir()
    table = pa.table({"y": [0, 1], "c": ["a", "b"]})
    lines = [json.dumps(row) for row in table.to_pylist()] if kind == "jsonl" else ["y,c", "0,a", "1,b"]
    text = "\n".join([*lines, ""]).encode()
    for name, content in (("1", b""), ("2", text)):
        path = folder / f"{name}.{kind}"
        if kind == "parquet":
            pq.write_table(table if content else table.slice(0, 0), path)
        else:
            path.write_bytes(gzip.compress(content) if kind.endswith(".gz") else content)
    with caplog.at_level("WARNING"):
        dataset = _prepare(tmp_path, folder, columns, format=kind.partition(".")[0]).dataset
    assert (dataset.accepted_rows, dataset.quarantined_rows) == (2, 0)
    assert mentions(caplog.text, f"1.{kind} no rows")
    with pytest.raises(DataError, match="no row was accepted"):
        _prepare(tmp_path / "alone", folder / f"1.{kind}", columns, format=kind.partition(".")[0])
