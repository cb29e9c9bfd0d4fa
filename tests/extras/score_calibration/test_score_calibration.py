"""Calibrated scores: planted probabilities are found, ranking stays, and export, serving and deltas agree to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from scipy.special import expit, logit
from scipy.stats import rankdata

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.serving import CalibrationConfig
from pipeline.data.quality import auc
from pipeline.extras.publish.publish import publish
from pipeline.extras.score_calibration.calibration import Ids, fit_columns
from pipeline.extras.score_calibration.certificate import measured
from pipeline.extras.score_calibration.curves import Curves, Floats
from pipeline.models.metrics.ece import ExpectedCalibrationError
from pipeline.runtime.errors import ConfigError, ServingError
from pipeline.runtime.storage.manifest import read_sealed, seal_manifest
from pipeline.runtime.storage.signature import Purpose
from pipeline.serving.artifact.export import ExportSummary, describe, export
from pipeline.serving.artifact.manifest import CALIBRATION_FILE, ArtifactError, read_manifest
from pipeline.serving.artifact.writer import write_bytes
from pipeline.serving.scoring.load import find_folder
from pipeline.serving.scoring.predictor import Predictor
from pipeline.training.run_state import config_of
from tests.extras.publish.test_deltas import export_step, job_of
from tests.serving.exports import assert_user_items_score_as_full_rows, prepared_batches
from tests.serving.test_artifacts_served import raw_rows
from tests.support.messages import names

ROWS = 1_000_000


def _planted(bend: Callable[[Floats], Floats]) -> tuple[Floats, Floats, Floats, Ids]:
    """Known probabilities of rare clicks, their labels, logits that a model could give for them (float32), and groups."""
    draw = np.random.default_rng(0)
    true = draw.normal(-2.5, 1.0, ROWS)
    labels = (draw.random(ROWS) < expit(true)).astype(np.float64)
    return expit(true), labels, bend(true).astype(np.float32).astype(np.float64), draw.integers(0, 3, ROWS)


def _ece(scores: Floats, truth: Floats) -> float:
    metric = ExpectedCalibrationError()
    return metric.value(metric.sums(scores, truth, np.ones(len(scores))))


def _is_increasing(curves: Curves, logits: Floats) -> bool:
    """Also between the closest float32 logits, to the left of all rows, and to the right."""
    wide = np.unique(np.concatenate([logits, np.linspace(-60, 60, 100_001)]).astype(np.float32)).astype(np.float64)
    return bool((np.diff(curves(wide)) > 0).all())


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "bend"),
    [
        ("platt", lambda true: 1.7 * true + 2.2),  # overconfident, trained on positives that count nine times
        ("isotonic", lambda true: np.where(true < -2, 0.3 * true, 2 * true + 3.4) + 0.5 * np.tanh(3 * true)),
    ],
)
def test_planted_probabilities_are_found_and_auc_stays_to_the_bit(kind: str, bend: Callable[[Floats], Floats]) -> None:
    truth, labels, logits, _ = _planted(bend)
    curves = fit_columns(CalibrationConfig(kind), logits, labels, np.ones(ROWS), None)
    assert curves is not None
    found = curves(logits)
    print(f"{kind}: ECE {_ece(expit(logits), truth):.5f} -> {_ece(expit(found), truth):.5f}")
    assert _ece(expit(logits), truth) > 0.02 and _ece(expit(found), truth) < 0.002
    assert auc(expit(found), labels) == auc(expit(logits), labels)  # bit for bit
    assert _is_increasing(curves, logits)


@pytest.mark.long
def test_each_value_of_a_column_gets_its_own_curve_and_keeps_its_order() -> None:
    truth, labels, logits, groups = _planted(lambda true: true)
    shifted = logits + np.array([-1.0, 0.5, 2.0])[groups]
    config = CalibrationConfig("isotonic", by="device")
    whole, own = (fit_columns(config, shifted, labels, np.ones(ROWS), ids) for ids in (None, groups))
    assert whole is not None and own is not None and list(own.by_id) == [0, 1, 2]
    found = own(shifted, groups)
    for group in range(3):
        rows = groups == group
        assert _ece(expit(found[rows]), truth[rows]) < 0.005 < 0.02 < _ece(expit(whole(shifted[rows])), truth[rows])
        assert auc(expit(found[rows]), labels[rows]) == auc(expit(shifted[rows]), labels[rows])
    np.testing.assert_array_equal(own(shifted[:9], np.full(9, 7)), whole(shifted[:9]))  # an id without a curve


def test_few_rows_and_ties_give_curves_that_ascend() -> None:
    draw = np.random.default_rng(1)
    for _ in range(50):
        count = int(draw.integers(2, 40))
        logits, labels, weights = (draw.integers(*ends, count).astype(np.float64) for ends in ((-2, 3), (0, 2), (1, 3)))
        curves = fit_columns(CalibrationConfig("isotonic"), logits, labels, weights, None)
        assert (curves is None) == (labels.min() == labels.max())
        assert curves is None or _is_increasing(curves, logits)
    assert (
        fit_columns(CalibrationConfig("platt"), np.arange(9.0), np.repeat([1.0, 0.0], [4, 5]), np.ones(9), None) is None
    )


def test_intervals_contain_the_error_of_scores_without_one() -> None:
    """By chance alone: perfect scores have the ECE that `chance` says."""
    draw = np.random.default_rng(0)
    logits = draw.normal(-1, 1, 20_000)
    found = [measured(logits, (draw.random(20_000) < expit(logits)) * 1.0, np.ones(20_000)) for _ in range(20)]
    assert np.mean([each["ece"] for each in found]) == pytest.approx(found[0]["chance"], rel=0.1)
    assert sum(each["ece_low"] <= each["chance"] <= each["ece_high"] for each in found) >= 15


WORDS = ["calibration.kind=isotonic", "calibration.by=cat_8", "calibration.min_rows=10"]


@pytest.fixture(scope="module")
def calibrated(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of step 10, with a delta to step 30."""
    artifact = export_step(small_run, 10, tmp_path_factory.mktemp("calibrated") / "artifact", *WORDS)
    publish(job_of(artifact), find_folder)
    return artifact


