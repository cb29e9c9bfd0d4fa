"""Records are mirrored into MLflow, and a mirror that is away costs a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from pipeline.extras.monitoring.mlflow_mirror import mirror_record
from pipeline.retraining.ledger import Record
from tests.support.messages import names

RECORD = Record(
    "promoted", "dt=2026-11-20", version="v000007", metrics={"challenger_ne": 0.7, "judged_on": "x"}, number=3
)


def test_a_record_becomes_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking = pytest.importorskip("mlflow.tracking", reason="the extra `mlflow` is not installed")
    uri = f"file://{tmp_path}/mlruns"
    mirror_record(uri, "clicks", RECORD)
    client = tracking.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("clicks").experiment_id])
    assert (run.info.status, run.data.metrics, run.data.tags["version"]) == (
        "FINISHED",
        {"challenger_ne": 0.7},
        "v000007",
    )


def test_a_mirror_that_is_away_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("mlflow.tracking", reason="the extra `mlflow` is not installed")
    mirror_record("file:///proc/nowhere", "clicks", RECORD)
    assert "did not accept record 3" in caplog.text


def test_without_mlflow_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(ValueError, match=names("torchrec-pipeline[mlflow]")):
        mirror_record("file:///tmp", "clicks", RECORD)


def test_the_pinned_versions_let_the_extra_be_installed() -> None:
    wanted = SpecifierSet("!=4.7.0,<10,>=3.7.0")  # of importlib_metadata, by mlflow-skinny 3.17.2
    lines = (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert wanted.contains(pins["importlib_metadata"])
