"""Labels as people have them: texts, numbers that a threshold divides, and cells that are no label."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.columns import ColumnsConfig, LabelConfig
from pipeline.runtime.errors import ConfigError, DataError
from tests.data.sources import prepare_rows, rows_of, write_lines
from tests.support.messages import names

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
        write_lines(source, ["y,c,stars", *TEXT_ROWS])
    else:
        write_lines(source, [json.dumps(row) for row in table.to_pylist()])
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
        summary = prepare_rows(tmp_path / name, source, {**columns, "sparse": ["c"]}, **settings)
        rows = rows_of(tmp_path / name, summary.dataset)
        assert {label: rows[label] for label in expected} == expected, name
        assert (
            prepare_rows(tmp_path / name, source, {**columns, "sparse": ["c"]}, **settings).dataset == summary.dataset
        )
    reasons = "".join(path.read_text() for path in (tmp_path / "text" / "data").rglob("*.jsonl"))
    assert "y is 'maybe', not one of 'yes', 'no'" in reasons
    for other in ({"yes": 0, "no": 1}, {}):
        with pytest.raises(DataError, match=names("label_values other")):
            prepare_rows(tmp_path / "text", source, {"label": "y", "label_values": other, "sparse": ["c"]}, **settings)


@pytest.mark.parametrize(
    "setting", [{"label_values": {"yes": 1, "no": 0}}, {"timestamp": "t"}, {"list_separator": "json"}]
)
def test_rows_go_to_the_quarantine_also_where_a_block_has_no_other(tmp_path: Path, setting: dict[str, Any]) -> None:
    source = write_lines(tmp_path / "rows.csv", ["y,c,m,t", *["perhaps,a,?,never"] * 5])
    columns = {"label": "y", "sparse": ["c"], "multi_hot": ["m"], **setting}
    with pytest.raises(DataError, match=names("5 of 5 line 2 y 'perhaps'")):
        prepare_rows(tmp_path, source, columns)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"label_values": {"yes": 1}}, "labels.values names only 1"),
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
    with pytest.raises(DataError, match=names("2 of 2 y 'yes' data.columns.label_values")):
        prepare_rows(tmp_path, source, {"label": "y", "sparse": ["c"]}, format="parquet")
