"""A server's log has what it answered, and the verb skew computes every score again, to the bit."""

from __future__ import annotations

import json
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.command_line import load_config
from pipeline.extras.publish.publish import publish
from pipeline.extras.serving_log import log_files
from pipeline.extras.serving_log.job import SkewJob
from pipeline.extras.serving_log.log_files import About, read_log
from pipeline.extras.serving_log.observers import log as observer
from pipeline.extras.serving_log.observers.log import LogSettings
from pipeline.extras.serving_log.replay import batches
from pipeline.extras.serving_log.skew import describe, skew
from pipeline.extras.serving_log.writer import LogWriter
from pipeline.runtime.errors import ConfigError, DataError, ServingError
from pipeline.serving.artifact.export import ExportSummary
from pipeline.serving.http.batching import ServerMetrics
from pipeline.serving.http.observers import Answered
from pipeline.serving.scoring.encoded import EncodedSpan
from pipeline.serving.scoring.load import find_folder
from tests.extras.publish.test_deltas import export_step, job_of
from tests.extras.serving_log.test_compare_rows import answered_requests, logged
from tests.serving.servers import Server, running
from tests.serving.test_artifacts_served import raw_rows
from tests.serving.test_switching import point, wait_until
from tests.support.messages import mentions


def _serve(artifact: Path | str, folder: Path, *words: str) -> Any:
    options = [
        "server.port=0",
        "server.watch_s=0.05",
        f"observers.log.folder={folder}",
        "batching.latency_budget_ms=60000",
    ]
    return running("pipeline serve", f"artifact={artifact}", *options, *words)


def _ask(server: Server, rows: list[dict[str, Any]], name: str) -> list[float]:
    """The scores of a request; every third one is of a user with items."""
    body: dict[str, Any] = {"rows": rows}
    if int(name.rpartition("-")[2]) % 3 == 0:
        user = {key: value for key, value in rows[0].items() if key.startswith("int_")}
        items = [{key: value for key, value in row.items() if not key.startswith("int_")} for row in rows]
        body = {"user": user, "items": items}
    answer = server.client.post(f"{server.url}/score", json=body, headers={"X-Request-ID": name})
    assert answer.status_code == 200 and answer.headers["x-request-id"] == name
    return answer.json()["scores"]


def _ask_many(server: Server, rows: list[dict[str, Any]], count: int, prefix: str) -> dict[str, list[float]]:
    def ask(number: int) -> tuple[str, list[float]]:
        name, begin = f"{prefix}-{number}", (number * 7) % (len(rows) - 20)
        return name, _ask(server, rows[begin : begin + 1 + number % 9], name)

    with ThreadPoolExecutor(4) as pool:
        return dict(pool.map(ask, range(count)))


