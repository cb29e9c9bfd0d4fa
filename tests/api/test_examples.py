"""The examples that use an artifact from other libraries give the artifact's scores. They skip where the library is absent."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import pipeline
from pipeline.serving.artifact.export import ExportSummary
from tests.api.test_objects import NAMES

ABSENT = "its library is not installed"


@pytest.fixture
def rows(prepared_clicks: str) -> list[dict[str, object]]:
    lines = (Path(prepared_clicks).parent / "clicks.tsv").read_text().splitlines()[:50]
    cells = [dict(zip(NAMES, line.split("\t"), strict=True)) for line in lines]
    return [
        {name: (float(cell) if cell else None) if name.startswith("int") else cell or None for name, cell in row.items() if name != "label"}
        for row in cells
    ]  # fmt: skip


@pytest.fixture
def wanted(small_artifact: ExportSummary, rows: list[dict[str, object]]) -> np.ndarray:
    return pipeline.Artifact(small_artifact.artifact).predict(rows)


@pytest.mark.long
def test_duckdb_scores_in_sql(small_artifact: ExportSummary, rows: list[dict[str, object]], wanted: np.ndarray) -> None:
    import duckdb

    from examples.duckdb_udf import add_score

    connection = duckdb.connect()
    clicks = pa.Table.from_pylist(rows)
    connection.register("clicks", clicks)
    artifact = pipeline.Artifact(small_artifact.artifact)
    add_score(connection, artifact)
    found = connection.sql(f"SELECT score({', '.join(artifact.schema.names)}) AS score FROM clicks").fetchnumpy()
    assert np.array_equal(found["score"], wanted)


@pytest.mark.long
def test_mlflow_loads_and_scores(small_artifact: ExportSummary, rows: list[dict[str, object]], wanted: np.ndarray, tmp_path: Path) -> None:  # fmt: skip
    mlflow = pytest.importorskip("mlflow", reason=ABSENT)
    pd = pytest.importorskip("pandas", reason=ABSENT)
    pytest.importorskip("mlflow.pyfunc", reason=ABSENT)
    from examples.mlflow_model import save_artifact

    save_artifact(small_artifact.artifact, str(tmp_path / "model"))
    found = mlflow.pyfunc.load_model(str(tmp_path / "model")).predict(pd.DataFrame(rows))
    assert np.array_equal(found, wanted)


def test_ray_serve_answers(small_artifact: ExportSummary, rows: list[dict[str, object]], wanted: np.ndarray) -> None:
    pytest.importorskip("ray.serve", reason=ABSENT, exc_type=ImportError)
    from examples.ray_serve import Scores

    class Request:
        async def json(self) -> dict[str, object]:
            return {"rows": rows}

    answer = asyncio.run(Scores.func_or_class(small_artifact.artifact)(Request()))
    assert answer["scores"] == wanted.tolist()


def test_bentoml_answers(small_artifact: ExportSummary, rows: list[dict[str, object]], wanted: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    pytest.importorskip("bentoml", reason=ABSENT)
    from bentoml.exceptions import BadInput

    monkeypatch.setenv("ARTIFACT", small_artifact.artifact)
    from examples.bentoml_service import Scores

    service = Scores.inner()
    assert service.predict(rows) == wanted.tolist()
    with pytest.raises(BadInput, match="the rows lack"):
        service.predict([{"int_0": 3}])


def test_airflow_calls_functions(prepared_clicks: str, tmp_path: Path) -> None:
    pytest.importorskip("airflow.sdk", reason=ABSENT)
    from examples.airflow_tasks import prepare_day

    assert prepare_day("2026-11-26", str(Path(prepared_clicks).parent / "clicks.tsv")) == "datasets/2026-11-26"


def test_spark_scores_a_frame(small_artifact: ExportSummary, rows: list[dict[str, object]], wanted: np.ndarray) -> None:
    pytest.importorskip("pyspark", reason=ABSENT)
    pd = pytest.importorskip("pandas", reason=ABSENT)
    from examples.spark_udf import score_udf

    found = next(score_udf(small_artifact.artifact).func(iter([pd.DataFrame(rows)])))
    assert np.array_equal(found.to_numpy(), wanted)


@pytest.mark.campaign
def test_a_grid_search_finds_the_better_rate(tmp_path: Path) -> None:
    model_selection = pytest.importorskip("sklearn.model_selection", reason=ABSENT)
    pd = pytest.importorskip("pandas", reason=ABSENT)
    from examples.sklearn_model import PipelineModel

    drawn = np.random.default_rng(0)
    values = drawn.integers(0, 20, 6000)
    labels = (drawn.random(6000) < np.where(values % 2, 0.8, 0.2)).astype(int)
    frame = pd.DataFrame({"price": drawn.random(6000), "kind": [f"kind_{value}" for value in values]})
    search = model_selection.GridSearchCV(
        PipelineModel(str(tmp_path)), {"lr": [0.000001, 0.1]}, scoring="roc_auc", cv=2
    )
    search.fit(frame, labels)
    assert search.best_params_["lr"] == 0.1 and search.best_score_ > 0.6
    assert sys.modules["sklearn"]
