"""A prediction that was killed or stopped goes on with what it has, unless that was another one's."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.data.raw import source as source_module
from pipeline.runtime.errors import ServingError
from pipeline.serving.scoring.predict import predict
from tests.serving.predictions import expected, job_of, rows_of, write
from tests.serving.stand_in import REFUSED_CITY, StandIn, score_of
from tests.support.forks import WarmCommand, run_warm

WORKER = "tests.serving.predict_worker"


def start(job: list[str], held_by: Path) -> WarmCommand:
    """It scores two parts or so and then waits until the file `held_by` is there."""
    return WarmCommand(WORKER, [*job, 900, held_by])


def scored_rows(staging: Path) -> int:
    path = staging / "progress.json"
    return sum(part["num_rows"] for part in json.loads(path.read_text())["parts"]) if path.exists() else 0


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("rows.parquet", marks=pytest.mark.campaign), "rows.tsv"])
def test_a_killed_prediction_goes_on_and_ends_with_the_same_bytes(tmp_path: Path, name: str) -> None:
    rows = rows_of(6000)
    rows[4321]["city"] = REFUSED_CITY
    source = write(tmp_path / name, rows)
    options = ["artifact=stand-in", f"source={source}", "rows_per_part=400", "batch_rows=100", "id_columns=[user]"]
    whole, killed = [*options, f"output={tmp_path}/whole.parquet"], [*options, f"output={tmp_path}/killed.parquet"]
    staging, seen = tmp_path / "killed.parquet.partial", []
    for _ in range(2):
        worker = start(killed, tmp_path / "never")
        before = scored_rows(staging)
        while worker.poll() is None and scored_rows(staging) <= before:
            time.sleep(0.02)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        seen.append(scored_rows(staging))
    assert 0 < seen[0] < seen[1] < 6000  # each went on, none was allowed to finish
    assert not (tmp_path / "killed.parquet").exists()
    for job in (killed, whole):
        assert start(job, tmp_path).wait(300) == 0
    for suffix in ("", ".quarantine.jsonl"):
        assert (tmp_path / f"killed.parquet{suffix}").read_bytes() == (tmp_path / f"whole.parquet{suffix}").read_bytes()
    assert pq.read_table(tmp_path / "whole.parquet")["row"].to_pylist() == list(range(6000))


@pytest.mark.campaign
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_prediction_that_is_stopped_keeps_its_parts_and_goes_on(
    tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    source = write(tmp_path / "rows.csv", rows_of(3000))
    options = [
        f"source={source}",
        "artifact=stand-in",
        "rows_per_part=200",
        "batch_rows=100",
        f"output={tmp_path}/scores.parquet",
    ]
    staging = tmp_path / "scores.parquet.partial"
    worker = WarmCommand(WORKER, [*options, 500, tmp_path / "go"])
    while worker.poll() is None and not scored_rows(staging):
        time.sleep(0.02)
    worker.send_signal(sent)
    (tmp_path / "go").touch()
    said = "".join(worker.communicate(timeout=300))
    assert worker.returncode == code, said
    assert "Traceback" not in said and not (tmp_path / "scores.parquet").exists()
    assert 0 < scored_rows(staging) < 3000
    again = run_warm(WORKER, *options, 500, tmp_path / "go")
    assert again.returncode == 0 and "going on after" in again.stderr + again.stdout, again
    assert pq.read_table(tmp_path / "scores.parquet")["score"].to_pylist() == expected(rows_of(3000))
    assert not staging.exists()


@pytest.mark.parametrize("changed", ["artifact", "source", "source between samples", "part"])
def test_what_another_artifact_or_source_has_scored_is_not_gone_on_with(
    tmp_path: Path, changed: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changed == "source between samples":  # of a large file; "device" has equally long values
        monkeypatch.setattr(source_module, "digest_of_samples", lambda file, size: "same")
        monkeypatch.setattr(source_module.Source, "is_sampled", True)
    rows = rows_of(300)
    rows[299]["city"] = REFUSED_CITY
    source, output = write(tmp_path / "rows.csv", rows), tmp_path / "scores.parquet"
    with pytest.raises(ServingError):  # leaves its parts behind
        predict(job_of(source, output, "max_quarantined_fraction=0.0"), lambda _: StandIn())
    scorer = StandIn()
    if changed == "artifact":
        scorer.version = "stand-in-2"
    elif changed == "source":
        rows[0]["city"] = "Bern"
        write(source, rows)
    elif changed == "source between samples":
        rows[0]["device"] = {"a": "b", "b": "a"}[str(rows[0]["device"])]
        write(source, rows)
    else:
        (tmp_path / "scores.parquet.partial" / "00000.arrow").write_bytes(b"torn")
    predict(job_of(source, output), lambda _: scorer)
    assert "scoring starts anew" in caplog.text
    scores = pq.read_table(output)["score"].to_pylist()
    assert scores == [*(score_of(row, scorer.version) for row in rows[:299]), None]


def test_what_was_scored_is_kept_when_too_many_rows_were_bad(tmp_path: Path) -> None:
    rows = rows_of(300)
    rows[299]["city"] = REFUSED_CITY
    source, output = write(tmp_path / "rows.csv", rows), tmp_path / "scores.parquet"
    with pytest.raises(ServingError):
        predict(job_of(source, output, "max_quarantined_fraction=0.0"), lambda _: StandIn())
    scorer = StandIn()
    summary = predict(job_of(source, output, "max_quarantined_fraction=0.5"), lambda _: scorer)
    assert scorer.batches == [] and summary.num_scored_before == 300