def _logged_scores(folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for _, _, table in read_log(str(folder)) if any(folder.glob("*.parquet")) else ():
        for name, score in zip(table[log_files.REQUEST_ID].to_pylist(), table["log.score"].to_pylist(), strict=True):
            found.setdefault(name, []).append(score)
    return found


def kill_server(server: Server) -> None:
    """Kill it, and wait until its log's process has written what was sent."""
    (writer,) = psutil.Process(server.process.pid).children()
    server.process.kill()
    server.process.wait()
    writer.wait(300)


def _certificate(artifact: Path | str, folder: Path, data: str, *words: str) -> dict[str, Any]:
    return skew(load_config(SkewJob, [f"artifact={artifact}", f"log={folder}", f"data_path={data}", *words]))


@pytest.mark.long
def test_each_answer_is_logged_and_each_score_is_computed_again(
    small_artifact: ExportSummary, prepared_clicks: str, tmp_path: Path
) -> None:
    rows = raw_rows(Path(prepared_clicks).parent / "clicks.tsv", 400).to_pylist()
    folder, output = tmp_path / "log", tmp_path / "skew.json"
    with _serve(small_artifact.artifact, folder) as server:
        answered = _ask_many(server, rows, 60, "mine")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    assert _logged_scores(folder) == answered
    found = _certificate(small_artifact.artifact, folder, prepared_clicks, f"output={output}", "max_psi=9")
    num_rows = sum(map(len, answered.values()))
    assert (found["requests"], found["rows"], found["passed"]) == (60, num_rows, True)
    replayed = found["replay"]
    assert replayed["equal_rows"] == replayed["equal_scores"] == replayed["scores"] == num_rows
    assert json.loads(output.read_text())["replay"]["equal_scores"] == num_rows and "no skew" in describe(found)
    # One bit of one score, and one id: each is found.
    (path,) = folder.iterdir()
    table = pq.read_table(path)
    scores = table["log.score"].to_numpy().copy()
    scores[5:6].view(np.uint32)[:] ^= 1
    changed = table.set_column(table.schema.get_field_index("log.score"), "log.score", pa.array(scores))
    ids = [[each[0] + 1] if row == 7 else each for row, each in enumerate(table["log.ids.cat_3"].to_pylist())]
    place = table.schema.get_field_index("log.ids.cat_3")
    changed = changed.set_column(place, "log.ids.cat_3", pa.array(ids, pa.list_(pa.int64())))
    pq.write_table(changed, path)
    found = _certificate(small_artifact.artifact, folder, prepared_clicks, "max_psi=9")
    replayed = found["replay"]
    assert replayed["differing"] == {"cat_3": 1, "score": 1} and replayed["equal_scores"] == num_rows - 1
    assert 0 < replayed["largest_difference"] < 1e-6 and not found["passed"]
    assert "cat_3 (1 rows)" in describe(found)


@pytest.mark.long
def test_scores_are_reproduced_over_a_delta_a_switch_and_kill_9(
    small_run: Path, small_artifact: ExportSummary, prepared_clicks: str, tmp_path: Path
) -> None:
    rows = raw_rows(Path(prepared_clicks).parent / "clicks.tsv", 400).to_pylist()
    artifacts, folder, link = tmp_path / "artifacts", tmp_path / "log", tmp_path / "current"
    first = Path(export_step(small_run, 10, artifacts / "first"))
    second = Path(shutil.copytree(small_artifact.artifact, artifacts / "second"))
    point(link, first)
    with _serve(link, folder, "observers.log.flush_s=0.2") as server:
        answered = _ask_many(server, rows, 40, "first")
        publish(job_of(first), find_folder)
        wait_until(lambda: server.metric("delta_sequence") == 1)
        answered |= _ask_many(server, rows, 40, "delta")
        point(link, second)
        wait_until(lambda: server.metric("artifact_switches_total") == 1)
        answered |= _ask_many(server, rows, 40, "second")
        wait_until(lambda: len(_logged_scores(folder)) == 120)
        asked_last = _ask_many(server, rows, 9, "last")
        kill_server(server)
    logged = _logged_scores(folder)
    assert answered.items() <= logged.items() <= (answered | asked_last).items()
    found = _certificate(artifacts, folder, prepared_clicks, "max_psi=9")
    assert found["passed"] and found["replay"]["equal_scores"] == found["rows"] == sum(map(len, logged.values()))
    deltas = sorted(sorted(each) for each in found["artifacts"].values())
    assert deltas == [["0"], ["0", "1"]]
    with pytest.raises(ServingError) as error:
        _certificate(second, folder, prepared_clicks)
    assert mentions(str(error.value), "the log has rows of artifact registry")


@pytest.mark.long
def test_a_killed_process_of_the_log_is_counted_and_started_again(tmp_path: Path, monkeypatch) -> None:
    metrics, group = ServerMetrics(), answered_requests()
    log = LogSettings(str(tmp_path), flush_s=600.0).make(metrics)
    failures = metrics.observer_failures.labels("log")._value

    def take(*given: Answered) -> None:
        log.take([wanted for each in given if (wanted := log.wants(each))])

    take(*group)
    log._process._process.kill()
    log._process._process.wait()
    with pytest.raises(OSError, match="exit code -9"):  # counted by the caller
        take(*group)
    monkeypatch.setattr(observer, "RESTART_S", 0.0)
    take(*group)
    ((parts, *rows),) = group[1].scored.encoded
    of_own_batch = replace(group[1].scored, encoded=(EncodedSpan(list(parts), *rows),))
    take(replace(group[0], at=float("nan")), replace(group[1], request_id="good", scored=of_own_batch))
    assert failures.get() == len(group) + 1
    log.close()
    ((_, about, table),) = read_log(str(tmp_path))
    model, wanted = logged(group)
    assert about == model.about and table.slice(60).to_pydict()["log.request_id"] == ["good"] * 40
    assert table.slice(0, 60).equals(wanted.cast(table.schema))


def test_rows_stand_at_their_places_when_they_are_scored_again() -> None:
    chance = np.random.default_rng(1)
    sizes = chance.integers(1, 6, 300).astype(np.int32)
    places = (chance.integers(0, 99, 300) % sizes).astype(np.int32)
    seen = []
    for order, own, numbers in batches(sizes, places):
        assert len(order) == sizes[numbers[0]] and len(set(own.tolist())) == len(own)
        assert (order[own] == numbers).all() and (places[numbers] == own).all() and (sizes[numbers] == len(order)).all()
        seen += numbers.tolist()
    assert sorted(seen) == list(range(300))
    assert list(batches(sizes[:0], places[:0])) == []


def test_the_oldest_files_go_and_a_half_file_is_never_read(tmp_path: Path) -> None:
    about, table = (
        About("v", "run", ["a"], [], [], ["score"]),
        pa.table({"a": np.random.default_rng(1).random(5000), "log.row": range(5000)}),
    )
    writer = LogWriter(str(tmp_path), 5000, 60.0, 100_000)
    for _ in range(6):
        writer.add(about, table)
        writer.flush_if_due()
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert writer.report.removed == 6 - len(kept) > 0 and writer.report.num_bytes <= 100_000
    assert [name[-14:-8] for name in kept] == [f"{number:06d}" for number in range(7 - len(kept), 7)]
    (tmp_path / "9.parquet.unfinished").write_bytes(b"PAR1")
    assert sum(each.num_rows for *_, each in read_log(str(tmp_path))) == 5000 * len(kept)
    (tmp_path / "9.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError):
        list(read_log(str(tmp_path)))
    with pytest.raises(DataError):
        list(read_log(str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["artifact=a"], "log= reference="),
        (["artifact=a", "reference=r", "rows=r"], "rows log="),
        (["artifact=a", "log=l", "max_differing=2"], "max_differing"),
    ],
)
def test_a_job_that_compares_nothing_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(SkewJob, words)
    assert mentions(str(error.value), said)
