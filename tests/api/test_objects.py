"""Run, Runs, Artifact, Dataset and Registry read what the verbs write."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

import pipeline
from pipeline.runtime.errors import ConfigError, DataError, ServingError
from pipeline.serving.artifact.export import ExportSummary
from tests.support.messages import names

NAMES = ["label", *(f"int_{i}" for i in range(13)), *(f"cat_{i}" for i in range(26))]


@pytest.fixture(scope="module")
def rows(prepared_clicks: str) -> pa.Table:
    types = {name: pa.string() if name.startswith("cat") else pa.float64() for name in NAMES}
    table = pa_csv.read_csv(
        Path(prepared_clicks).parent / "clicks.tsv",
        read_options=pa_csv.ReadOptions(column_names=NAMES),
        parse_options=pa_csv.ParseOptions(delimiter="\t"),
        convert_options=pa_csv.ConvertOptions(column_types=types, strings_can_be_null=True),
    )
    return table.slice(0, 9000)


@pytest.fixture(scope="module")
def artifact(small_artifact: ExportSummary) -> pipeline.Artifact:
    return pipeline.Artifact(small_artifact.artifact)


def frames(rows: pa.Table) -> dict[str, Any]:
    found: dict[str, Any] = {
        "arrow": rows,
        "chunked": pa.concat_tables([rows.slice(0, 77), rows.slice(77)]),
        "batch": rows.combine_chunks().to_batches()[0],
        "dicts": rows.slice(0, 1000).to_pylist(),
        "columns": rows.slice(0, 1000).to_pydict(),
    }
    try:
        import pandas as pd

        found["pandas"] = rows.to_pandas()
        found["pandas of text"] = rows.to_pandas().astype(dict.fromkeys(NAMES[14:], "object"))
        assert isinstance(found["pandas"], pd.DataFrame)
    except ImportError:
        pass
    try:
        import polars as pl

        found["polars"] = pl.from_arrow(rows)
    except ImportError:
        pass
    import duckdb

    found["duckdb"] = duckdb.connect().from_arrow(rows)
    return found


@pytest.mark.long
def test_a_frame_has_the_bits_of_predict_on_files(artifact: pipeline.Artifact, rows: pa.Table, tmp_path: Path) -> None:
    wanted = {}
    for count in (rows.num_rows, 1000):
        source = str(tmp_path / f"rows{count}.parquet")
        pq.write_table(rows.slice(0, count), source, row_group_size=700)  # blocks of other sizes than batches
        summary = pipeline.predict(artifact.path, source=source, output=str(tmp_path / f"scores{count}.parquet"))
        wanted[count] = pq.read_table(summary.output)["score"].to_numpy()
    for name, frame in frames(rows).items():
        scores = artifact.predict(frame)
        assert scores.dtype == np.float32 and np.array_equal(scores, wanted[len(scores)]), name


def test_rows_that_cannot_be_scored_are_told(artifact: pipeline.Artifact, rows: pa.Table) -> None:
    few = rows.slice(0, 5).to_pylist()
    with pytest.raises(ServingError, match=names("cat_3")):
        artifact.predict([{name: value for name, value in row.items() if name != "cat_3"} for row in few])
    few[2]["int_1"] = 1e300
    with pytest.raises(ServingError, match=names("1 of 5 row 2 bad_rows")):
        artifact.predict(few)
    assert np.isnan(artifact.predict(few, bad_rows="nan")).tolist() == [False, False, True, False, False]
    for wrong in (3, "rows", [1, 2], [{"int_1": 1}, {"int_1": "a"}]):
        with pytest.raises((DataError, ServingError)):
            artifact.predict(wrong)
    assert artifact.predict(rows.slice(0, 0)).shape == (0,)
    with pytest.raises(ServingError, match=names("predict")):
        artifact.retrieve(few)


def test_an_artifact_says_what_it_is_and_explains(artifact: pipeline.Artifact, rows: pa.Table) -> None:
    assert artifact.schema.names == NAMES[1:] and artifact.certificate["splits"]["validation"]["rows"] > 0
    few = rows.slice(0, 40)
    assert np.array_equal(pickle.loads(pickle.dumps(artifact)).predict(few), artifact.predict(few))
    explained = artifact.explain(few)
    assert explained.column_names == ["score", *NAMES[1:]]
    without = few.set_column(few.schema.get_field_index("cat_0"), "cat_0", pa.nulls(40, pa.string()))
    difference = artifact.predict(few) - artifact.predict(without)
    assert np.array_equal(explained["cat_0"].to_numpy(), difference) and difference.any()
    with pytest.raises(ServingError, match=names("buy")):
        artifact.explain(few, label="buy")


@pytest.mark.long
def test_a_run_is_read_used_and_resumed(small_run: Path, rows: pa.Table, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "small"
    shutil.copytree(small_run, folder)
    run = pipeline.Run(str(folder))
    assert run.summary.step == run.config.trainer.max_steps == 30
    assert set(run.metrics().column("kind").to_pylist()) == {"train", "validation"}
    assert run.metrics("validation").num_rows == 3 and ("validation", 30) in run.evaluations
    tile = run._repr_html_()
    assert tile.startswith("<iframe srcdoc=") and "NE over steps" in tile and "<script" not in tile
    vectors = run.embeddings("cat_3")
    assert vectors.column_names == ["row", "value", "vector"] and vectors["value"][1].as_py()
    measured = run.evaluate(rows.slice(6000))
    assert measured["num_samples"] == 3000 and 0.5 < measured["auc"] < 1.0
    assert run.resume({"trainer.max_steps": 32}).step == 32 and run.config.trainer.max_steps == 32

    runs = pipeline.Runs(str(tmp_path / "runs"))
    assert len(runs) == 1 and runs.best("auc").path == runs["small"].path == str(folder)
    assert runs.to_arrow().column("step").to_pylist() == [32]
    with pytest.raises(ConfigError, match=names("smal small")):
        runs.compare("smal")


def test_the_model_of_a_run_scores_batches(small_run: Path, prepared_clicks: str, rows: pa.Table) -> None:
    import torch

    from pipeline.data.read.batch import keyed_jagged_tensor

    run, data = pipeline.Run(str(small_run)), pipeline.Dataset(prepared_clicks)
    batch = next(iter(data.batches("validation", batch_size=64)))
    values = torch.cat(list(batch.ids.values()))
    lengths = torch.ones(len(batch.ids) * 64, dtype=torch.int32)
    sparse = keyed_jagged_tensor(list(batch.ids), values, lengths, 64, [64] * len(batch.ids))
    with torch.no_grad():
        logits = run.model()(batch.dense, sparse)
    assert logits.shape == (64, 1)
    bag = torch.nn.EmbeddingBag(data.cardinalities["cat_3"], 4)
    assert bag(batch.ids["cat_3"], batch.offsets["cat_3"]).shape == (64, 4)


def test_a_data_set_is_read(prepared_clicks: str) -> None:
    data = pipeline.Dataset(prepared_clicks)
    assert data.splits["train"].num_rows == 24000 and data.to_arrow("test").num_rows == 3000
    assert data.to_arrow("test", ["label"]).column_names == ["label"]
    profile = {row["feature"]: row for row in data.profile().to_pylist()}
    assert profile["int_0"]["kind"] == "dense" and profile["cat_3"]["ids"] == data.cardinalities["cat_3"]
    batches = data.batches("train", batch_size=1000)
    first, second = [next(iter(batches)).labels for _ in range(2)]
    assert len(batches) == 24 and not first.equal(second)  # of two epochs
    with pytest.raises(DataError, match=names("tst test")):
        data.to_arrow("tst")


def test_a_registry_is_read_and_rolled_back(small_run: Path, tmp_path: Path) -> None:
    registry = pipeline.Registry(str(tmp_path / "registry"))
    assert registry.champion is None and registry.versions == [] and registry.history() == []
    first = registry.promote(str(small_run))
    assert registry.champion == first and [record.state for record in registry.history()] == ["added"]
    with pytest.raises(pipeline.UserError, match=names("retrain")):
        registry.promote(str(small_run))
    assert registry.rollback(first.name, "a test").name == first.name
    assert [record.state for record in registry.history()] == ["rolled_back", "added"]
    assert registry.unpin().name == first.name and registry.history()[0].state == "unpinned"
