"""Raw rows are read as written; those that cannot be are named by line and reason, in any block, on either path."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig, IdsConfig, SplitConfig
from pipeline.data.raw import source
from pipeline.data.raw import source as source_module
from pipeline.data.raw.blocks import Block, ParsedRows
from pipeline.data.raw.layout import layout_of
from pipeline.data.raw.parse_cells import parse_timestamps
from pipeline.data.raw.rows import open_source, parse_block
from pipeline.data.raw.source import find_sources
from pipeline.runtime.errors import ConfigError, DataError
from tests.data.criteo_rows import random_lines, write_lines
from tests.support.messages import names

CRITEO = DataConfig(name="rows")


def parse_file(path: str, config: DataConfig = CRITEO, block_bytes: int = 1 << 20) -> list[tuple[Block, ParsedRows]]:
    layout = layout_of(config)
    reader, names = open_source(layout, find_sources(path)[0], block_bytes)
    with reader:
        return [(block, parse_block(layout, names, block)) for block in reader.blocks()]


def column(parsed: list[tuple[Block, ParsedRows]], name: str) -> list[Any]:
    return [value for _, rows in parsed for value in rows.table[name].to_pylist()]


@pytest.mark.parametrize("block_bytes", [200, 5_000, 1 << 20])
@pytest.mark.parametrize("end", ["\n", ""])
def test_blocks_hold_every_line_once_at_any_size(tmp_path: Path, block_bytes: int, end: str) -> None:
    lines = random_lines(120)
    path = tmp_path / "train.txt"
    path.write_text("\n".join(lines) + end)
    parsed = parse_file(str(path), block_bytes=block_bytes)
    assert column(parsed, "cat_3") == [line.split("\t")[17] or None for line in lines]
    assert column(parsed, "label") == [float(line[0]) for line in lines]
    starts = np.cumsum([0, *(block.num_rows for block, _ in parsed)])
    assert [block.first_row for block, _ in parsed] == starts[:-1].tolist()
    assert [block.first_line for block, _ in parsed] == (starts[:-1] + 1).tolist()


def test_block_of_many_short_lines_is_cut_where_codes_of_16_bits_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "MAX_BLOCK_ROWS", 7)
    lines = random_lines(30)
    parsed = parse_file(write_lines(tmp_path / "train.txt", lines))
    assert [block.num_rows for block, _ in parsed] == [6, 6, 6, 6, 6]
    assert column(parsed, "cat_0") == [line.split("\t")[14] or None for line in lines]


def test_gzip_and_windows_line_ends_read_like_the_plain_file(tmp_path: Path) -> None:
    lines = random_lines(50)
    plain = parse_file(write_lines(tmp_path / "plain.txt", lines))
    (tmp_path / "rows.gz").write_bytes(
        gzip.compress("\n".join(lines[:20]).encode() + b"\n") + gzip.compress("\n".join(lines[20:]).encode())
    )
    (tmp_path / "windows.txt").write_bytes("".join(line + "\r\n" for line in lines).encode())
    for name in ("rows.gz", "windows.txt"):
        other = parse_file(str(tmp_path / name), block_bytes=3_000)
        for wanted in ("label", "int_7", "cat_25"):
            assert column(other, wanted) == column(plain, wanted)


def test_cut_off_gzip_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "day_0.gz").write_bytes(gzip.compress("\n".join(random_lines(500)).encode())[:-400])
    with pytest.raises(DataError, match=names("day_0.gz")):
        parse_file(str(tmp_path / "day_0.gz"))


BAD_ROWS = {
    "40 columns": (lambda cells: cells[:-1], "39 columns, not 40"),
    "a column too many": (lambda cells: [*cells, "x"], "41 columns, not 40"),
    "an empty line": (lambda cells: [], "1 columns, not 40"),
    "a label of 2": (lambda cells: ["2", *cells[1:]], "label is '2', not 0 or 1"),
    "no label": (lambda cells: ["", *cells[1:]], "label is None, not 0 or 1"),
    "a word as a count": (
        lambda cells: [*cells[:3], "many", *cells[4:]],
        "int_2 is 'many', not a finite 32-bit number",
    ),
    "an infinite count": (
        lambda cells: [*cells[:3], "1e999", *cells[4:]],
        "int_2 is '1e999', not a finite 32-bit number",
    ),
    "bytes that are not UTF-8": (lambda cells: [*cells[:-1], "\udcff"], "is not UTF-8"),
    "a carriage return inside": (lambda cells: [*cells[:-1], "a\rb"], "a carriage return inside the row"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_unreadable_row_is_quarantined_with_line_and_reason_and_its_neighbours_stay(tmp_path: Path, name: str) -> None:
    spoil, reason = BAD_ROWS[name]
    lines = random_lines(40)
    bad = (0, 17, 39 if name != "an empty line" else 38)  # at a file's end it is no row
    spoilt = ["\t".join(spoil(line.split("\t"))) if i in bad else line for i, line in enumerate(lines)]
    path = tmp_path / "train.txt"
    path.write_bytes("".join(line + "\n" for line in spoilt).encode(errors="surrogateescape"))
    for block_bytes in (1_000, 1 << 20):
        parsed = parse_file(str(path), block_bytes=block_bytes)
        quarantined = [row for _, rows in parsed for row in rows.quarantined]
        assert [row.line for row in quarantined] == [i + 1 for i in bad]
        assert all(reason in row.reason for row in quarantined)
        sound = [line for i, line in enumerate(lines) if i not in bad]
        assert column(parsed, "cat_1") == [line.split("\t")[15] or None for line in sound]
        kept = [block.first_row + row for block, rows in parsed for row in rows.kept]
        assert kept == [i for i in range(40) if i not in bad]


def test_odd_spellings_of_numbers_fare_alike_beside_a_bad_row_and_without_one(tmp_path: Path) -> None:
    spellings = ["7", "-1", "+3", " 4", "5.", ".5", "1e2", "nan", "NaN", "0x10", "1_0", "1,5", "-", "inf", "3.5e38"]
    cells = random_lines(1)[0].split("\t")
    lines = ["\t".join([cells[0], spelling, *cells[2:]]) for spelling in spellings]
    accepted_alone = []
    for i, line in enumerate(lines):
        parsed = parse_file(write_lines(tmp_path / f"{i}.txt", [line]))
        accepted_alone += [repr(value) for value in column(parsed, "int_0")]
    together = parse_file(write_lines(tmp_path / "all.txt", [*lines, "bad"]))
    assert [repr(value) for value in column(together, "int_0")] == accepted_alone
    assert accepted_alone == ["7.0", "-1.0", "3.0", "4.0", "5.0", "0.5", "100.0", "nan", "nan"]


OWN_COLUMNS = ColumnsConfig(label="clicked", dense=["price"], sparse=["shop"], multi_hot=["tags"], timestamp="at")
OWN = DataConfig(name="own", format="csv", columns=OWN_COLUMNS, split=SplitConfig(kind="time"))
OWN_PARQUET = replace(OWN, format="parquet")


def test_csv_columns_are_taken_by_name_with_quotes_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = '\ufeffshop,unused,at,clicked,tags,price\n"a, b",x,2024-01-01T00:00:00,1,u|v|u,1.5\nc,y,2024-01-02,0,,\n'
    (tmp_path / "own.csv").write_text(text)
    parsed = parse_file(str(tmp_path / "own.csv"), OWN)
    assert column(parsed, "shop") == ["a, b", "c"] and column(parsed, "clicked") == [1.0, 0.0]
    assert column(parsed, "price") == [1.5, None]
    assert np.diff(column(parsed, "at")).tolist() == [86_400_000_000]
    assert [row.line for _, rows in parsed for row in rows.quarantined] == []


def test_csv_row_with_an_open_quote_does_not_swallow_its_neighbours(tmp_path: Path) -> None:
    rows = ["clicked,price,shop,tags,at", "1,1,a,x,1", '0,2,"b,y,2', "1,3,c,z,3", '1,4,"d""d",z,4', '0,5,e,"z,5']
    parsed = parse_file(write_lines(tmp_path / "own.csv", rows), OWN)
    quarantined = [row for _, block in parsed for row in block.quarantined]
    assert [(row.line, row.reason) for row in quarantined] == [
        (3, "a quote that is not closed in its line"),
        (6, "a quote that is not closed in its line"),
    ]
    assert column(parsed, "shop") == ["a", "c", 'd"d'] and column(parsed, "at") == [1, 3, 4]


def test_csv_value_with_a_line_break_is_quarantined_line_by_line(tmp_path: Path) -> None:
    rows = ["clicked,price,shop,tags,at", "1,1,a,x,1", '0,2,"b', 'b",y,2', "1,3,c,z,3"]
    parsed = parse_file(write_lines(tmp_path / "own.csv", rows), OWN)
    assert [row.line for _, block in parsed for row in block.quarantined] == [3, 4]
    assert column(parsed, "shop") == ["a", "c"]


def test_missing_column_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "own.csv", ["clicked,prices,shop,tags,at", "1,1,a,x,1"])
    with pytest.raises(DataError, match=names("price prices")):
        parse_file(path, OWN)


def test_column_with_two_roles_is_refused() -> None:
    columns = ColumnsConfig(label="clicked", dense=["price"], sparse=["price"])
    with pytest.raises(DataError, match=names("price")):
        layout_of(DataConfig(name="own", format="csv", columns=columns))


def test_time_is_read_only_where_rows_are_split_by_it(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "own.csv", ["clicked,price,shop,tags", "1,1,a,x"])
    with pytest.raises(DataError, match=names("at")):
        parse_file(path, OWN)
    assert column(parse_file(path, replace(OWN, split=SplitConfig())), "shop") == ["a"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DataConfig(name="x", columns=OWN_COLUMNS), "criteo_tsv data.columns"),
        (lambda: DataConfig(name="x", split=SplitConfig(kind="time")), "data.columns.timestamp=<column>"),
        (lambda: IdsConfig(kind="hash", hash_size=9, min_frequency=2), "ids.kind=hash"),
        (lambda: IdsConfig(hash_size=9), "ids.hash_size=9 ids.kind=hash"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        build()


def test_parquet_blocks_stay_small_when_rows_are_large(tmp_path: Path) -> None:
    tags = [[f"{i:05d}{j:05d}" for j in range(100)] for i in range(300)]
    table = pa.table({"clicked": [0] * 300, "price": [1] * 300, "shop": ["a"] * 300, "tags": tags, "at": range(300)})
    pq.write_table(table, tmp_path / "own.parquet", use_dictionary=False)
    parsed = parse_file(str(tmp_path / "own.parquet"), OWN_PARQUET, block_bytes=50_000)
    assert max(block.num_rows for block, _ in parsed) < 100
    assert column(parsed, "tags") == tags and column(parsed, "at") == list(range(300))


def test_parquet_rows_with_null_labels_or_times_are_quarantined(tmp_path: Path) -> None:
    table = pa.table(
        {
            "clicked": [True, None, False, True],
            "price": pa.array([1, 2, None, 4], pa.int16()),
            "shop": pa.array(["a", "b", "", None]).dictionary_encode(),
            "tags": [["x"], [], None, ["y", "z"]],
            "at": pa.array([0, 1, 2, None], pa.timestamp("ms")),
        }
    )
    pq.write_table(table, tmp_path / "own.parquet")
    parsed = parse_file(str(tmp_path / "own.parquet"), OWN_PARQUET)
    quarantined = [(row.line, row.reason) for _, rows in parsed for row in rows.quarantined]
    assert quarantined == [(2, "clicked is None, not 0 or 1"), (4, "at is None, not a time")]
    assert column(parsed, "at") == [0, 2000] and column(parsed, "price") == [1.0, None]


def test_parquet_label_that_is_a_date_is_refused(tmp_path: Path) -> None:
    table = pa.table({"clicked": pa.array([1], pa.date32()), "price": [1], "shop": ["a"], "tags": [["x"]], "at": [1]})
    pq.write_table(table, tmp_path / "own.parquet")
    with pytest.raises(DataError, match=names("clicked")):
        parse_file(str(tmp_path / "own.parquet"), OWN_PARQUET)


def test_times_in_every_spelling_are_microseconds_or_whole_numbers() -> None:
    second = 1_574_553_793
    for text in ("2019-11-24 00:03:13", "2019-11-24T00:03:13Z", "2019-11-24 01:03:13+01:00"):
        assert parse_timestamps(pa.array([text])).to_pylist() == [second * 1_000_000]
    assert parse_timestamps(pa.array([str(second)])).to_pylist() == [second]
    assert parse_timestamps(pa.array([second], pa.timestamp("s", "Asia/Tokyo"))).to_pylist() == [second * 1_000_000]


def test_sources_come_in_the_order_of_their_numbers_without_side_files(tmp_path: Path) -> None:
    for name in ("day_10.gz", "day_2", "day_0", ".hidden", "day_2.teacher.parquet", "other"):
        (tmp_path / name).write_text(name)
    assert [s.name for s in find_sources(str(tmp_path))] == ["day_0", "day_2", "day_10.gz", "other"]
    assert [s.name for s in find_sources(f"{tmp_path}/day_*")] == ["day_0", "day_2", "day_10.gz"]
    with pytest.raises(DataError, match=names("other")):
        find_sources(str(tmp_path / "ohter"))


def test_a_file_is_taken_by_its_very_name_though_that_looks_like_a_pattern(tmp_path: Path) -> None:
    for name in ("logs[1].tsv", "logs1.tsv", "what?.tsv"):
        (tmp_path / name).write_text(name)
    assert [s.name for s in find_sources(str(tmp_path / "logs[1].tsv"))] == ["logs[1].tsv"]
    assert [s.name for s in find_sources(str(tmp_path / "what?.tsv"))] == ["what?.tsv"]
    assert [s.name for s in find_sources(str(tmp_path / "logs[0-9].tsv"))] == ["logs1.tsv"]
    (tmp_path / "day[1]").mkdir()
    (tmp_path / "day[1]" / "rows.tsv").write_text("rows")
    assert [s.name for s in find_sources(str(tmp_path / "day[1]"))] == ["rows.tsv"]


def test_two_stars_stand_for_folders_below_folders(tmp_path: Path) -> None:
    for folder in ("", "a", "a/b", "c"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "rows.tsv").write_text(folder)
    found = find_sources(f"{tmp_path}/**/*.tsv")
    assert [s.name for s in found] == ["a/b/rows.tsv", "a/rows.tsv", "c/rows.tsv", "rows.tsv"]


@pytest.mark.parametrize("pattern", ["s3://bucket/day_*/rows.tsv", "s3://bucket/logs/**", "s3://b[12]/logs/rows.tsv"])
def test_a_pattern_that_an_object_store_cannot_answer_is_refused(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source.storage, "is_file", lambda path: False)
    with pytest.raises(DataError, match="only the last part"):
        find_sources(pattern)


def test_digest_sees_a_changed_byte_and_not_a_new_name(tmp_path: Path) -> None:
    content = bytearray(range(256)) * 2_000
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").write_bytes(content)
    content[300_000] ^= 1
    (tmp_path / "c").write_bytes(content)
    a, b, c = (find_sources(str(tmp_path / name))[0].digest for name in "abc")
    assert a == b != c
