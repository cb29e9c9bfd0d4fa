"""A run with a table of each kind: trained on two ranks, evaluated on one, exported, scored, resumed, started from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.checkpoint.tensors import StepTensors
from pipeline.checkpoint.warm_start_policy import NewData, RowMap, _fresh_composed, composer_of
from pipeline.cli.command_line import load_config
from pipeline.config.data import ReaderConfig
from pipeline.config.jobs.evaluate import EvaluateJob, ExportJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.tables import CompressionConfig
from pipeline.config.training import WarmStartConfig
from pipeline.data.dataset import load_dataset
from pipeline.data.read.reader import ShardReader
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.runtime.errors import CheckpointError, ServingError
from pipeline.serving.artifact.export import export
from pipeline.serving.scoring.predictor import Predictor
from pipeline.training.evaluate import evaluate
from pipeline.training.train import train
from tests.embeddings.compressed import PooledModel, as_features, sample_bags, table_of
from tests.support.datasets import described_dataset
from tests.support.messages import mentions, names
from tests.support.ranks import RankPool

MULTI_HOT = {"cat_24": 3, "cat_21": 4, "cat_23": 2}
WORDS = [
    "experiment=quickstart", "hardware=cpu", "trainer.global_batch_size=256", "trainer.evaluate_batch_size=1024",
    "trainer.max_steps=6", "trainer.evaluate_max_batches=1", "checkpoint.save_every_steps=3",
    "data.synthetic_multi_hot={" + ", ".join(f"{name}: {size}" for name, size in MULTI_HOT.items()) + "}",
    "tables.default.compression={kind: quotient_remainder, min_rows: 400}",
    "tables.cat_25.compression={kind: hash, ratio: 8}", "tables.cat_25.sharding.sharding_types=[row_wise]",
    "tables.cat_24.compression.kind=tensor_train", "tables.cat_24.pooling=mean",
    "tables.cat_23.compression.kind=path_based", "tables.cat_23.sharding.sharding_types=[row_wise]",
    "tables.cat_22.compression={kind: mixed_dimension, ratio: 2}", "tables.cat_22.sharding.sharding_types=[table_wise]",
    "tables.cat_21.compression={kind: quotient_remainder, operation: multiply}", "tables.cat_21.pooling=mean",
]  # fmt: skip


def words(data: str, run: Path, *more: str) -> list[str]:
    return [*WORDS, f"data.path={data}", f"run_dir={run}", *more]


def _train(rank: int, overrides: list[str]) -> str:
    """What was wrong, or nothing."""
    try:
        train(load_config(TrainJob, overrides))
    except ValueError as error:
        return str(error)
    return ""


def _evaluate(rank: int, run: str) -> dict[str, float]:
    return evaluate(load_config(EvaluateJob, [f"run={run}", "split=validation"])).metrics


@pytest.fixture(scope="module")
def run(ranks: RankPool, prepared_clicks: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed") / "run"
    assert ranks.run(2, _train, words(prepared_clicks, folder)) == ["", ""]
    return folder


def test_the_summary_says_what_was_saved_and_who_shares_rows(run: Path) -> None:
    found = json.loads((run / "summary.json").read_text())["compression"]
    assert {name: table["kind"] for name, table in found.items()} == {
        "cat_19": "quotient_remainder add",
        "cat_20": "quotient_remainder add",
        "cat_21": "quotient_remainder multiply",
        "cat_22": "mixed_dimension",
        "cat_23": "path_based",
        "cat_24": "tensor_train",
        "cat_25": "hash",
    }
    assert all(table["table_bytes"] < table["full_bytes"] for table in found.values())
    assert found["cat_25"]["full_bytes"] == pytest.approx(8 * found["cat_25"]["table_bytes"], rel=0.01)
    assert 0 < found["cat_25"]["collisions"]["lookups_of_others"] < found["cat_25"]["collisions"]["lookups"] <= 1


@pytest.mark.campaign
def test_an_artifact_scores_as_the_trainer_evaluates_on_another_number_of_ranks(
    ranks: RankPool, run: Path, prepared_clicks: str
) -> None:
    metrics = ranks.run(1, _evaluate, str(run))[0]
    summary = export(load_config(ExportJob, [f"run={run}", "precision=fp32", "parity.splits=[validation]"]))
    assert summary.parity["validation"]["max_score_difference"] < 1e-5
    predictor = Predictor.load(summary.artifact)
    dataset, losses, labels = load_dataset(prepared_clicks), [], []
    reader = ShardReader(
        prepared_clicks,
        dataset,
        "validation",
        global_batch_size=512,
        rank=0,
        world_size=1,
        config=ReaderConfig(),
        seed=0,
        multi_hot=MULTI_HOT,
        drop_last=False,
    )
    for batch in reader.batches(epoch=0):
        real = batch.sample_weights > 0
        scores = predictor.score_batch(batch.dense_features, batch.sparse_features).double()[real]
        truth = batch.labels.double()[real]
        losses.append(-(truth * scores.log() + (1 - truth) * (1 - scores).log()))
        labels.append(truth)
    rate = torch.cat(labels).mean()
    entropy = -(rate * rate.log() + (1 - rate) * (1 - rate).log())
    assert float(torch.cat(losses).mean() / entropy) == pytest.approx(metrics["ne"], abs=1e-5)
    with pytest.raises(ServingError):
        batch.sparse_features.values()[-1] = 10**9
        predictor.score_batch(batch.dense_features, batch.sparse_features)


@pytest.mark.long
def test_a_run_does_not_go_on_with_another_hash(ranks: RankPool, run: Path, prepared_clicks: str) -> None:
    changed = words(prepared_clicks, run, "trainer.max_steps=8", "tables.cat_25.compression.seed=1")
    for problem in ranks.run(2, _train, changed):
        assert mentions(problem, "cat_25")
        assert "its rows would mean other ids; keep tables.*.compression" in problem


@pytest.mark.long
def test_a_new_run_takes_the_compressed_tables_that_mean_the_same(
    ranks: RankPool, run: Path, prepared_clicks: str, tmp_path: Path
) -> None:
    changed = [f"warm_start.run={run}", "tables.cat_25.compression.seed=1", "trainer.max_steps=1"]
    refused = ranks.run(2, _train, words(prepared_clicks, tmp_path / "refused", *changed))
    assert mentions(refused[0], "cat_25")
    fresh = words(prepared_clicks, tmp_path / "new", *changed, "warm_start.composed_tables=fresh")
    assert ranks.run(2, _train, fresh) == ["", ""]
    report = json.loads((tmp_path / "new" / "warm_start.json").read_text())
    loaded = {table["table"]: table["rows_loaded"] for table in report["tables"]}
    assert loaded["cat_25__hash"] == 0
    assert all(rows > 0 for name, rows in loaded.items() if name != "cat_25__hash")
    assert not [name for name in report["layers_fresh"] if "composers" in name]


@pytest.mark.campaign
def test_a_new_run_takes_rows_of_managed_collision_with_the_maps_that_say_whose_they_are(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    managed = [
        "experiment=quickstart",
        "hardware=cpu",
        "trainer.global_batch_size=256",
        f"data.path={prepared_clicks}",
        "tables.cat_25.compression={kind: managed_collision, num_rows: 64, buckets: 2, eviction_interval: 2}",
        "tables.cat_25.sharding.sharding_types=[row_wise]",
    ]
    old, new = tmp_path / "old", tmp_path / "new"
    assert ranks.run(2, _train, [*managed, f"run_dir={old}", "trainer.max_steps=4"]) == ["", ""]
    started = [*managed, f"run_dir={new}", f"warm_start.run={old}", "trainer.max_steps=1"]
    assert ranks.run(2, _train, started) == ["", ""]
    then, now = (
        StepTensors(str(run / "checkpoints" / step)) for run, step in ((old, "step_00000004"), (new, "step_00000001"))
    )
    (key,) = (key for key in then.entries if key.endswith("cat_25__managed.sorted_ids"))
    ids = [tensors.read(key, [0], [64]) for tensors in (then, now)]
    assert (ids[0] != ids[0].max()).sum() > 20  # most rows belong to an id
    assert torch.equal(*ids)  # the second step decides anew, the first does not


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("model.composition.composers.t__parts.weights.0", "t"),
        ("model.embeddings.managed_rows.t__managed.sorted_ids", "t"),
        ("model.embeddings.managed_rows.t__cold__managed.rows", "t"),
        ("model.over_arch.0.weight", None),
    ],
)
def test_what_belongs_to_a_compressed_table_is_no_layer_of_the_model(key: str, table: str | None) -> None:
    assert composer_of(key) == table


@pytest.mark.parametrize(
    ("row_map", "then", "problem"),
    [
        (
            RowMap("old", "new"),
            "hash of 9",
            "its vocabulary has changed, and rows that several ids share cannot follow",
        ),
        ("no vocabulary", "hash of 9", "its ids cannot be matched by value: no vocabulary"),
        (RowMap(), "hash of 8", "it was hash of 8, and is now hash of 9"),
        (RowMap(), "hash of 9", ""),
    ],
)
def test_rows_that_ids_share_follow_no_value_to_another_id(row_map: RowMap | str, then: str, problem: str) -> None:
    data = NewData(described_dataset({}), "here", {}, {"t__hash": "t"}, {"t": "hash of 9"})
    manifest = {"compression": {"t": then}}
    fresh = WarmStartConfig(run="r", composed_tables="fresh")
    found = _fresh_composed(manifest, data, fresh, lambda old, new: row_map)
    assert found.keys() == ({"t"} if problem else set())
    if problem:
        assert problem in found["t"]
        with pytest.raises(CheckpointError, match=names("composed_tables=refuse composed_tables=fresh")):
            _fresh_composed(manifest, data, WarmStartConfig(run="r"), lambda old, new: row_map)


def test_ids_are_composed_before_a_bag_is_pooled() -> None:
    """A product of the parts' pooled sums would be another number."""
    table = table_of("t", CompressionConfig("quotient_remainder", bases=[10], operation="multiply"))
    embeddings = PooledModel([table], torch.device("cpu")).embeddings
    weights = {name.split(".")[-2]: value for name, value in embeddings.state_dict().items()}
    remainder, quotient = weights["t__remainder"], weights["t__quotient"]
    bag = [3, 41, 12]
    features = IdSplitter([table])(as_features({"t_one": [[7]], "t_many": [bag]}, slice(0, 1)))
    pooled = embeddings(features)["t_many"][0]
    right = sum(remainder[id_ % 10] * quotient[id_ // 10] for id_ in bag)
    wrong = remainder[[id_ % 10 for id_ in bag]].sum(0) * quotient[[id_ // 10 for id_ in bag]].sum(0)
    np.testing.assert_allclose(pooled.detach(), right, atol=1e-6)
    assert (pooled - wrong).abs().max() > 0.1


def test_rows_are_composed_in_fp32_under_bf16() -> None:
    configs = {
        "multiply": CompressionConfig("quotient_remainder", operation="multiply"),
        "path": CompressionConfig("path_based", num_rows=12),
        "mixed": CompressionConfig("mixed_dimension", dims=[16, 8, 4]),
        "cores": CompressionConfig("tensor_train", rank=3),
    }
    tables = [table_of(name, config) for name, config in configs.items()]
    embeddings = PooledModel(tables, torch.device("cpu")).embeddings
    features = IdSplitter(tables)(as_features(sample_bags(tables, 0)[0], slice(None)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_bf16 = embeddings(features).values()
    assert under_bf16.dtype == torch.float32
    assert torch.equal(under_bf16, embeddings(features).values())
