"""Labels are joined within their window, once, and the rows are a source of prepare and of a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.dataset import load_dataset
from pipeline.data.prepare.run import prepare
from pipeline.extras.serving_log.job import JoinLabelsJob
from pipeline.extras.serving_log.join import SUMMARY, join_labels
from pipeline.extras.serving_log.log_files import About
from pipeline.extras.serving_log.writer import LogWriter
from pipeline.extras.stream.sources.folder import _is_followed
from pipeline.runtime.errors import DataError
from tests.support.messages import mentions

BEGUN = 1_000_000.0
WINDOW_S = 60.0


def write_log(folder: Path, begun: float, requests: list[tuple[str, int]]) -> None:
    """One file: (request, rows); a second apart."""
    names = [name for name, count in requests for _ in range(count)]
    numbers = [number for _, count in requests for number in range(count)]
    times = [int(1e6 * (begun + each)) for each, (_, count) in enumerate(requests) for _ in range(count)]
    table = pa.table(
        {
            "city": pa.array([f"city {len(name)}" for name in names]),
            "price": pa.array([float(number) for number in range(len(names))]),
            "log.request_id": names,
            "log.row": pa.array(numbers, pa.int32()),
            "log.time": pa.array(times, pa.timestamp("us", tz="UTC")),
            "log.artifact": pa.repeat("abc", len(names)),
            "log.delta": pa.array(np.zeros(len(names), np.int32)),
            "log.score": pa.array(np.full(len(names), 0.25, np.float32)),
        }
    )
    writer = LogWriter(str(folder), 1, 1.0, 1 << 30)
    writer.add(About("abc", "run", ["city", "price"], [], [], ["score"]), table)
    writer.flush()


def write_labels(path: Path, labels: list[tuple[str, float, float]], row: list[int] | None = None) -> str:
    names, values, times = zip(*labels, strict=True)
    columns: dict[str, Any] = {"request_id": names, "label": values, "time": times} | ({"row": row} if row else {})
    pq.write_table(pa.table(columns), path)
    return str(path)


def _job(folder: Path, labels: str, now: float, *words: str) -> JoinLabelsJob:
    given = [f"log={folder / 'log'}", f"labels={labels}", f"output={folder / 'joined'}", f"now={now}"]
    return load_config(JoinLabelsJob, [*given, f"window_s={WINDOW_S}", *words])


def test_a_label_counts_within_its_window_and_a_file_is_joined_once(tmp_path: Path) -> None:
    write_log(tmp_path / "log", BEGUN, [("a", 1), ("b", 1), ("c", 1), ("d", 1)])
    write_log(tmp_path / "log", BEGUN + 500, [("e", 1)])
    labels = write_labels(
        tmp_path / "labels.parquet",
        [
            ("a", 1.0, BEGUN + 60),
            ("b", 1.0, BEGUN + 62),  # a second too late
            ("c", 1.0, BEGUN + 1),  # before its request
            ("d", 0.0, BEGUN + 9), ("d", 1.0, BEGUN + 5),  # the largest counts
            ("e", 1.0, BEGUN + 501), ("unlogged", 1.0, BEGUN),
        ],
    )  # fmt: skip
    found = join_labels(_job(tmp_path, labels, BEGUN + 64))
    assert (found.files, found.rows, found.labelled, found.pending_rows) == (1, 4, 2, 1)
    assert (found.late, found.early, found.unlogged) == (1, 1, 2)
    again = join_labels(_job(tmp_path, labels, BEGUN + 600))
    assert (again.files, again.rows, again.labelled, again.pending_rows, again.unlogged) == (1, 1, 1, 0, 1)
    first, second = (pq.read_table(path) for path in sorted((tmp_path / "joined").glob("*.parquet")))
    assert first["label"].to_pylist() == [1.0, 0.0, 0.0, 1.0] and second["label"].to_pylist() == [1.0]
    assert first["city"].to_pylist() == ["city 1"] * 4 and first["timestamp"][0].as_py().timestamp() == BEGUN
    summary = json.loads((tmp_path / "joined" / SUMMARY).read_text())
    assert (summary["recent_rows"], summary["label_rate"], summary["mean_score"]) == (5, 0.6, 0.25)
    positives = join_labels(_job(tmp_path, labels, BEGUN + 600, "negatives=false", f"output={tmp_path / 'positives'}"))
    assert positives.rows == positives.labelled == 3


def test_labels_of_requests_with_several_rows_need_the_rows_number(tmp_path: Path) -> None:
    write_log(tmp_path / "log", BEGUN, [("a", 3), ("b", 1)])
    both = [("a", 1.0, BEGUN + 1), ("b", 1.0, BEGUN + 2)]
    with pytest.raises(DataError) as error:
        join_labels(_job(tmp_path, write_labels(tmp_path / "labels.parquet", both), BEGUN + 600))
    assert mentions(str(error.value), "'a' 'row' row_column")
    labels = write_labels(tmp_path / "labels.parquet", both, [2, 0])
    join_labels(_job(tmp_path, labels, BEGUN + 600))
    (path,) = (tmp_path / "joined").glob("*.parquet")
    assert pq.read_table(path)["label"].to_pylist() == [0.0, 0.0, 1.0, 1.0]


def test_joined_rows_are_a_source_of_prepare_and_of_a_stream(tmp_path: Path) -> None:
    write_log(tmp_path / "log", BEGUN, [(f"request {number}", 1) for number in range(400)])
    clicks = [(f"request {number}", 1.0, BEGUN + number + 3) for number in range(0, 400, 4)]
    join_labels(_job(tmp_path, write_labels(tmp_path / "labels.parquet", clicks), BEGUN + 600))
    data = [
        "data=default", "data.name=joined", "data.columns.label=label", "data.columns.dense=[price]", "data.columns.sparse=[city]", "data.format=parquet",
        "data.columns.timestamp=timestamp", "data.split.kind=time",
    ]  # fmt: skip
    words = [f"source={tmp_path / 'joined'}", f"data.path={tmp_path / 'prepared'}", *data]
    prepared = load_dataset(prepare(load_config(PrepareJob, words)).path)
    assert sum(split.num_rows for split in prepared.splits.values()) == 400
    assert sum(split.num_positives for split in prepared.splits.values()) == 100
    followed = [path.name for path in (tmp_path / "joined").iterdir() if _is_followed(path.name)]
    assert len(followed) == 1 and SUMMARY not in followed


@pytest.mark.parametrize(
    ("columns", "words", "said"),
    [
        ({"request": ["a"], "label": [1], "time": [1]}, [], "'request_id' id_column"),
        ({"request_id": ["a"], "label": ["yes"], "time": [1]}, [], "'label' number"),
        ({"request_id": ["a"], "label": [1], "time": [None]}, [], "missing finite"),
        ({"request_id": ["a"], "label": [1], "time": [1]}, ["label=city"], "'city' label="),
    ],
)
def test_bad_labels_are_refused(tmp_path: Path, columns: dict[str, Any], words: list[str], said: str) -> None:
    write_log(tmp_path / "log", BEGUN, [("a", 1)])
    path = tmp_path / "labels.csv"
    pa.csv.write_csv(pa.table(columns), path)
    with pytest.raises(DataError) as error:
        join_labels(_job(tmp_path, str(path), BEGUN + 600, *words))
    assert mentions(str(error.value), said)