@pytest.fixture(scope="module")
def rows(prepared_clicks: str) -> pa.Table:
    return raw_rows(Path(prepared_clicks).parent / "clicks.tsv", 700)


@pytest.mark.long
def test_a_delta_refits_as_an_export_of_its_step_bit_for_bit(
    calibrated: str, small_run: Path, rows: pa.Table, tmp_path: Path
) -> None:
    whole = Predictor.load(export_step(small_run, 30, tmp_path / "whole", *WORDS))
    predictor = Predictor.load(calibrated)
    before, first = predictor.score(rows).scores, predictor.calibration
    assert_user_items_score_as_full_rows(predictor, rows.slice(0, 64))
    predictor.catch_up(calibrated)
    assert_user_items_score_as_full_rows(predictor, rows.slice(0, 64))
    assert predictor.sequence == 1 and predictor.calibration is not None and first is not None
    assert whole.calibration is not None and predictor.calibration.to_bytes() == whole.calibration.to_bytes()
    assert first.to_bytes() != whole.calibration.to_bytes()
    np.testing.assert_array_equal(predictor.score(rows).scores, whole.score(rows).scores)
    assert not np.array_equal(before, whole.score(rows).scores)


def test_served_scores_are_the_curves_of_the_uncalibrated_ones(
    calibrated: str, small_run: Path, rows: pa.Table, tmp_path: Path
) -> None:
    plain, predictor = Predictor.load(export_step(small_run, 10, tmp_path / "plain")), Predictor.load(calibrated)
    assert plain.version != predictor.version and plain.calibration is None
    found, raw = predictor.score(rows).scores, plain.score(rows).scores
    ids = predictor.encoder.ids_of("cat_8", rows["cat_8"].to_pylist())
    curves = json.loads((Path(calibrated) / CALIBRATION_FILE).read_text())["labels"][0]
    assert len(curves["by_id"]) > 1
    for number, score, before in zip(ids.tolist(), found.tolist(), raw.tolist(), strict=True):
        curve, x = curves["by_id"].get(str(number), curves["whole"]), logit(before)
        points, values = np.array(curve["x"]), np.array(curve["y"])
        beyond = curve["slope"] * (min(x - points[0], 0) + max(x - points[-1], 0))
        assert score == pytest.approx(expit(np.interp(x, points, values) + beyond), rel=1e-4)
    job = config_of(str(small_run))
    assert job is not None
    batch = next(prepared_batches(job, "validation"))
    one = predictor.score_batch(batch.dense_features, batch.sparse_features)
    assert not torch.equal(one, plain.score_batch(batch.dense_features, batch.sparse_features))
    for each in (found, one.numpy()):
        assert each.dtype == np.float32 and ((each > 0) & (each < 1)).all()


