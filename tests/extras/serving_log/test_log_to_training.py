"""The commands of docs/do/serving_log.md: what a server logs, with labels that come late, is what prepare and a stream train on."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from pipeline.data.dataset import load_dataset
from pipeline.data.raw.formats.criteo_tsv import criteo_columns
from pipeline.extras.serving_log.join import SUMMARY
from pipeline.extras.serving_log.log_files import read_log
from pipeline.serving.artifact.export import ExportSummary
from tests.extras.stream.following import follow_words, newest_step, start_retrain, values_of
from tests.serving.servers import Server, running
from tests.serving.test_artifacts_served import raw_rows
from tests.support.forks import WarmCommand

pytestmark = pytest.mark.campaign
NUM_REQUESTS, ROWS, WINDOW_S = 401, 2, 3600.0
COLUMNS = criteo_columns()
FORMAT = [
    "data=default", "data.name=joined", "data.format=parquet", "data.columns.label=label",
    f"data.columns.dense=[{','.join(COLUMNS.dense)}]", f"data.columns.sparse=[{','.join(COLUMNS.sparse)}]",
    "data.columns.timestamp=timestamp", "data.split.kind=time",
]  # fmt: skip


def ask_all(server: Server, clicks: Path) -> None:
    rows = raw_rows(clicks, NUM_REQUESTS * ROWS).to_pylist()
    for number in range(NUM_REQUESTS):
        body, headers = {"rows": rows[ROWS * number : ROWS * (number + 1)]}, {"X-Request-ID": f"r{number}"}
        answer = server.client.post(f"{server.url}/score", json=body, headers=headers)
        assert answer.status_code == 200, answer.text


def write_labels(folder: Path, lines: list[str], served_at: dict[str, float], is_late: np.ndarray) -> None:
    """A file with the clicks, of which some come after the window, and one with the other rows."""
    folder.mkdir()
    clicked = np.array([line.startswith("1\t") for line in lines])
    numbers = np.arange(len(lines))
    for name, value, chosen in (("clicks", 1.0, numbers[clicked]), ("views", 0.0, numbers[~clicked][::2])):
        requests = [f"r{number // ROWS}" for number in chosen]
        delays = np.where(is_late[chosen], WINDOW_S + 1, WINDOW_S / 2)
        times = [served_at[request] + delay for request, delay in zip(requests, delays, strict=True)]
        table = pa.table(
            {"request_id": requests, "row": chosen % ROWS, "label": np.full(len(chosen), value), "time": times}
        )
        pa.csv.write_csv(table, folder / f"{name}.csv")


def command(module: str, *words: str) -> None:
    assert WarmCommand(f"pipeline {module}", words, output=(1, 2)).wait(200) == 0


def test_a_stream_of_joined_rows_trains_to_the_bits_of_the_raw_rows(
    small_artifact: ExportSummary, prepared_clicks: str, tmp_path: Path
) -> None:
    clicks = Path(prepared_clicks).parent / "clicks.tsv"
    with clicks.open() as file:
        lines = [next(file).rstrip("\n") for _ in range(NUM_REQUESTS * ROWS)]
    log, joined = tmp_path / "logs/serving", tmp_path / "joined"
    words = [f"observers.log.folder={log}", "observers.log.flush_s=0.5", "server.port=0"]
    with running("pipeline serve", f"artifact={small_artifact.artifact}", *words) as server:
        ask_all(server, clicks)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    served_at = {
        name: at.timestamp()
        for _, _, table in read_log(str(log))
        for name, at in zip(table["log.request_id"].to_pylist(), table["log.time"].to_pylist(), strict=True)
    }
    assert len(served_at) == NUM_REQUESTS
    is_late = np.arange(len(lines)) % 7 == 0
    write_labels(tmp_path / "labels", lines, served_at, is_late)

    join = [f"log={log}", f"labels={tmp_path}/labels", f"output={joined}", f"window_s={WINDOW_S}"]
    command("join_labels", *join)
    assert not list(joined.glob("*.parquet"))
    command("join_labels", *join, f"now={time.time() + WINDOW_S}")
    wanted = [line.startswith("1\t") and not late for line, late in zip(lines, is_late, strict=True)]
    table = pa.concat_tables(pq.read_table(path) for path in sorted(joined.glob("*.parquet")))
    keys = [f"r{number // ROWS}" for number in range(len(lines))]
    assert table["log.request_id"].to_pylist() == keys and table["label"].to_pylist() == wanted
    summary = json.loads((joined / SUMMARY).read_text())
    assert summary["late"] == sum(is_late & [line[0] == "1" for line in lines]) + sum(is_late & _is_viewed(lines))
    assert (summary["rows"], summary["labelled"] + summary["late"], summary["unlogged"]) == (802, _num_labels(lines), 0)

    command("prepare", f"source={joined}", f"data.path={tmp_path}/prepared", *FORMAT)
    splits = load_dataset(f"{tmp_path}/prepared").splits
    assert sum(each.num_rows for each in splits.values()) == 802
    assert sum(each.num_positives for each in splits.values()) == sum(wanted)

    (tmp_path / "raw").mkdir()
    raw = "".join(f"{int(label)}{line[1:]}\n" for label, line in zip(wanted, lines, strict=True))
    (tmp_path / "raw/rows.tsv").write_text(raw)
    for source in (joined, tmp_path / "raw"):
        run = tmp_path / f"run_{source.name}"
        assert start_retrain(follow_words(prepared_clicks, source, run, "stream.idle_s=1")).wait(200) == 0
    one, other = (values_of(tmp_path / f"run_{name}", 8) for name in ("joined", "raw"))
    assert newest_step(tmp_path / "run_joined") == 8 and one.keys() == other.keys()
    assert all((one[key] == other[key]).all() for key in one)


def _is_viewed(lines: list[str]) -> np.ndarray:
    viewed = np.zeros(len(lines), np.bool_)
    viewed[np.flatnonzero([line[0] == "0" for line in lines])[::2]] = True
    return viewed


def _num_labels(lines: list[str]) -> int:
    return sum(line[0] == "1" for line in lines) + int(_is_viewed(lines).sum())
