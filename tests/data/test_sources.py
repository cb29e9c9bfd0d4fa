"""Sources as people have them: words for missing values, lists as JSON, delimiters, no header, JSON lines, transforms, empty files."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig, SplitConfig
from pipeline.data.dataset import load_dataset
from pipeline.data.prepare.hints import find_hints
from pipeline.data.prepare.run import describe
from pipeline.data.raw.layout import Layout, check_columns
from pipeline.data.raw.source import TextReader, find_sources
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.serving.artifact.raw_schema import schema_of
from pipeline.serving.scoring.raw_rows import RowEncoder
from pipeline.serving.scoring.scorer import ColumnLists
from pipeline.serving.scoring.scorer import schema_of as schema_of_columns
from tests.data.sources import COLUMNS, TRAIN_ALONE, prepare_rows, rows_of, write_lines
from tests.support.messages import mentions, names


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
        prepare_rows(tmp_path, source, columns, format="parquet", split=split)


def test_words_for_missing_values_are_missing_in_every_kind_of_column(tmp_path: Path) -> None:
    lines = ["y,x,c,m", "1,NULL,NULL,1|NULL|2", "0,2.5,\\N,NULL", "1,,a,", "0,1e1,b,2"]
    kept = {**COLUMNS, "null_values": ["NULL", "\\N"]}
    rows = rows_of(
        tmp_path,
        prepare_rows(tmp_path, write_lines(tmp_path / "rows.csv", lines), kept, dense_transform="none").dataset,
    )
    assert rows["x"] == [0.0, 2.5, 0.0, 10.0]
    assert rows["c"] == [0, 0, 1, 2]
    assert [len(ids) for ids in rows["m"]] == [3, 0, 0, 1] and rows["m"][0][1] == 0
    with pytest.raises(DataError, match=names("1 of 4 line 2 x 'NULL'")):
        prepare_rows(tmp_path / "other", tmp_path / "rows.csv")


def test_lists_in_json_text_are_lists_in_files_and_in_requests(tmp_path: Path) -> None:
    lines = ["y;x;c;m", '1;-1;"a";"[1, 2]"', '0;2;b;"[""x,y"", null]"', "1;3;a;[]", "0;4;b;", "0;5;b;[2"]
    columns = {**COLUMNS, "list_separator": "json"}
    summary = prepare_rows(
        tmp_path, write_lines(tmp_path / "rows.csv", lines), columns, delimiter=";", max_quarantined_fraction=0.2
    )
    rows = rows_of(tmp_path, summary.dataset)
    assert [len(ids) for ids in rows["m"]] == [2, 2, 0, 0] and summary.dataset.quarantined_rows == 1
    assert rows["m"][1][1] == 0
    typed = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"y": [1, 0], "x": [1, 2], "c": ["a", "b"], "m": ["[1, 2]", "[1"]}), typed)
    again = prepare_rows(tmp_path / "typed", typed, columns, format="parquet", max_quarantined_fraction=0.5).dataset
    assert (again.accepted_rows, again.quarantined_rows) == (1, 1)


def test_prepare_remarks_on_columns_that_may_have_been_meant_otherwise(tmp_path: Path) -> None:
    lines = [f"{n % 2},{n - 10},{'NA' if n % 3 else 'a'},[{n}, 1]" for n in range(30)]
    lines = ["y;x;c;m;k", *(line.replace(",", ";", 3) + (";r" if n == 7 else ";s") for n, line in enumerate(lines))]
    many = [lines[0], *lines[1:] * 5]
    summary = prepare_rows(
        tmp_path, write_lines(tmp_path / "rows.csv", many), {**COLUMNS, "sparse": ["c", "k"]}, delimiter=";"
    )
    text = describe(summary)
    assert mentions(text, "x (50 of 150) data.dense_transforms.<column>=signed_log1p")
    assert mentions(text, "brackets m list_separator=json 'NA' c data.columns.null_values=[NA]")
    assert "one value" not in text
    write_lines(tmp_path / "one.csv", ["y,c", *["0,s"] * 199, "1,r"])
    summary = prepare_rows(tmp_path / "one", tmp_path / "one.csv", {"label": "y", "sparse": ["c"]})
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
    dataset = prepare_rows(
        tmp_path, write_lines(tmp_path / "rows.csv", lines), columns, dense_transforms=transforms, split=split
    ).dataset
    mean, std = 1 / 3, math.sqrt((10 / 3) ** 2 / 3 + (1 / 3) ** 2 / 3 + (11 / 3) ** 2 / 3)
    assert dataset.dense_columns["c"] == pytest.approx({"kind": "standardize", "mean": mean, "std": std}, abs=1e-12)
    rows = rows_of(tmp_path, dataset)
    expected = {
        "a": [0, 0, math.log(5), 0],
        "b": [-math.log(4), 0, math.log(5), 0],
        "d": [-3, 0, 4, 0],
        "c": [(value - mean) / std for value in values[:3]] + [0],
    }
    for name, column in expected.items():
        assert rows[name] == pytest.approx(column, rel=1e-6)
    assert load_dataset(str(tmp_path / "data")) == dataset
    encoder = RowEncoder(schema_of(dataset, [], ColumnsConfig(), {}), {})
    table = pa.table(dict.fromkeys("abcd", pa.array([None if math.isnan(v) else v for v in values[:4]])))
    few = ColumnLists(schema_of_columns(encoder.layout.columns), [table[name].to_pylist() for name in "abcd"], 4)
    for dense in (encoder.encode(table).dense, encoder.encode(few).dense, encoder.encode_as_prepare(table).dense):
        assert dense.numpy().tolist() == [[rows[name][row] for name in "abcd"] for row in range(4)]


def test_a_file_without_a_header_and_files_with_other_orders_of_columns_are_read(tmp_path: Path) -> None:
    columns = {"label": "y", "dense": ["x"], "sparse": ["c"]}
    source = write_lines(tmp_path / "rows.tsv", ["1\t2.5\ta", "0\t1\tb"])
    dataset = prepare_rows(
        tmp_path, source, columns, format="tsv", header=["y", "x", "c"], dense_transform="none"
    ).dataset
    assert rows_of(tmp_path, dataset) == {"y": [1, 0], "x": [2.5, 1.0], "c": [1, 2]}
    days = tmp_path / "days"
    days.mkdir()
    write_lines(days / "day_1.csv", ["y,x,c", "1,2.5,a"])
    write_lines(days / "day_2.csv", ["c,extra,y,x", "b,9,0,1"])
    dataset = prepare_rows(tmp_path / "days", days, columns, dense_transform="none").dataset
    assert rows_of(tmp_path / "days", dataset) == {"y": [1, 0], "x": [2.5, 1.0], "c": [1, 2]}


def test_a_column_that_a_model_wants_is_named_as_such() -> None:
    for label, fix in (("y", "correct data.columns"), ("", "rename them in it to what the model was trained on")):
        layout = Layout(ColumnsConfig(label=label, sparse=["city"]), "csv")
        with pytest.raises(DataError, match=names(f"'city' 'City' {fix}")):
            check_columns(layout, ("y", "City"), "rows.csv")


def test_what_is_wrong_with_a_whole_file_is_said(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", ['[{"y": 1, "c": "a"},', '{"y": 0, "c": "a"}]'])
    with pytest.raises(DataError, match=names("2 of 2 'y' 'c' jsonl jq")):
        prepare_rows(tmp_path, source, {"label": "y", "sparse": ["c"]}, format="jsonl")
    source = write_lines(tmp_path / "rows.csv", ["y,c,t", "0,a,1767398400", "1,a,2026-01-01"])
    with pytest.raises(DataError, match=names("1 of 2 line t 1767398400 time")):
        prepare_rows(
            tmp_path, source, {"label": "y", "sparse": ["c"], "timestamp": "t"}, split=SplitConfig(kind="time")
        )


JSON_REASONS = {
    "{": "JSON character 2",
    "[1]": "JSON object",
    '{"y": 2}': "y '2' 1",
    '{"y": 1, "x": "cheap"}': "x 'cheap' 32-bit",
    '{"y": "no"}': "y 'no' 1",
    '{"y": 1, "x": [3]}': "x [3]",
    f'{{"y": 1, "x": 1{400 * "0"}}}': "x 1000 32-bit",
    '{"y": 1, "x": 1e400}': "x inf",
}


def test_json_lines_are_read_and_bad_ones_quarantined(tmp_path: Path) -> None:
    objects = [{"y": 1, "x": 2.5, "c": "a", "m": [1, 2]}, {"y": 0, "c": 7, "m": []}, {"y": 0, "x": None, "m": ["q"]}]
    source = write_lines(tmp_path / "rows.jsonl", [*map(json.dumps, objects), *JSON_REASONS])
    dataset = prepare_rows(
        tmp_path, source, format="jsonl", dense_transform="none", max_quarantined_fraction=0.8
    ).dataset
    rows = rows_of(tmp_path, dataset)
    assert (rows["y"], rows["x"], [len(ids) for ids in rows["m"]]) == ([1, 0, 0], [2.5, 0.0, 0.0], [2, 0, 1])
    entries = [json.loads(line) for line in (tmp_path / "data" / "quarantine.jsonl").read_text().splitlines()]
    assert len(entries) == dataset.quarantined_rows == len(JSON_REASONS)
    for entry, words in zip(entries, JSON_REASONS.values(), strict=True):
        assert mentions(entry["reason"], words)
    with pytest.raises(DataError, match=names("'z' lacks 1 of 2 y, x, c, m")):
        prepare_rows(tmp_path / "other", source, {"label": "y", "sparse": ["z"]}, format="jsonl")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b"y,c\n1,a\n"), "rows.csv gzip .gz"),
        (bytes([0x28, 0xB5, 0x2F, 0xFD]) + b"..", "rows.csv zstd"),
        (b"PK\x03\x04..", "rows.csv zip"),
        (b"PAR1....", "rows.csv data.format=parquet"),
        ("y,c\n1,a\n".encode("utf-16"), "rows.csv UTF-16 data.encoding=utf-16"),
        ("y,c\n1,a\n".encode("utf-32"), "rows.csv UTF-32 data.encoding=utf-32"),
        (b"# Read me\n", "rows.csv 'y' quoted glob"),
        (f"{'x' * 500}\n".encode(), "rows.csv xxx..."),
        (b"y,c\n" + b"yes,a\n" * 9, "9 of 9 'yes' data.columns.label_values label_threshold"),
    ],
    ids=["gzip", "zstd", "zip", "parquet", "utf-16", "utf-32", "read me", "long line", "label"],
)
def test_a_file_that_is_no_text_of_these_columns_says_what_it_is(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=names(says)) as failure:
        prepare_rows(tmp_path, str(path), {"label": "y", "sparse": ["c"]})
    assert len(str(failure.value)) < 400


def test_a_folder_without_files_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=names("empty' folder without data files")) as failure:
        find_sources(str(tmp_path / "empty"))
    assert "did you mean" not in str(failure.value)


def test_columns_without_values_and_labels_of_one_class_are_remarked_on(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.csv", ["y,c,d", *(f"{int(row == 7)},,d{row % 3}" for row in range(100))])
    summary = prepare_rows(tmp_path, source, {"label": "y", "sparse": ["c", "d"]}, split=SplitConfig())
    assert len(summary.hints) == 2
    assert mentions(summary.hints[0], "y 0 in all 10 validation rows 10 test") and "train" not in summary.hints[0]
    assert "retrieval" not in summary.hints[0]
    clicks = {name: replace(split, num_positives=split.num_rows) for name, split in summary.dataset.splits.items()}
    of_clicks = find_hints(replace(summary.dataset, splits=clicks), str(tmp_path / "data"), {})
    assert mentions(of_clicks[0], "y 1 in all 80 train rows models of retrieval")
    assert mentions(summary.hints[1], "c data.ids.min_frequency")
    for best_auc, count in (({}, 3), ({"train": 0.8}, 2)):  # negative numbers of generated data are meant
        found = find_hints(replace(summary.dataset, bayes_auc=best_auc), str(tmp_path / "data"), {"x": 7})
        assert len(found) == count and ("log1p" in "".join(found)) == (not best_auc)


def test_a_wrong_delimiter_is_named(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.csv", ["y;x;c", "1;2;a"])
    with pytest.raises(DataError, match=names("'y' data.delimiter=';'")):
        prepare_rows(tmp_path, source, {"label": "y", "dense": ["x"], "sparse": ["c"]})
    with pytest.raises(ConfigError, match=names("data.delimiter cells")):
        DataConfig(name="x", path="x", format="csv", delimiter='"')
    with pytest.raises(ConfigError, match=names("data.encoding utf-9 latin-1")):
        DataConfig(name="x", path="x", format="csv", encoding="utf-9")
    with pytest.raises(ConfigError, match=names("data.delimiter parquet")):
        DataConfig(name="x", path="x", format="parquet", delimiter=";")


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
    dataset = prepare_rows(tmp_path, path, columns, max_quarantined_fraction=0.5).dataset
    assert (dataset.accepted_rows, dataset.quarantined_rows) == (2, 1)  # in the middle one may be a lost row


def test_lines_that_end_in_a_carriage_return_alone_are_named(tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_bytes(b"y,c\r0,a\r1,b\r")
    with pytest.raises(DataError, match=names("rows.csv 2 carriage tr '\\r' '\\n'")):
        prepare_rows(tmp_path, source, {"label": "y", "sparse": ["c"]})


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
        dataset = prepare_rows(tmp_path, folder, columns, format=kind.partition(".")[0]).dataset
    assert (dataset.accepted_rows, dataset.quarantined_rows) == (2, 0)
    assert mentions(caplog.text, f"1.{kind} no rows")
    size = (folder / f"1.{kind}").stat().st_size
    with pytest.raises(DataError, match=names(f"1.{kind} ({size:,} bytes) no rows source=")) as error:
        prepare_rows(tmp_path / "alone", folder / f"1.{kind}", columns, format=kind.partition(".")[0])
    assert ("data.header" in str(error.value)) == kind.startswith("csv")
    assert not (tmp_path / "alone" / "data.staging").exists()


def test_text_is_read_as_other_programs_write_it(tmp_path: Path) -> None:
    """Another encoding, a delimiter of two characters, blanks between ids, and Spark's quotes."""
    columns = {"label": "y", "sparse": ["c"], "multi_hot": ["m"], "list_separator": " "}
    (tmp_path / "latin.dat").write_bytes('y::c::m\n1::Amélie::a b\n0::"x" y::b\n'.encode("latin-1"))
    with pytest.raises(DataError, match=names("2 UTF-8 data.encoding=latin-1")):
        prepare_rows(tmp_path / "1", tmp_path / "latin.dat", columns, delimiter="::")
    prepare_rows(tmp_path / "2", tmp_path / "latin.dat", columns, delimiter="::", encoding="latin-1")
    assert _values(tmp_path / "2", "c") == {"Amélie", '"x" y'} and _values(tmp_path / "2", "m") == {"a", "b"}
    lines = ["y,c,m", '1,"say \\"a, b\\"",a', '0,"C:\\",b', "1,plain,a"]
    source = write_lines(tmp_path / "spark.csv", lines)
    with pytest.raises(DataError, match=names("line 2 backslash data.quotes=backslash")):
        prepare_rows(tmp_path / "3", source, columns)
    source = write_lines(tmp_path / "spark.csv", [lines[0], lines[1], lines[3], "1,C:\\dir,a"])
    prepare_rows(tmp_path / "4", source, columns, quotes="backslash")
    assert _values(tmp_path / "4", "c") == {'say "a, b"', "plain", "C:\\dir"}
    (tmp_path / "utf16.csv").write_bytes("y,c,m\n1,é,a\n0,b,a\n".encode("utf-16-le"))
    with pytest.raises(DataError, match=names("UTF-16 mark data.encoding=utf-16-le")):
        prepare_rows(tmp_path / "5", tmp_path / "utf16.csv", columns)
    prepare_rows(tmp_path / "6", tmp_path / "utf16.csv", columns, encoding="utf-16-le")
    assert _values(tmp_path / "6", "c") == {"é", "b"}


def _values(folder: Path, feature: str) -> set[str]:
    return set(pq.read_table(folder / "data" / "vocabulary" / f"{feature}.parquet")["value"].to_pylist())
