"""A raw file is looked at before it is prepared, and the config that is proposed reads it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.cli.command_line import load_config
from pipeline.cli.inspect import inspect
from pipeline.config.jobs.prepare import InspectJob, PrepareJob
from pipeline.data.inspect.profile import profile
from pipeline.data.inspect.propose import as_text, propose
from pipeline.data.prepare.run import prepare
from pipeline.runtime.errors import ConfigError, DataError
from tests.support.messages import mentions, names

NUM_ROWS = 3000


def _rows() -> dict[str, list[str]]:
    draw = np.random.default_rng(0)
    clicks = draw.integers(0, 2, NUM_ROWS)
    return {
        "row": [str(number) for number in range(NUM_ROWS)],
        "click": [str(click) for click in clicks],
        "shown_at": [f"2026-01-{1 + number // 200:02d} 10:00:{number % 60:02d}" for number in range(NUM_ROWS)],
        "user_id": [str(user) for user in draw.integers(1000, 1100, NUM_ROWS)],
        "price": [f"{price:.2f}" for price in draw.lognormal(2, 1.5, NUM_ROWS)],
        "views": [str(views) for views in draw.integers(0, 5000, NUM_ROWS)],
        "genres": ["|".join(draw.choice(["a", "b", "c"], 2, replace=False)) for _ in range(NUM_ROWS)],
        "country": ["" if number % 3 else f"c{number % 7}" for number in range(NUM_ROWS)],
        "dwell": [str(click * 10 + draw.integers(1, 5)) for click in clicks],
        "request": [f"r{number}x" for number in draw.permutation(NUM_ROWS)],
        "site": ["one"] * NUM_ROWS,
    }


def _write(path: Path, delimiter: str = ",") -> str:
    rows = _rows()
    lines = [delimiter.join(rows), *(delimiter.join(row) for row in zip(*rows.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


ROLES = {
    "row": "left out",
    "click": "label",
    "shown_at": "timestamp",
    "user_id": "sparse",
    "price": "dense",
    "views": "dense",
    "genres": "multi_hot",
    "country": "sparse",
    "dwell": "left out",
    "request": "left out",
    "site": "left out",
}


@pytest.mark.long
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_each_column_gets_its_role_and_what_tells_the_label_is_left_out(tmp_path: Path, delimiter: str) -> None:
    found = profile(_write(tmp_path / "rows.csv", delimiter), None, 10_000)
    proposal = propose(found, "clicks")
    assert {name: role for name, (role, _) in proposal.roles.items()} == ROLES
    assert "it alone tells the label (AUC 1.000)" in proposal.roles["dwell"][1]
    assert proposal.config["columns"] == {
        "label": "click",
        "dense": ["price", "views"],
        "sparse": ["user_id", "country"],
        "multi_hot": ["genres"],
        "timestamp": "shown_at",
    }
    assert (proposal.config["split"]["kind"], proposal.config["group_column"]) == ("time", "user_id")
    assert proposal.config.get("delimiter") == (";" if delimiter == ";" else None)
    assert any("country: 67% of the rows have no value" in remark for remark in proposal.remarks)
    (country,) = (column for column in found.columns if column.name == "country")
    assert (country.distinct, round(country.missing, 2)) == (7, 0.67)
    assert "0.5" in as_text(proposal, found)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_typed_files_are_looked_at_as_text(tmp_path: Path, kind: str) -> None:
    rows = _rows()
    typed = {
        **rows,
        "click": list(map(int, rows["click"])),
        "price": list(map(float, rows["price"])),
        "genres": [genres.split("|") for genres in rows["genres"]],
    }
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table(typed), path)
    else:
        path.write_text(
            "".join(json.dumps(dict(zip(typed, row, strict=True))) + "\n" for row in zip(*typed.values(), strict=True))
        )
    proposal = propose(profile(str(path), None, 10_000), "clicks")
    assert {name: role for name, (role, _) in proposal.roles.items()} == ROLES
    assert proposal.config["format"] == kind


def test_the_written_file_is_a_data_config_and_says_what_it_left_out(tmp_path: Path) -> None:
    source = _write(tmp_path / "My clicks.csv")
    said = inspect(load_config(InspectJob, [f"source='{source}'", f"output={tmp_path}/c.yaml"]))
    text = (tmp_path / "c.yaml").read_text()
    assert yaml.safe_load(text)["name"] == "my_clicks" and "# Left out: dwell" in text
    assert "next        python -m pipeline init" in said


def test_a_file_without_a_clear_label_asks_for_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    draw = np.random.default_rng(0).integers(0, 2, (200, 2))
    path.write_text("a,b,c\n" + "".join(f"{a},{b},{number}\n" for number, (a, b) in enumerate(draw)))
    with pytest.raises(DataError, match=names("which column is the label a b label=")):
        profile(str(path), None, 1000)
    assert profile(str(path), "b", 1000).label == "b"
    with pytest.raises(DataError, match=names("label=c 0 1")):
        profile(str(path), "c", 1000)
    with pytest.raises(DataError, match=names("label=d no such column")):
        profile(str(path), "d", 1000)
    with pytest.raises(DataError, match="no file"):
        profile(str(tmp_path / "absent.csv"), None, 1000)
    with pytest.raises(ConfigError, match=names("output=x.txt .yaml")):
        load_config(InspectJob, [f"source={path}", "output=x.txt"])


@pytest.mark.parametrize(
    ("texts", "words", "columns", "rate"),
    [
        (["1", "3", "4", "5"], ["label=rating", "label_threshold=4"], {"label": "rating", "label_threshold": 4.0}, 0.5),
        (["no", "yes", "no", "no"], ["label=rating"], {"label": "rating", "label_values": {"no": 0, "yes": 1}}, 0.25),
        (
            ["buy", "go", "", "go"],
            ["label=rating", "label_values={buy: 1, go: 0}"],
            {"label": "rating", "label_values": {"buy": 1, "go": 0}},
            1 / 3,
        ),
    ],
    ids=["stars", "yes and no", "texts"],
)
def test_a_label_that_is_not_0_and_1_is_looked_at_by_what_it_means(
    tmp_path: Path, texts: list[str], words: list[str], columns: dict[str, Any], rate: float
) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("rating,user\n" + "".join(f"{texts[row % 4]},u{row % 7}\n" for row in range(400)))
    path = tmp_path / "conf" / "data" / "rows.yaml"
    said = inspect(load_config(InspectJob, [f"source={source}", f"output={path}", *words]))
    config = yaml.safe_load(path.read_text())
    assert config["columns"] == {**columns, "sparse": ["user"]}
    assert f"rate {rate:.4f}" in said
    words = [f"--config-dir={tmp_path}/conf", "data=rows", f"source={source}", f"data.path={tmp_path}/rows"]
    job = load_config(PrepareJob, [*words, "data.max_quarantined_fraction=0.5"])
    assert prepare(job).dataset.accepted_rows == 400 - 100 * texts.count("")


@pytest.mark.parametrize(
    ("texts", "words", "says"),
    [
        (["1", "3", "4", "5"], ["label=rating"], "label=rating 4 numbers 1 5 label_threshold=4"),
        (["buy", "go", "go"], ["label=rating"], "label=rating 2 'label_values={go: 1, buy: 0}'"),
        (["1", "3", "4", "5"], [], "rating user label_threshold=<number>"),
        (["1", "0"], ["label_threshold=4"], "label=<column>"),
        (["1", "0"], ["label=ratings"], "label=ratings 'rating'"),
    ],
)
def test_a_label_whose_meaning_is_not_known_is_asked_for(
    tmp_path: Path, texts: list[str], words: list[str], says: str
) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("rating,user\n" + "".join(f"{texts[row % len(texts)]},u{row % 7}\n" for row in range(420)))
    with pytest.raises(DataError, match=names(says)):
        inspect(load_config(InspectJob, [f"source={source}", f"output={tmp_path}/c.yaml", *words]))


@pytest.mark.long
def test_histories_groups_and_columns_that_prepare_refuses_are_found(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    products = [f"p{each}" for each in draw.integers(0, 60, NUM_ROWS)]
    lines = ["click,basket,product,recent,product,User,user,purchase"]
    for row in range(NUM_ROWS):
        recent = "|".join(products[each] for each in draw.integers(0, NUM_ROWS, 3))
        lines.append(
            f"{draw.integers(0, 2)},b{row // 4},{products[row]},{recent},x{row % 9},u{row % 50},v{row % 40},{row % 3 // 2}"
        )
    lines[0] = lines[0].replace(",product,User", ",item,User")
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    found = profile(str(path), "click", 10_000)
    proposal = propose(found, "rows")
    roles = {name: role for name, (role, _) in proposal.roles.items()}
    assert (roles["recent"], roles["basket"], roles["User"], roles["user"]) == (
        "sequence",
        "left out",
        "sparse",
        "sparse",
    )
    assert proposal.config["columns"]["sequence"] == {"recent": {"max_length": 50, "shares": "product"}}
    assert proposal.config["columns"]["labels"] == {"click": {}, "purchase": {}}
    path.write_text("\n".join([lines[0].replace("user", "User"), *lines[1:]]) + "\n")
    why = propose(profile(str(path), "click", 10_000), "rows").roles
    assert why["User"][0] == "left out" and "2 columns" in why["User"][1]
    table = pa.table({"click": [0, 1] * 20, "id": pa.array([b"0123456789abcdef"] * 40, pa.binary(16)), "c": ["a", "b"] * 20,
                      "v": pa.array([[0.5, row, 2.5, 1.0] for row in range(40)])})  # fmt: skip
    pq.write_table(table, tmp_path / "rows.parquet")
    why = propose(profile(str(tmp_path / "rows.parquet"), "click", 100), "rows").roles
    assert {name: why[name][0] for name in ("id", "v")} == {"id": "left out", "v": "left out"}
    assert "UUID" in why["id"][1] and "vector of 4" in why["v"][1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "values", "role", "why", "config"),
    [
        ("genres", ["Comedy Drama", "Drama", "War Comedy"], "multi_hot", "' '", {"list_separator": " "}),
        ("m", ["a,b", "b,c,a", "c,b", "c,a", "a,c", "b,a", "c"], "multi_hot", "','", {"list_separator": ","}),
        ("m", ["[1, 2]", "[2]", "[]"], "multi_hot", "json", {"list_separator": "json"}),
        ("m", ["a:0.5|b:2", "b:1"], "multi_hot", "|", {"weighted": ["m"]}),
        ("city", ["New York", "San Jose", "Los Angeles"], "sparse", "3 values", {}),
        ("price", [*(str(n / 8) for n in range(30)), "NA"], "dense", "decimal", {"null_values": ["NA"]}),
        ("price", [*(str(n / 8) for n in range(30)), "-"], "dense", "decimal", {"null_values": ["-"]}),
        ("c", ["a", "NULL", "b"], "sparse", "2 values", {"null_values": ["NULL"]}),
        ("c", ["NA", "FR", "IT"], "sparse", "3 values", {}),  # Namibia
        ("price", [f"{n},5" for n in range(30)], "left out", "numbers text 1234.5", {}),
        ("price", [f"${n}.50" for n in range(30)], "left out", "numbers text 1234.5", {}),
        ("price", [f"{n} %" for n in range(30)], "left out", "numbers text", {}),
        ("price", [f"1_{n:03d}" for n in range(30)], "sparse", "30 values", {}),  # prepare reads no such number
        ("sample_weight", ["1", "2.5", "0"], "weight", "mean", {"weight": "sample_weight"}),
        ("ip", [f"10.0.0.{n}" for n in range(40)], "sparse", "40 values", {}),
        ("version", ["1.2", "1.10", "2.0"], "dense", "decimal", {}),
    ],
)
def test_a_column_is_proposed_as_prepare_can_read_it(
    tmp_path: Path, name: str, values: list[str], role: str, why: str, config: dict[str, Any]
) -> None:
    """The role of one column among a label and a category, and the config, which prepare reads."""
    draw = np.random.default_rng(1)
    clicks, cells = draw.integers(0, 2, 400), draw.choice(values, 400)
    lines = [
        f"click;u;{name}",
        *(f"{click};u{row % 9};{cell}" for row, (click, cell) in enumerate(zip(clicks, cells, strict=True))),
    ]
    source = tmp_path / "rows.csv"
    source.write_text("\n".join([*lines, ""]))
    proposal = propose(profile(str(source), "click", 10_000), "rows")
    found, reason = proposal.roles[name]
    assert found == role and mentions(reason, why)
    columns = proposal.config["columns"]
    assert {
        key: value for key, value in columns.items() if key not in ("label", "dense", "sparse", "multi_hot")
    } == config
    _prepare(tmp_path, proposal.config, source)


def _prepare(tmp_path: Path, config: dict[str, Any], source: Path, rows: int = 400) -> None:
    """Check that prepare reads all rows of the source with a proposed config."""
    path = tmp_path / "conf" / "data" / "rows.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump(config))
    words = [f"--config-dir={tmp_path}/conf", "data=rows", f"source={source}", f"data.path={tmp_path}/rows"]
    assert prepare(load_config(PrepareJob, words)).dataset.accepted_rows == rows


def test_columns_that_determine_the_label_are_left_out_and_second_labels_are_labels(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    bought = (draw.random(4000) < 0.3).astype(int)
    coupon = bought * (draw.random(4000) < 0.2)
    columns = {
        "bought": bought,
        "used_coupon": coupon,
        "purchase": draw.integers(0, 2, 4000),
        "state": np.where(coupon, "returned", draw.choice(["a", "b", "c"], 4000)),
        "copy": np.where(bought, "yes", "no"),
        "paid_at": np.where(bought, "2026-01-01", ""),
        "amount": np.where(bought, np.char.mod("%.2f", draw.random(4000)), ""),
        "user": np.where(draw.random(4000) < 0.03, "bot", np.char.mod("u%d", draw.integers(0, 300, 4000))),
    }
    columns["bought"] = np.where(columns["user"] == "bot", 0, bought)
    for name in ("used_coupon", "amount", "paid_at", "copy", "state"):
        columns[name] = np.where(columns["user"] == "bot", columns[name][bought == 0][0], columns[name])
    source = tmp_path / "rows.csv"
    rows = zip(*(column.astype(str) for column in columns.values()), strict=True)
    source.write_text("\n".join([",".join(columns), *map(",".join, rows), ""]))
    proposal = propose(profile(str(source), "bought", 10_000), "rows")
    roles = {name: role for name, (role, _) in proposal.roles.items()}
    assert roles == {
        "bought": "label", "used_coupon": "label", "purchase": "label", "state": "left out", "copy": "left out",
        "paid_at": "left out", "amount": "left out", "user": "sparse",
    }  # fmt: skip
    assert mentions(proposal.roles["state"][1], "every row 'returned' label 1 rows rate")
    assert (
        mentions(proposal.roles["amount"][1], "row with a value label 1")
        or "without a value" in proposal.roles["amount"][1]
    )
    assert mentions(proposal.roles["used_coupon"][1], "1 only where bought is 1")
    assert any("user" in remark and "'bot'" in remark for remark in proposal.remarks)
    assert proposal.config["columns"]["labels"] == {"bought": {}, "used_coupon": {}, "purchase": {}}
    assert proposal.config["group_column"] == "user"
    _prepare(tmp_path, proposal.config, source, 4000)


def test_histories_of_equal_lengths_are_beside_each_other(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    items = draw.integers(0, 40, 400)
    lines = ["click\titem\tgroup\titems\tgroups"]
    for row, item in enumerate(items):
        past = items[max(0, row - 1 - row % 4) : row]
        lines.append(
            f"{draw.integers(0, 2)}\ti{item}\tg{item % 7}\t{'|'.join(f'i{each}' for each in past)}\t{'|'.join(f'g{each % 7}' for each in past)}"
        )
    source = tmp_path / "rows.tsv"
    source.write_text("\n".join([*lines, ""]))
    proposal = propose(profile(str(source), "click", 10_000), "rows")
    assert proposal.config["columns"]["sequence"] == {
        "items": {"max_length": 50, "shares": "item"}, "groups": {"beside": "items", "shares": "group"},
    }  # fmt: skip
    _prepare(tmp_path, proposal.config, source)


@pytest.mark.long
@pytest.mark.parametrize(
    ("delimiter", "value", "encoding", "config"),
    [
        (",", "é", "utf-16-le", {"encoding": "utf-16-le"}),
        (",", "é", "utf-16", {"encoding": "utf-16"}),
        (",", "é", "utf-32", {"encoding": "utf-32"}),
        (",", "é", "latin-1", {"encoding": "latin-1"}),
        (",", "é", "utf-8-sig", {}),
        (",", '"say \\"a, b\\""', "utf-8", {"quotes": "backslash"}),
        (",", '"say ""a, b"""', "utf-8", {}),
        ("::", "a", "utf-8", {"delimiter": "::"}),
        ("\x01", "a", "utf-8", {"delimiter": "\x01"}),
        (";", "a", "utf-8", {"delimiter": ";"}),
        ("\t", "a", "utf-8", {"format": "tsv"}),
    ],
    ids=["utf-16-le", "utf-16", "utf-32", "latin-1", "mark", "spark", "quotes", "::", "hive", ";", "tab"],
)
def test_text_of_every_kind_is_proposed_as_it_is(
    tmp_path: Path, delimiter: str, value: str, encoding: str, config: dict[str, Any]
) -> None:
    has_header = delimiter not in (";", "\t")
    rows = [f"{click}{delimiter}{cell}" for cell in (value, "b") for click in (0, 1)] * 100
    source = tmp_path / "rows.csv"
    source.write_bytes("\r\n".join([f"click{delimiter}c"] * has_header + [*rows, ""]).encode(encoding))
    proposal = propose(profile(str(source), None, 10_000), "rows")
    expected = {"format": "csv", **config} | ({} if has_header else {"header": ["column_0", "column_1"]})
    keys = ("format", "encoding", "quotes", "delimiter", "header")
    assert {key: value for key, value in proposal.config.items() if key in keys} == expected
    _prepare(tmp_path, proposal.config, source)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rows.csv", b"click,u\r1,a\r0,b\r", "carriage tr"),
        ("rows.csv.gz", gzip.compress(b"click,u\n" + bytes(range(48, 120)) * 99)[:-20], "rows.csv.gz"),
        ("rows.csv", b"# exported\nclick,u\n1,a\n0,b\n", "1 cells 2 columns"),
        ("rows.csv", b'click,u\n1,"a\nb"\n0,"c\nd"\n', "quote not closed"),
        ("rows.json", b'[{"click": 1},\n{"click": 0}]', "JSON object jq"),
    ],
)
def test_a_file_that_has_no_rows_as_lines_is_refused_with_the_reason(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=names(says)):
        profile(str(tmp_path / name), "click", 100)


def test_hexadecimal_ids_are_no_times(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("click,u\n" + "".join(f"{row * row % 2},0x{row % 30:x}\n" for row in range(400)))
    assert propose(profile(str(tmp_path / "rows.csv"), None, 1000), "rows").roles["u"][0] == "sparse"
