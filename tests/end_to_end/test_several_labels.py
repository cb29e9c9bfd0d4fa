"""Four labels, with masks, weights and sampled negatives, from raw rows to scores by name and the gate's verdict."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.data import ReaderConfig
from pipeline.config.jobs.evaluate import EvaluateJob, PredictJob
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.retraining import GateConfig
from pipeline.data.dataset import load_dataset
from pipeline.data.prepare.run import prepare
from pipeline.data.read.reader import ShardReader
from pipeline.extras.checkpoints.cli.checkpoints import list_checkpoints
from pipeline.extras.checkpoints.config import CheckpointsJob
from pipeline.extras.runs.evaluation_stats import read_stats
from pipeline.extras.runs.folder import open_run
from pipeline.extras.runs.listing import as_text
from pipeline.extras.runs.report import render_report
from pipeline.retraining.gate import Scores, judge
from pipeline.retraining.scoring import score
from pipeline.serving.artifact.export import ExportSummary
from pipeline.serving.artifact.export import describe as describe_export
from pipeline.serving.http.app import _answer
from pipeline.serving.http.batching import Scores as BatchScores
from pipeline.serving.http.openapi import openapi_page
from pipeline.serving.http.request_rows import ARROW_TYPE, JSON_TYPE
from pipeline.serving.http.switching import try_out
from pipeline.serving.scoring.predict import predict
from pipeline.serving.scoring.predictor import Predictor
from pipeline.serving.scoring.scorer import RefusedRow
from pipeline.training import summary as train_summary
from pipeline.training.evaluate import evaluate
from pipeline.training.summary import TrainSummary
from pipeline.training.train import train
from tests.serving.exports import run_export
from tests.support.jobs import evaluate_on_rank, train_on_rank
from tests.support.ranks import RankPool
from tests.support.stored_tensors import stored_tensors

NUM_ROWS = 4000
LABELS = ["click", "order", "stars", "seconds"]


def _rows() -> str:
    """What is masked is empty where there was no click."""
    random = np.random.default_rng(0)
    effects, lines = random.normal(0, 1.5, 20), ["click,order,stars,seconds,worth,user,item"]
    for user, item in random.integers(0, [20, 20], (NUM_ROWS, 2)):
        click = int(random.random() < 1 / (1 + math.exp(1 - effects[user] - effects[item])))
        masked = f"{int(random.random() < 0.5)},{item / 10 + random.random():.3f}" if click else ","
        order, _, seconds = masked.partition(",")
        lines.append(f"{click},{order},{(user + item) // 10},{seconds},{0.5 + random.random():.3f},u{user},i{item}")
    return "\n".join([*lines, ""])


def _data(folder: Path, *more: str) -> list[str]:
    labels = "{click: {}, order: {mask: click}, stars: {kind: ordinal, num_buckets: 4}, seconds: {kind: regression, mask: click}}"
    return [
        "data=default",
        "data.name=labels",
        "data.format=csv",
        f"data.columns.labels={labels}",
        "data.columns.weight=worth",
        "data.columns.sparse=[user,item]",
        f"data.path={folder / 'ds'}",
        "data.rows_per_row_group=64",
        "data.negative_sampling={label: click, keep: 0.5, seed: 0}",
        "data.group_column=user",
        *more,
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    (folder / "rows.csv").write_text(_rows())
    prepare(load_config(PrepareJob, [*_data(folder), f"source={folder}/rows.csv", "threads=1"]))
    return folder


def _job(folder: Path, run: Path, *more: str) -> list[str]:
    return [
        *_data(folder), "model=mmoe", f"run_dir={run}", "hardware=cpu", "trainer.global_batch_size=256",
        "trainer.evaluate_every_steps=24", "trainer.max_steps=48", "trainer.epochs=20", "tables.default.embedding_dim=8", "trainer.log_every_steps=16",
        "checkpoint.save_every_steps=24", "model.expert_layer_sizes=[16]", "model.tower_layer_sizes=[8]",
        "optimizer.dense.lr=0.01", "optimizer.sparse.lr=0.3", "checkpoint.best_metric=order/ne", *more,
    ]  # fmt: skip


def _evaluate(rank: int, run: str) -> dict[str, float]:
    words = [f"run={run}", "split=validation", "importance_rows=256", "slices=[user]", "metrics=[xauc]"]
    summary = evaluate(load_config(EvaluateJob, words))
    print(text := train_summary.describe_evaluation(summary))
    assert all(f"NE of {label} rises by" in text and f"slices {label}: by user" in text for label in ("click", "order"))
    return summary.metrics


@pytest.fixture(scope="module")
def trained(ranks: RankPool, folder: Path) -> TrainSummary:
    return ranks.run(2, train_on_rank, _job(folder, folder / "run"))[0]


@pytest.mark.long
def test_each_label_is_measured_by_its_name_and_learns(ranks: RankPool, trained: TrainSummary) -> None:
    metrics = trained.validation
    assert metrics["num_samples"] == 400 and metrics["order/num_samples"] < 300
    assert metrics["click/auc"] > 0.6 and metrics["stars/ne"] < 1.0 and metrics["seconds/mse"] < 1.5
    assert {"click/calibration", "stars/mae", "seconds/r2", "order/logloss", "order/gauc"} <= metrics.keys()
    assert 0 < metrics["order/num_groups"] <= metrics["click/num_groups"] == 20
    text = train_summary.describe(trained)
    print(metrics)
    assert "click: AUC" in text and "seconds: mse" in text
    lines = [json.loads(line) for line in Path(trained.run_dir, "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["kind"] == "train"]
    assert len(found) == 3 and found[-1]["seconds/mse"] < found[0]["seconds/mse"] and "click/ne" in found[0]
    listed = "\n".join(list_checkpoints(load_config(CheckpointsJob, [f"run={trained.run_dir}"])))
    assert "order/ne" in listed and "best order/ne" in listed and "seconds/mse" in listed
    table = as_text([open_run(trained.run_dir)])
    assert [line.split()[-1] for line in table.splitlines()[2:]][-1] == f"{metrics['seconds/mse']:.4f}"
    assert all(f" {name} " in table for name in LABELS)
    stats = read_stats(open_run(trained.run_dir).stats["validation", 48])
    assert [each.label for each in (stats, *stats.others)] == ["click", "order"]
    assert [each.blocks.rows.sum() for each in (stats, *stats.others)] == [400, metrics["order/num_samples"]]
    measured = ranks.run(1, _evaluate, trained.run_dir)[0]
    xaucs = {name.removesuffix("/xauc"): measured.pop(name) for name in list(measured) if name.endswith("/xauc")}
    assert measured == pytest.approx(metrics, abs=2e-4)
    assert list(xaucs) == LABELS and min(xaucs.values()) > 0.5 and xaucs["order"] == pytest.approx(metrics["order/auc"])

    importance = json.loads(Path(trained.run_dir, "importance.json").read_text())
    order = importance["others"]["order"]
    assert importance["label"] == "click" and importance["others"].keys() == {"order"}
    assert importance["rows"] == 256 > order["rows"] > 50 and order["ne"] != importance["ne"]
    run = open_run(trained.run_dir)
    assert run.importances["order"]["item"] == (
        order["features"]["item"]["ne_increase"],
        order["features"]["item"]["error"],
    )
    page = render_report(run)
    assert all(f"NE of {label} rises without it" in page for label in ("click", "order"))
    assert "<h3>click: by user</h3>" in page and "<h3>order: by user</h3>" in page


@pytest.mark.campaign
def test_a_run_of_several_labels_resumes_bit_for_bit(
    ranks: RankPool, folder: Path, trained: TrainSummary, tmp_path: Path
) -> None:
    ranks.run(2, train_on_rank, _job(folder, tmp_path / "run", "trainer.max_steps=29"))
    resumed = ranks.run(2, train_on_rank, _job(folder, tmp_path / "run"))[0]
    parts = [stored_tensors(each.checkpoint) for each in (trained, resumed)]
    assert parts[0] and parts[0] == parts[1]


@pytest.mark.long
def test_an_artifact_scores_each_label_by_name_and_is_certified_by_each(
    ranks: RankPool, folder: Path, trained: TrainSummary, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "pipeline.export"):
        exported = run_export(trained.run_dir, tmp_path / "artifact", "precision=fp32")
    assert "seconds: MSE/variance" in caplog.text and " nan" not in caplog.text
    parity = exported.parity["validation"]
    assert list(parity["tasks"]) == LABELS and parity["max_score_difference"] < 1e-5
    of_order = parity["tasks"]["order"]
    assert of_order["ne"] == pytest.approx(trained.validation["order/ne"], abs=0.02)  # there weighted by `worth`
    _check_report(exported)
    predictor = Predictor.load(str(tmp_path / "artifact"))
    _check_evaluated_rows(ranks, trained, folder, tmp_path / "rows.parquet", predictor)
    try_out(predictor)
    job = PredictJob(
        artifact=str(tmp_path / "artifact"),
        source=str(folder / "rows.csv"),
        output=str(tmp_path / "scores.parquet"),
        id_columns=["click"],
    )
    assert predict(job).num_refused == 0
    table = pq.read_table(job.output)
    assert table.column_names == ["row", "click", *(f"score_{name}" for name in LABELS)]
    clicks, scores = np.array(table["click"].to_pylist(), int), table["score_click"].to_numpy()
    assert abs(scores.sum() / clicks.sum() - 1) < 0.15  # half of the negatives trained, and all are predicted
    assert table["score_stars"].to_numpy().min() >= 0 and table["score_stars"].to_numpy().max() <= 3
    _check_answers(predictor)


def _check_evaluated_rows(
    ranks: RankPool, trained: TrainSummary, folder: Path, path: Path, predictor: Predictor
) -> None:
    """evaluate's file has the artifact's scores, the weights, and nulls where a mask excludes a label."""
    words = [f"run={trained.run_dir}", "split=validation", f"predictions={path}"]
    metrics = ranks.run(2, evaluate_on_rank, words)[0].metrics
    table = pq.read_table(path).sort_by("row")
    kinds = [f"{kind}_{name}" for kind in ("label", "score") for name in LABELS]
    assert table.column_names == ["row", *kinds, "weight", "group"]
    rows = {name: table[name].to_numpy().astype(np.float64) for name in table.column_names}  # null is NaN
    reader = ShardReader(
        str(folder / "ds"), load_dataset(str(folder / "ds")), "validation", global_batch_size=400, rank=0, world_size=1,
        config=ReaderConfig(shuffle="none"), seed=0, drop_last=False,
    )  # fmt: skip
    (batch,), (at,) = reader.batches(epoch=0), reader.positions(epoch=0)
    expected = predictor.score_batch(batch.dense_features, batch.sparse_features).numpy()
    for number, name in enumerate(LABELS):
        np.testing.assert_allclose(rows[f"score_{name}"][at], expected[:, number], atol=1e-6)
    np.testing.assert_allclose(rows["weight"][at], batch.sample_weights.numpy())
    for name in ("order", "seconds"):
        assert (np.isnan(rows[f"label_{name}"]) == (rows["label_click"] == 0)).all()
    for name in ("click", "order"):
        counted = ~np.isnan(rows[f"label_{name}"])
        labels, scores, weights = (rows[each][counted] for each in (f"label_{name}", f"score_{name}", "weight"))
        losses = -(labels * np.log(scores) + (1 - labels) * np.log1p(-scores))
        assert np.average(losses, weights=weights) == pytest.approx(metrics[f"{name}/logloss"], abs=1e-6)
        pairs = np.sign(scores[labels == 1][:, None] - scores[labels == 0]) / 2 + 0.5
        pair_weights = weights[labels == 1][:, None] * weights[labels == 0]
        assert np.average(pairs, weights=pair_weights) == pytest.approx(metrics[f"{name}/auc"], abs=1e-6)


def _check_report(exported: ExportSummary) -> None:
    """A label that is a number has no AUC, and none is printed for it, beside others or alone."""
    costs, splits = exported.certificate["precisions"], exported.certificate["splits"]
    alone = {
        "precisions": {name: {**cost, **cost["tasks"]["seconds"]} for name, cost in costs.items()},
        "splits": {split: each["tasks"]["seconds"] for split, each in splits.items()},
    }
    for summary in (exported, replace(exported, certificate=alone)):
        text = describe_export(summary)
        assert "MSE/variance" in text and "nan" not in text
        assert ("AUC" in text) == (summary is exported)


def _check_answers(predictor: Predictor) -> None:
    """What a request gets: a list of scores a label, null where a row was refused."""
    scores = np.arange(8, dtype=np.float32).reshape(2, 4)
    scores[1] = np.nan
    given = BatchScores(scores, [RefusedRow(1, "bad")])
    body = msgspec.json.decode(_answer(predictor, given, JSON_TYPE).body)
    assert body["scores"] == {name: [float(i), None] for i, name in enumerate(LABELS)} and len(body["bad_rows"]) == 1
    table = pa.ipc.open_stream(_answer(predictor, given, ARROW_TYPE).body).read_all()
    assert table.column_names == [*(f"score_{name}" for name in LABELS), "reason"]
    assert table["score_stars"].to_pylist() == [2.0, None]
    page = openapi_page(predictor, load_limits())
    answer = page["paths"]["/score"]["post"]["responses"]["200"]["content"][JSON_TYPE]["schema"]
    assert list(answer["properties"]["scores"]["properties"]) == LABELS


def load_limits() -> object:
    from pipeline.config.serving import LimitsConfig

    return LimitsConfig()


def _scored(rank: int, run: str, checkpoint: str, data: str, gate: GateConfig) -> Scores:
    job = load_config(TrainJob, ["experiment=quickstart", f"run_dir={run}"])
    return score(f"{run}/config.yaml", checkpoint, data, gate, 1, job.trainer.limits())


def test_the_gate_goes_by_one_label_and_holds_others(ranks: RankPool, folder: Path, trained: TrainSummary) -> None:
    gate = GateConfig(
        task="order",
        held={"stars": 0.05, "seconds": 0.05},
        ne_tolerance=0.05,
        min_rows=100,
        calibration_min=0.5,
        calibration_max=2.0,
        slices={"item": 5.0},
        slice_min_rows=10,
        bootstrap_samples=200,
    )
    (last,) = ranks.run(1, _scored, trained.run_dir, trained.checkpoint, str(folder / "ds"), gate)
    assert len(last.slices["item"]) == len(last.labels) and last.weights is not None
    assert len(last.held["stars"].losses) > len(last.labels) == len(last.held["seconds"].losses)
    verdict = judge(last, last, gate)
    assert verdict.passed and [finding.name for finding in verdict.findings[-2:]] == ["held stars", "held seconds"]
    stars = last.held["stars"]
    worse = replace(last, held={**last.held, "stars": replace(stars, losses=stars.losses * 1.2)})
    (reason,) = judge(worse, last, gate).reasons
    assert "label stars" in reason and "1.2000" in reason and "1.0500" in reason


def _best(rank: int, overrides: list[str]) -> dict[str, float]:
    summary = train(load_config(TrainJob, overrides))
    return evaluate(load_config(EvaluateJob, [f"run={summary.run_dir}", "split=test"])).metrics


@pytest.mark.campaign
def test_real_rows_of_three_labels_rank_clicks_as_well_as_of_one(
    ranks: RankPool, samples: Path, tmp_path: Path
) -> None:
    maker = samples / "ml100k" / "make.py"
    if not maker.is_file():
        pytest.skip(f"MovieLens 100k is not at {maker.parent}")
    subprocess.run([sys.executable, str(maker), str(tmp_path)], check=True)
    files = [f"data.split.{split}={tmp_path}/{split[:5]}.csv" for split in ("train", "validation", "test")]
    found = {}
    for data in ("ml100k", "ml100k_labels"):
        place = [f"data={data}", f"data.path={tmp_path}/{data}", "data.columns.weight=weight"]
        prepare(load_config(PrepareJob, [*place, *files]))
        metric = "auc" if data == "ml100k" else "click/auc"
        found[data] = ranks.run(
            1, _best, [
                *place, "model=mmoe", f"run_dir={tmp_path}/run_{data}", "hardware=cpu", "trainer.global_batch_size=512",
                "tables.default.embedding_dim=16", "early_stop=auc", "trainer.epochs=15", "optimizer=adam",
                "optimizer.sparse.lr=0.003", "optimizer.dense.lr=0.003", f"trainer.early_stop.metric={metric}",
                f"checkpoint.best_metric={metric}", f"schedule.plateau.metric={metric}",
            ],
        )[0]  # fmt: skip
    three, one = found["ml100k_labels"], found["ml100k"]
    for name in ("click/auc", "click/gauc", "top/auc", "rating/r2"):
        print(f"{name} {three[name]:.4f}")
    print(f"click alone: AUC {one['auc']:.4f}, GAUC {one['gauc']:.4f}")
    assert three["click/auc"] > one["auc"] - 0.002
    assert three["top/auc"] > 0.7 and three["rating/r2"] > 0.2


@pytest.mark.campaign
def test_a_tenth_of_the_negatives_trains_a_calibrated_model(ranks: RankPool, tmp_path: Path) -> None:
    sizes = ["data.generator.num_rows=600000", "data.generator.num_users=500", "data.generator.num_items=300"]
    generate(load_config(GenerateJob, ["data=conversions", f"output={tmp_path}/rows.tsv", *sizes]))
    found = {}
    for data in ("conversions", "conversions_sampled"):
        place = [f"data={data}", f"data.path={tmp_path}/{data}"]
        prepare(load_config(PrepareJob, [*place, f"source={tmp_path}/rows.tsv"]))
        found[data] = ranks.run(
            1, _best, [
                *place, "model=mmoe", f"run_dir={tmp_path}/run_{data}", "hardware=cpu", "trainer.global_batch_size=1024",
                "tables.default.embedding_dim=16", "optimizer.dense.lr=0.001", "trainer.epochs=2", "model.expert_layer_sizes=[64]",
                "tables.default.init.scale=0.05", "tables.default.init.kind=normal", "optimizer=adam", "optimizer.sparse.lr=0.001",
            ],
        )[0]  # fmt: skip
        rows = load_dataset(f"{tmp_path}/{data}").splits["train"].num_rows
        said = ", ".join(
            f"{name} {found[data][name]:.4f}"
            for name in ("click/ne", "click/auc", "click/calibration", "conversion/auc", "conversion/calibration")
        )
        print(f"{data}: {rows:,} training rows, {said}")
    whole, sampled = found["conversions"], found["conversions_sampled"]
    assert abs(sampled["click/calibration"] - 1) < 0.05 and abs(sampled["conversion/calibration"] - 1) < 0.1
    assert sampled["click/auc"] > whole["click/auc"] - 0.03