def _scored(predictor: Predictor, job: TrainJob, num_rows: int) -> tuple[Floats, Floats]:
    """Scores and labels of the first rows of the test split."""
    parts = [
        (
            predictor.score_batch(batch.dense_features, batch.sparse_features)[batch.is_present],
            batch.labels[batch.is_present],
        )
        for batch in prepared_batches(job, "test")
    ]
    scores, labels = (torch.cat(each)[:num_rows].double().numpy() for each in zip(*parts, strict=True))
    return scores, labels


@pytest.mark.long
def test_the_certificate_has_the_error_before_and_after_on_rows_that_did_not_fit_it(
    small_run: Path, small_artifact: ExportSummary, rows: pa.Table, tmp_path: Path
) -> None:
    limits = ["parity.max_rows=2000", "parity.max_ne_increase=1", "parity.max_auc_decrease=1"]
    words = [f"run={small_run}", f"output={tmp_path / 'artifact'}", "calibration.kind=platt", *limits]
    summary = export(load_config(ExportJob, words))
    about = read_manifest(summary.artifact).certificate["calibration"]
    assert (about["kind"], about["by"], about["rows"]) == ("platt", None, 2000)
    (label,) = about["labels"].values()
    for before, after in label["splits"].values():
        for each in (before, after):
            assert 0 <= each["ece_low"] <= each["ece"] <= each["ece_high"] and each["chance"] > 0
            assert after["auc"] == before["auc"]  # bit for bit
    job = config_of(str(small_run))
    assert job is not None
    for found, each in zip(label["splits"]["test"], (small_artifact, summary), strict=True):
        assert found["ece"] == pytest.approx(_ece(*_scored(Predictor.load(each.artifact), job, 2000)), abs=1e-6)
    served, raw = (Predictor.load(each.artifact).score(rows).scores for each in (summary, small_artifact))
    assert not np.array_equal(served, raw) and np.array_equal(rankdata(served), rankdata(raw))
    assert "calibration platt, fitted on 2,000 validation rows" in describe(summary)
    assert summary.parity["test"]["max_score_difference"] < 0.05  # of scores before the calibration


def _changed(artifact: str, folder: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """A copy with other content of calibration.json, whose checksums agree."""
    copy = Path(shutil.copytree(artifact, folder, ignore=shutil.ignore_patterns("deltas")))
    content = json.loads((copy / CALIBRATION_FILE).read_text())
    change(content)
    (copy / CALIBRATION_FILE).unlink()
    values = read_sealed(str(copy / "manifest.json"), None)
    values["files"][CALIBRATION_FILE] = write_bytes(str(copy / CALIBRATION_FILE), json.dumps(content).encode())
    (copy / "manifest.json").write_text(seal_manifest(values, Purpose.ARTIFACT))
    return str(copy)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "descends": lambda values: values["labels"][0]["whole"]["y"].reverse(),
    "of no points": lambda values: values["labels"][0]["whole"].update(x=[], y=[]),
    "infinite": lambda values: values["labels"][0]["whole"].update(slope=1e999),
    "of two labels": lambda values: values["labels"].append(None),
    "by another column": lambda values: values.update(by="cat_99"),
    "of another kind of values": lambda values: values.update(labels=3),
    "of an endless id": lambda values: values["labels"][0]["by_id"].update({str(2**63): values["labels"][0]["whole"]}),
    "with a key": lambda values: values.update(more=3),
}


def test_a_calibration_that_does_not_fit_is_refused(calibrated: str, tmp_path: Path) -> None:
    for number, change in enumerate(CHANGES.values()):
        with pytest.raises(ArtifactError, match=names(CALIBRATION_FILE)):
            Predictor.load(_changed(calibrated, tmp_path / str(number), change))


def test_what_cannot_be_calibrated_is_refused(small_run: Path, tmp_path: Path) -> None:
    for words, told in (
        ("calibration.kind=beta", "calibration.kind='beta' none platt isotonic"),
        ("calibration.by=cat_3", "calibration.by=cat_3 calibration.kind=none"),
        ("calibration.min_rows=0", "calibration.min_rows=0 1"),
    ):
        with pytest.raises(ConfigError, match=names(told)):
            load_config(ExportJob, ["run=x", words])
    with pytest.raises(ServingError, match=names("calibration.by=cat_88 cat_8")):
        export_step(small_run, 10, tmp_path / "other", "calibration.kind=platt", "calibration.by=cat_88")
    assert not (tmp_path / "other").exists()
