"""Columns of vectors from files of every format to served scores: missing vectors, bad ones, and a planted signal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import PredictJob
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import load_saved_job
from pipeline.config.serving import LimitsConfig
from pipeline.data.dataset import Dataset
from pipeline.data.prepare.identity import check_not_contradicted
from pipeline.data.prepare.run import prepare
from pipeline.runtime.errors import UserError
from pipeline.serving.http.openapi import openapi_page
from pipeline.serving.http.request_rows import ARROW_TYPE, JSON_TYPE, BadRequest, RequestReader
from pipeline.serving.scoring.predict import predict
from pipeline.serving.scoring.predictor import Predictor
from tests.models.learning import auc
from tests.serving.exports import assert_raw_rows_are_prepared_rows, run_export
from tests.support.jobs import train_on_rank
from tests.support.messages import mentions
from tests.support.ranks import RankPool

WIDTH, NUM_ROWS = 4, 6000
FEATURES = ["price", "emb[0]", "emb[1]", "emb[2]", "emb[3]", "emb[missing]"]


@pytest.fixture(scope="module")
def planted() -> tuple[pa.Table, float]:
    """Rows whose logit is linear in the vector, and 1 for the tenth of the rows without a vector. Return the rows, and the
    best possible AUC on the last quarter."""
    random = np.random.default_rng(3)
    vectors = random.standard_normal((NUM_ROWS, WIDTH)).astype(np.float32)
    logits = vectors @ np.array([1.0, -0.5, 0.5, 1.0])
    missing = random.random(NUM_ROWS) < 0.1
    logits[missing] = 1.0
    truth = 1 / (1 + np.exp(-logits))
    clicks = random.random(NUM_ROWS) < truth
    lists = [None if is_missing else vector for vector, is_missing in zip(vectors, missing, strict=True)]
    rows = pa.table(
        {
            "label": clicks.astype(int),
            "price": random.random(NUM_ROWS),
            "item": [f"i{number}" for number in random.integers(0, 9, NUM_ROWS)],
            "emb": pa.array(lists, pa.list_(pa.float32(), WIDTH)),
        }
    )
    held_out = slice(NUM_ROWS * 3 // 4, None)
    return rows, auc(truth[held_out], clicks[held_out])


def _text(rows: pa.Table, delimiter: str, cell: Callable[[list[float]], str]) -> str:
    lines = [delimiter.join(rows.column_names)]
    for row in rows.to_pylist():
        lines.append(delimiter.join([str(row[name]) for name in rows.column_names[:-1]] + [cell(row["emb"] or [])]))
    return "\n".join(lines) + "\n"


def _data(source: Path, *more: str) -> list[str]:
    return [
        "data=default", "data.name=planted", f"data.path={source.parent / ('of_' + source.name)}", f"data.format={source.suffix[1:]}",
        "data.columns.dense=[price]", "data.columns.sparse=[item]", "data.columns.vectors={emb: 4}",
        "data.split.validation_fraction=0.25", "data.split.test_fraction=0", "data.rows_per_row_group=256", *more,
    ]  # fmt: skip


def _prepare(source: Path, *more: str) -> Dataset:
    return prepare(load_config(PrepareJob, [*_data(source, *more), f"source={source}"])).dataset


def test_each_format_gives_the_same_shards(planted: tuple[pa.Table, float], tmp_path: Path) -> None:
    rows = planted[0].slice(0, 300)
    pq.write_table(rows, tmp_path / "fixed.parquet")
    lists = pa.array(rows["emb"].to_pylist(), pa.list_(pa.float64()))
    pq.write_table(rows.set_column(3, "emb", lists), tmp_path / "lists.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))
    (tmp_path / "rows.csv").write_text(_text(rows, ",", lambda vector: "|".join(map(repr, vector))))
    (tmp_path / "rows.tsv").write_text(_text(rows, "\t", json.dumps))
    found = {}
    for name in ("fixed.parquet", "lists.parquet", "rows.jsonl", "rows.csv", "rows.tsv"):
        dataset = _prepare(tmp_path / name, *(["data.columns.list_separator=json"] if name == "rows.tsv" else []))
        assert (dataset.dense_features, dataset.quarantined_rows) == (FEATURES, 0)
        files = [file.path for split in dataset.splits.values() for file in split.files]
        found[name] = pa.concat_tables([pq.read_table(tmp_path / f"of_{name}" / file) for file in files])
    first = found.pop("fixed.parquet")
    wanted = [vector or [0.0] * WIDTH for vector in rows["emb"].to_pylist()]
    np.testing.assert_array_equal(np.stack([first[name] for name in FEATURES[1:5]], axis=1), wanted)
    assert first["emb[missing]"].to_pylist() == [float(vector is None) for vector in rows["emb"].to_pylist()]
    assert all(each.equals(first) for each in found.values())


def test_bad_vectors_go_to_the_quarantine_and_empty_ones_are_missing(tmp_path: Path) -> None:
    good = [[0.5, 1, 2, 3]] * 40
    bad: list[Any] = [[1.0, 2.0], [1, 2, 3, 4, 5], [1, 2, 3, float("nan")], [1, 2, 3, None], [1, 2, 3, 1e39]]
    vectors = [*good, *bad, [], None]
    rows = [{"label": number % 2, "price": 1, "item": "a", "emb": vector} for number, vector in enumerate(vectors)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cells = ["" if not vector else "|".join(map(str, vector)) for vector in vectors]
    text = "".join(f"{row['label']},1,a,{cell}\n" for row, cell in zip(rows, cells, strict=True))
    (tmp_path / "rows.csv").write_text("label,price,item,emb\n" + text)
    for name in ("rows.parquet", "rows.jsonl", "rows.csv"):
        dataset = _prepare(tmp_path / name, "data.max_quarantined_fraction=0.5")
        assert (dataset.accepted_rows, dataset.quarantined_rows) == (42, 5), name
        refused = [json.loads(line) for line in (tmp_path / f"of_{name}" / "quarantine.jsonl").read_text().splitlines()]
        lines = [row["line"] - (name == "rows.csv") for row in refused]
        assert lines == list(range(41, 46)), name
        assert mentions(refused[0]["reason"], "emb 2 4") and mentions(refused[2]["reason"], "emb nan")
    with pytest.raises(UserError) as error:
        _prepare(tmp_path / "rows.csv", "data.columns.dense=['emb[0]', price]", f"data.path={tmp_path / 'twice'}")
    assert mentions(error.value, "emb[0]")


@pytest.mark.long
def test_a_pattern_names_dense_columns_that_have_no_other_role(ranks: RankPool, tmp_path: Path) -> None:
    """The pattern is resolved once: the run, and what it reads, have names."""
    source = tmp_path / "rows.csv"
    header = "label,emb_id,emb_1,price,emb_0"
    source.write_text(header + "\n" + "".join(f"{row % 2},a,{row / 7},{row},{-row}\n" for row in range(800)))
    words = [word for word in _data(source, "data.columns.sparse=[emb_id]") if "vectors" not in word]
    words += ["data.columns.dense=[price, 'emb_*']", "data.dense_transforms.emb_*=standardize"]
    dataset = prepare(load_config(PrepareJob, [*words, f"source={source}"])).dataset
    assert dataset.dense_features == ["price", "emb_1", "emb_0"] and list(dataset.dense_columns) == ["emb_1", "emb_0"]
    assert prepare(load_config(PrepareJob, [*words, f"source={source}"])).already_prepared
    job = load_config(TrainJob, [*words, f"run_dir={tmp_path / 'run'}"])
    assert check_not_contradicted(job.data, dataset, ["data.columns.dense"]) == ""
    more = ["hardware=cpu", "model=logistic_regression", "trainer.max_steps=2", "trainer.global_batch_size=64"]
    ranks.run(1, train_on_rank, [*words, *more, f"run_dir={tmp_path / 'run'}"])
    saved = load_saved_job(TrainJob, str(tmp_path / "run" / "config.yaml"))
    assert saved.data.columns.dense == dataset.dense_features
    with pytest.raises(UserError) as error:
        prepare(
            load_config(
                PrepareJob,
                [*words, "data.columns.dense=['enb_*']", f"source={source}", f"data.path={tmp_path / 'other'}"],
            )
        )
    assert mentions(error.value, "enb_*")
    with pytest.raises(UserError) as error:
        load_config(RetrainJob, [*words, f"source={source}"])
    assert mentions(error.value, "emb_*")


@pytest.mark.long
def test_a_planted_signal_is_learnt_and_requests_score_as_prepared_rows(
    ranks: RankPool, planted: tuple[pa.Table, float], tmp_path: Path
) -> None:
    rows, best = planted
    source = tmp_path / "rows.parquet"
    pq.write_table(rows, source)
    _prepare(source)
    words = [
        *_data(source), "hardware=cpu", "model=logistic_regression", "tables.default.embedding_dim=8",
        "trainer.global_batch_size=256", "optimizer=adam", "optimizer.dense.lr=0.05", "trainer.epochs=4",
        "logger.report=false", "logger.tensorboard=false", f"run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    (summary,) = ranks.run(1, train_on_rank, words)
    lift = (summary.validation["auc"] - 0.5) / (best - 0.5)
    print(f"share of the lift of {best:.4f}: {lift:.3f}")
    assert lift > 0.97
    artifact = run_export(tmp_path / "run", tmp_path / "artifact").artifact
    assert assert_raw_rows_are_prepared_rows(artifact, load_config(TrainJob, words), str(source)) == NUM_ROWS

    predictor = Predictor.load(artifact)
    reader = RequestReader(predictor.columns, LimitsConfig())
    assert asdict(predictor.columns)["vectors"] == {"emb": WIDTH} and predictor.columns.dense == ["price"]
    assert '"maxItems": 4' in json.dumps(openapi_page(predictor, LimitsConfig()))
    asked = rows.slice(0, 64).drop_columns(["label"])
    wanted = predictor.score(asked).scores
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, asked.schema) as stream:
        stream.write_table(asked)
    bodies = {JSON_TYPE: json.dumps({"rows": asked.to_pylist()}).encode(), ARROW_TYPE: sink.getvalue().to_pybytes()}
    for kind, body in bodies.items():
        assert predictor.score(reader.read(body, kind)).scores.tobytes() == wanted.tobytes(), kind
    (tmp_path / "asked.csv").write_text(_text(asked, ",", lambda vector: "|".join(map(repr, vector))))
    output = tmp_path / "scores.parquet"
    assert (
        predict(
            load_config(PredictJob, [f"artifact={artifact}", f"source={tmp_path / 'asked.csv'}", f"output={output}"])
        ).num_refused
        == 0
    )
    np.testing.assert_array_equal(pq.read_table(output)["score"].to_numpy(), wanted)
    row = asked.to_pylist()[0]
    wrong = [row, row | {"emb": [1.0, 2.0]}, row | {"emb": [1, 2, 3, None]}, row | {"emb": []}]
    scored = predictor.score(reader.read(json.dumps({"rows": wrong}).encode(), JSON_TYPE))
    assert [each.line for each in scored.bad_rows] == [2, 3]
    assert mentions(scored.bad_rows[0].reason, "emb 2 4")
    with pytest.raises(BadRequest) as error:
        reader.read(json.dumps({"rows": [row | {"emb": ["a"]}]}).encode(), JSON_TYPE)
    assert mentions(error.value, "emb")
