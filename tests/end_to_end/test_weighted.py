"""Weighted bags from a generated file to served scores: two ranks, stopped and resumed, other shards, raw rows of every kind."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.jobs.evaluate import EvaluateJob, PredictJob
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.serving import LimitsConfig
from pipeline.data.prepare.run import prepare
from pipeline.data.read.value_index import index_values
from pipeline.extras.retrieval.retriever import Retriever
from pipeline.serving.artifact.export import ExportSummary
from pipeline.serving.artifact.raw_schema import RawFeature, RawSchema
from pipeline.serving.http.openapi import openapi_page
from pipeline.serving.http.request_rows import JSON_TYPE, RequestReader
from pipeline.serving.scoring.predict import predict
from pipeline.serving.scoring.predictor import Predictor
from pipeline.serving.scoring.raw_rows import RowEncoder
from pipeline.serving.scoring.scorer import ColumnLists, schema_of
from pipeline.training.evaluate import evaluate
from pipeline.training.train import train
from tests.serving.exports import assert_raw_rows_are_prepared_rows, raw_blocks, run_export
from tests.support.examples import examples
from tests.support.jobs import train_on_rank
from tests.support.messages import mentions
from tests.support.ranks import RankPool
from tests.support.stored_tensors import step_tensors

NUM_ROWS = 3000
SMALL = [
    "data.generator.num_rows=3000",
    "data.generator.num_items=50",
    "data.generator.num_tags=40",
    "data.rows_per_row_group=128",
]
TRAIN = [
    "experiment=tags_lr",
    "trainer.global_batch_size=256",
    "trainer.max_steps=6",
    "trainer.epochs=1",
    "trainer.evaluate_max_batches=1",
    "checkpoint.save_every_steps=3",
    "tables.default.embedding_dim=8",
    "tables.default.init.kind=auto",
]
SHARDINGS = ("row_wise", "column_wise", "data_parallel")


def _evaluate(rank: int, run: str, *more: str) -> dict[str, float]:
    return evaluate(load_config(EvaluateJob, [f"run={run}", "split=validation", *more])).metrics


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """(raw file, overrides that name the prepared data)."""
    folder = tmp_path_factory.mktemp("tags")
    raw = str(folder / "tags.tsv")
    generate(load_config(GenerateJob, ["data=tags", *SMALL, f"output={raw}"]))
    named = [f"data.path={folder / 'prepared'}"]
    prepare(load_config(PrepareJob, ["data=tags", *SMALL, *named, f"source={raw}"]))
    return raw, named


@pytest.fixture(scope="module")
def run(ranks: RankPool, source: tuple[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on two ranks without a stop."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    ranks.run(2, train_on_rank, [*TRAIN, *SMALL, *source[1], f"run_dir={folder}"])
    return folder


@pytest.mark.campaign
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    ranks: RankPool, run: Path, source: tuple[str, list[str]], tmp_path: Path
) -> None:
    words = [*TRAIN, *SMALL, *source[1], f"run_dir={tmp_path / 'run'}"]
    ranks.run(2, train_on_rank, [*words, "trainer.max_steps=3"])
    ranks.run(2, train_on_rank, words)
    resumed, uninterrupted = step_tensors(tmp_path / "run", 6), step_tensors(run, 6)
    assert resumed.keys() == uninterrupted.keys()
    assert all(torch.equal(resumed[key], uninterrupted[key]) for key in resumed)


@pytest.mark.campaign
def test_a_run_goes_on_by_other_shards_and_ranks(
    ranks: RankPool, source: tuple[str, list[str]], tmp_path: Path
) -> None:
    words = [*TRAIN, *SMALL, *source[1], "optimizer.sparse.name=adagrad"]
    ranks.run(2, train_on_rank, [*words, f"run_dir={tmp_path / 'whole'}"])
    ranks.run(2, train_on_rank, [*words, f"run_dir={tmp_path / 'run'}", "trainer.max_steps=3"])
    wanted = step_tensors(tmp_path / "whole", 6)
    tables = [key for key in wanted if key.startswith("model.") and key.endswith(".weight")]
    for number, kind in enumerate(SHARDINGS):
        shutil.copytree(tmp_path / "run", tmp_path / kind)
        other = [f"run_dir={tmp_path / kind}", f"tables.default.sharding.sharding_types=[{kind}]"]
        ranks.run(1 + number % 2, train_on_rank, [*words, *other])
        moved = step_tensors(tmp_path / kind, 6)
        assert tables and all(torch.allclose(moved[key], wanted[key], atol=1e-5) for key in tables)


@pytest.fixture(scope="module")
def artifact(run: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportSummary:
    return run_export(run, tmp_path_factory.mktemp("exported") / "artifact", "precision=fp32")


@pytest.mark.campaign
def test_an_artifact_scores_as_the_trainer_evaluates(ranks: RankPool, run: Path, artifact: ExportSummary) -> None:
    metrics = ranks.run(1, _evaluate, str(run))[0]
    served = artifact.parity["validation"]
    assert served["max_score_difference"] < 1e-6
    assert served["ne"] == pytest.approx(metrics["ne"], abs=1e-6)
    assert ranks.run(2, _evaluate, str(run))[0]["ne"] == pytest.approx(metrics["ne"], abs=1e-7)


def test_raw_rows_score_as_prepared_rows(run: Path, source: tuple[str, list[str]], artifact: ExportSummary) -> None:
    raw, named = source
    job = load_config(TrainJob, [*TRAIN, *SMALL, *named, f"run_dir={run}"])
    assert assert_raw_rows_are_prepared_rows(artifact.artifact, job, raw) == NUM_ROWS
    assert artifact.parity["validation"]["max_score_difference"] < 1e-6
    predictor, rows = Predictor.load(artifact.artifact), raw_blocks(job.data, raw).slice(0, 40).drop_columns(["label"])
    expected = predictor.score(rows).scores
    asked = [
        {"item_id": row["item_id"], "tags": row["tags"].split("|") if row["tags"] else None} for row in rows.to_pylist()
    ]
    body = json.dumps({"rows": asked}).encode()
    requested = RequestReader(predictor.columns, LimitsConfig()).read(body, JSON_TYPE)
    assert predictor.score(requested).scores.tobytes() == expected.tobytes()
    about = openapi_page(predictor, LimitsConfig())["paths"]["/score"]["post"]["requestBody"]["content"][JSON_TYPE]
    assert (
        "id:weight" in about["schema"]["anyOf"][0]["properties"]["rows"]["items"]["properties"]["tags"]["description"]
    )
    for memory in ("mapped", "ssd"):
        other = Predictor.load(artifact.artifact, memory=memory, cache_bytes=2000 if memory == "ssd" else None)
        assert other.score(rows).scores.tobytes() == expected.tobytes()
    asked[3]["tags"] = ["t1:0.5", "t2:heavy"]
    spoilt = predictor.score(
        RequestReader(predictor.columns, LimitsConfig()).read(json.dumps({"rows": asked}).encode(), JSON_TYPE)
    )
    assert [bad.line for bad in spoilt.bad_rows] == [4] and mentions(spoilt.bad_rows[0].reason, "tags 't2:heavy'")
    asked[3]["tags"] = [element.partition(":")[0] for element in asked[0]["tags"]]
    asked[0]["tags"], asked[0]["item_id"] = asked[3]["tags"], asked[3]["item_id"]
    plain = predictor.score(
        RequestReader(predictor.columns, LimitsConfig()).read(json.dumps({"rows": asked}).encode(), JSON_TYPE)
    )
    assert plain.scores[0] == plain.scores[3] != expected[0]


@pytest.mark.campaign
@pytest.mark.parametrize(
    "words",
    [
        ["model=dlrm"],
        ["model=wide_deep", "trainer.precision=bf16"],
        ["tables.tags.pooling=mean", "optimizer=adam"],
        ["tables.tags.compression={kind: hash, ratio: 2}"],
        ["tables.tags.compression={kind: frequency_split, head_rows: 9}"],
        ["tables.tags.compression={kind: managed_collision, num_rows: 40, buckets: 2}"],
        ["tables.tags.compression={kind: tensor_train, rank: 3}"],
    ],
    ids=["dlrm", "wide_deep_bf16", "mean_adam", "hash", "split", "managed", "cores"],
)
def test_other_models_and_tables_are_exported_and_serve_raw_rows_too(
    ranks: RankPool, source: tuple[str, list[str]], tmp_path: Path, words: list[str]
) -> None:
    raw, named = source
    overrides = [*TRAIN, *SMALL, *named, *words, f"run_dir={tmp_path / 'run'}"]
    ranks.run(2, train_on_rank, overrides)
    exported = run_export(tmp_path / "run", tmp_path / "artifact", "precision=fp32")
    limit = 5e-3 if "trainer.precision=bf16" in words else 1e-5  # the artifact's layers are fp32
    assert exported.parity["validation"]["max_score_difference"] < limit
    job = load_config(TrainJob, overrides)
    assert assert_raw_rows_are_prepared_rows(exported.artifact, job, raw) == NUM_ROWS


ELEMENTS = st.one_of(
    st.none(),
    st.sampled_from(["v1", "v2:", "v8:x", "", "new:3", "v3:1e-3", "v4:.5", ":2", "v5:nan"]),
    st.floats(allow_nan=False, width=32).map(lambda number: f"v6:{number!r}"),
)
LISTS = st.one_of(st.none(), st.lists(ELEMENTS, max_size=5))


@examples(200)
@given(st.lists(LISTS, min_size=1, max_size=6))
def test_few_rows_and_whole_tables_are_encoded_alike(rows: list[Any]) -> None:
    indexed = index_values([(1, [f"v{number}" for number in range(9)])])
    features = [RawFeature("tags", 10, True, weighted=True), RawFeature("words", 10, True)]
    encoder = RowEncoder(RawSchema([], features, "none", "|"), dict.fromkeys(["tags", "words"], indexed))
    schema, words = schema_of(encoder.layout.columns), [["v1", "v2"]] * len(rows)
    table = pa.table([pa.array(rows, schema.field(0).type), pa.array(words, schema.field(1).type)], schema=schema)
    whole = encoder.encode_as_prepare(table)
    few = encoder.encode(ColumnLists(schema, [rows, words], len(rows)))
    for part in ("values", "offsets", "weights"):
        assert torch.equal(getattr(whole, part), getattr(few, part))
    assert whole.kept.tolist() == few.kept.tolist()
    assert [(row.line, row.reason) for row in whole.bad_rows] == [(row.line, row.reason) for row in few.bad_rows]
    assert whole.weights is not None and len(whole.weights) == len(whole.values)


def _trained_lift(rank: int, overrides: list[str]) -> float:
    summary = train(load_config(TrainJob, overrides))
    assert summary.bayes_auc is not None
    return (summary.validation["auc"] - 0.5) / (summary.bayes_auc - 0.5)


@pytest.mark.campaign
def test_a_model_with_the_weights_finds_the_teacher_and_one_without_falls_short(
    ranks: RankPool, tmp_path: Path
) -> None:
    raw, plain = tmp_path / "tags.tsv", tmp_path / "plain.tsv"
    generate(load_config(GenerateJob, ["data=tags", f"output={raw}"]))
    plain.write_text(re.sub(r":[^|\t\n]*", "", raw.read_text()))
    shutil.copy(f"{raw}.teacher.parquet", f"{plain}.teacher.parquet")
    lifts = {}
    for name, file, words in (("weights", raw, []), ("no weights", plain, ["data.columns.weighted=[]"])):
        data = [*words, f"data.path={tmp_path / name}"]
        prepare(load_config(PrepareJob, ["data=tags", *data, f"source={file}"]))
        for model in ("logistic_regression", "dlrm"):
            run = [f"model={model}", "tables.default.init.kind=auto", *data, f"run_dir={tmp_path / name}_{model}"]
            lifts[name, model] = ranks.run(1, _trained_lift, ["experiment=tags_lr", *run])[0]
    for (name, model), lift in lifts.items():
        print(f"{model} {name}: {lift:.1%} of the best lift")
    assert lifts["weights", "logistic_regression"] > 0.99 and lifts["weights", "dlrm"] > 0.95
    assert max(lifts["no weights", "logistic_regression"], lifts["no weights", "dlrm"]) < 0.85


@pytest.mark.campaign
def test_both_towers_of_a_retrieval_read_weights(ranks: RankPool, tmp_path: Path) -> None:
    random = np.random.default_rng(0)

    def tags(prefix: str) -> str:
        return "|".join(
            f"{prefix}{tag}:{random.normal():.3f}" for tag in random.permutation(12)[: random.integers(1, 5)]
        )

    items = {f"item{number}": tags("i") for number in range(30)}
    rows = [f"1\t{tags('u')}\t{item}\t{own}" for item, own in random.permutation(list(items.items()) * 40)]
    path = tmp_path / "rows.tsv"
    path.write_text("\n".join(["label\tuser_tags\titem_id\titem_tags", *rows]) + "\n")
    data = [
        "data=default",
        "data.name=pairs",
        "data.format=tsv",
        f"data.path={tmp_path / 'prepared'}",
        "data.columns.sparse=[item_id]",
        "data.columns.multi_hot=[user_tags,item_tags]",
        "data.columns.weighted=[user_tags,item_tags]",
    ]
    prepare(load_config(PrepareJob, [*data, f"source={path}"]))
    model = [
        "model=two_tower",
        "model.user_features=[user_tags]",
        "model.item_features=[item_id,item_tags]",
        "hardware=cpu",
        "name=pairs",
        "trainer.global_batch_size=64",
        "trainer.max_steps=6",
        "trainer.epochs=1",
        "tables.default.embedding_dim=8",
        "checkpoint.save_every_steps=6",
    ]
    ranks.run(2, train_on_rank, [*data, *model, f"run_dir={tmp_path / 'run'}"])
    summary = run_export(tmp_path / "run", tmp_path / "artifact", "precision=fp32")
    assert summary.certificate["splits"]["validation"]["max_vector_difference"] < 1e-5
    words = [f"artifact={summary.artifact}", f"source={path}", "retrieve.vectors=true", "retrieve.tower=item"]
    assert predict(load_config(PredictJob, [*words, f"output={tmp_path / 'items.parquet'}"])).num_refused == 0
    found = np.array(pq.read_table(tmp_path / "items.parquet")["vector"].to_pylist(), np.float32)
    index = np.fromfile(tmp_path / "artifact" / "items.vectors", "<f4").reshape(30, -1)
    values = Retriever.load(summary.artifact).items
    own = [values.positions_of([row.split("\t")[2]])[0] for row in rows]
    np.testing.assert_allclose(found, index[own], atol=1e-6)
    assert len(np.unique(found.round(4), axis=0)) == 30
