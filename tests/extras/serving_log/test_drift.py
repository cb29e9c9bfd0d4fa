"""Drift is near 0 on rows like the training rows, is seen where one feature moves, and is in the metrics."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from pipeline.cli.command_line import load_config
from pipeline.extras.serving_log.drift import SCORE, bins_of_ids, bins_of_numbers, read_reference
from pipeline.extras.serving_log.job import SkewJob
from pipeline.extras.serving_log.join import SUMMARY
from pipeline.extras.serving_log.observers.drift import DriftSettings
from pipeline.extras.serving_log.skew import write_reference
from pipeline.runtime.errors import DataError
from pipeline.serving.artifact.export import ExportSummary
from pipeline.serving.http.batching import Scores, ServerMetrics
from pipeline.serving.http.observers import Answered
from pipeline.serving.scoring.encoded import EncodedSpan
from pipeline.serving.scoring.predictor import Predictor
from tests.serving.test_artifacts_served import raw_rows


def test_psi_is_about_0_without_drift_and_grows_with_it() -> None:
    chance = np.random.default_rng(5)
    bins = bins_of_numbers(chance.normal(size=20_000).astype(np.float32))
    values = chance.normal(size=2_000).astype(np.float32)
    by_shift = [bins.psi(bins.count(values + shift)) for shift in (0.0, 0.3, 1.0)]
    assert by_shift[0] < 0.02 < by_shift[1] < 0.2 < by_shift[2]
    assert bins.psi(bins.count(values[:0])) == 0.0
    ids = np.minimum(chance.zipf(1.5, 20_000), 999)
    for hashed in (False, True):
        of_ids = bins_of_ids(ids, 1000, hashed)
        assert of_ids.psi(of_ids.count(ids[:5000])) < 0.02 < 0.2 < of_ids.psi(of_ids.count(ids[:5000] * 0))


@pytest.fixture(scope="module")
def reference(small_artifact: ExportSummary, prepared_clicks: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("reference") / "reference.json")
    words = [f"artifact={small_artifact.artifact}", f"data_path={prepared_clicks}", f"reference={path}"]
    assert "39 features" in write_reference(load_config(SkewJob, [*words, "reference_rows=8000"]))
    return path


def _take(drift: object, predictor: Predictor, rows: pa.Table) -> None:
    scored = predictor.score(rows)
    scores = Scores(scored.scores, [], predictor.version, (EncodedSpan(scored.encoded, 0, rows.num_rows),))
    model = SimpleNamespace(scorer=predictor, retrieves=False)
    drift.take([Answered("a", 0.0, rows, scores, model)])  # type: ignore[attr-defined]


def test_a_server_measures_the_drift_of_features_scores_and_labels(
    small_artifact: ExportSummary, prepared_clicks: str, reference: str, tmp_path: Path
) -> None:
    predictor = Predictor.load(small_artifact.artifact)
    rows = raw_rows(Path(prepared_clicks).parent / "clicks.tsv", 3000)
    (tmp_path / SUMMARY).write_text(
        json.dumps({"joined_at": 5.0, "recent_rows": 70, "label_rate": 0.2, "mean_score": 0.3})
    )
    metrics = ServerMetrics()

    def value(name: str, **labels: str) -> float:
        found = metrics.registry.get_sample_value(f"pipeline_serving_{name}", labels)
        assert found is not None
        return found

    settings = DriftSettings(reference, str(tmp_path), share=1.0, window_rows=3000, every_s=1e-9)
    drift = settings.make(metrics)
    _take(drift, predictor, rows)
    assert value("drift_rows") == 1500 and value("drift_reference_is_own") == 1  # the window is full: half of it stays
    features = [f"int_{number}" for number in range(1, 14)] + [f"cat_{number}" for number in range(1, 27)]
    own = {name: value("feature_psi", feature=name) for name in read_reference(reference).features}
    assert len(own) == len(features) == 39 and max(own.values()) < 0.05 and value("score_psi") < 0.05
    assert (value("label_rate"), value("labelled_mean_score"), value("labelled_rows")) == (0.2, 0.3, 70)
    name = next(each for each in own if each.startswith("cat_"))
    for _ in range(3):
        _take(drift, predictor, rows.set_column(rows.schema.get_field_index(name), name, pa.array(["other"] * 3000)))
    moved = {each: value("feature_psi", feature=each) for each in own}
    assert moved[name] > 0.2 and max(psi for each, psi in moved.items() if each != name) < 0.05


def test_another_file_is_no_reference(reference: str, tmp_path: Path) -> None:
    found = read_reference(reference)
    assert found.scores is not None and 0 < found.label_rate < 1 and SCORE not in found.features
    for text in (
        "",
        "[]",
        '{"features": {}}',
        json.dumps({**json.loads(Path(reference).read_text()), "format_version": 2}),
    ):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(DataError):
            read_reference(str(tmp_path / "other.json"))
