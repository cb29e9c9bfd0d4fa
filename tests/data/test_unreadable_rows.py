"""Rows that cannot be read: too many end a preparation early, and of a wide file only suspects are looked at one by one."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.data.prepare import staging
from pipeline.data.prepare.limit import most_rows_to_come
from pipeline.data.raw import lines as lines_module
from pipeline.data.raw import rows as raw_rows
from pipeline.data.raw.blocks import Block, Source
from pipeline.data.raw.layout import Layout
from pipeline.runtime.errors import DataError
from tests.data.sources import prepare_rows, rows_of, write_lines
from tests.support.messages import names


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
    early = staging.refuse_early
    monkeypatch.setattr(
        staging, "refuse_early", lambda *given: (read.append(given[2][-1].num_source_rows), early(*given))
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
        write_lines(source, lines)
    columns = {"label": "y", "dense": ["x"], "sparse": ["c"]}
    with pytest.raises(DataError, match=names("max_quarantined_fraction 0.10% y")):
        prepare_rows(tmp_path, source, columns, format=kind.removesuffix(".gz"), max_quarantined_fraction=0.001)
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
    "label": ["2", "", "yes"],
    "d0": ["n.a.", "1e50", "0x1", "--1"],
    "time": ["", "noon"],
    "c0": ['a"b', '"', "\r", "\udcff", '",x', "a,b"],
}


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
    one_by_one = lines_module.why_no_row
    looked_at: list[bytes] = []
    alone = [
        raw_rows.parse_text(layout, tuple(WIDE), Block(1, 0, 1, line)).quarantined
        for line in text.removesuffix(b"\n").split(b"\n")
    ]
    monkeypatch.setattr(lines_module, "why_no_row", lambda *given: (looked_at.append(given[2]), one_by_one(*given))[1])
    parsed = raw_rows.parse_text(layout, tuple(WIDE), Block(1, 0, len(lines), text))
    assert {row.line - 1: row.reason for row in parsed.quarantined} == {
        i: found[0].reason for i, found in enumerate(alone) if found
    }
    assert parsed.kept.tolist() == [i for i, found in enumerate(alone) if not found]
    assert len(parsed.quarantined) > 25 and len(looked_at) <= len(parsed.quarantined) + 10


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "dictionary"])
def test_numbers_that_a_parquet_file_has_as_text_are_read_as_in_text_files(tmp_path: Path, kind: str) -> None:
    """As exports without types write them, and as `inspect` takes them."""
    source = tmp_path / "rows.parquet"
    columns = {"label": "y", "dense": ["x"], "sparse": ["c"], "weight": "w", "null_values": ["NULL"]}
    texts = {
        "y": ["1", "0", " 1.0", "1", "2", "0", "1"],
        "x": ["0.5", "NULL", "-1e1", "", "1", "dear", "3"],
        "w": ["1", "2", "0.5", "1", "1", "1", "heavy"],
    }
    arrays = {name: pa.array(values) for name, values in texts.items()}
    if kind == "dictionary":
        arrays = {name: array.dictionary_encode() for name, array in arrays.items()}
    else:
        arrays = {name: array.cast(kind) for name, array in arrays.items()}
    pq.write_table(pa.table(arrays | {"c": pa.array(["a"] * 7)}), source)
    dataset = prepare_rows(
        tmp_path, source, columns, format="parquet", dense_transform="none", max_quarantined_fraction=0.5
    ).dataset
    rows = rows_of(tmp_path, dataset)
    assert (rows["y"], rows["x"], rows["w"]) == ([1, 0, 1, 1], [0.5, 0.0, -10.0, 0.0], [1.0, 2.0, 0.5, 1.0])
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "data" / "quarantine.jsonl").read_text().splitlines()]
    assert [each.split(" is ")[0] for each in reasons] == ["y", "x", "w"] and "'dear'" in reasons[1]
