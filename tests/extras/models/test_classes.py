"""A label of classes: the softmax finds planted probabilities, which are served by class and sum to 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from pipeline.cli.command_line import load_config
from pipeline.config.columns import ColumnsConfig, LabelConfig
from pipeline.config.jobs.evaluate import PredictJob
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.prepare.run import prepare
from pipeline.data.read.batch import Batch
from pipeline.data.targets import Target, heads_of
from pipeline.extras.models.layers.towers import class_logits
from pipeline.models.tasks.labels import LabelsTask
from pipeline.runtime.errors import ConfigError
from pipeline.serving.scoring.predict import predict
from tests.extras.models.planted_logs import train_on
from tests.models.every_model import small
from tests.serving.exports import run_export
from tests.support.messages import names
from tests.support.ranks import RankPool

CLICK, COLOR = Target("click"), Target("color", "classes", 3, weight=0.5)
ALL = [CLICK, *COLOR.classes, Target("stars", "ordinal", 4)]
LABELS = "{click: {}, color: {kind: classes, num_buckets: 3, values: {red: 0, green: 1, blue: 2}}}"
NUM_ITEMS = 8


def test_the_loss_is_the_cross_entropy_of_the_softmax_and_scores_are_its_probabilities() -> None:
    scores = 4 * torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    colors = torch.arange(50) % 3
    outputs = class_logits(scores)
    torch.testing.assert_close(torch.sigmoid(outputs), torch.softmax(scores, 1))
    labels = F.one_hot(colors, 3).double()
    task = LabelsTask(small("mmoe"), [], COLOR.classes)
    _, prediction = task(outputs, Batch(outputs, None, labels, torch.ones(50, 3)))
    expected = 0.5 * F.cross_entropy(scores, colors, reduction="none")
    torch.testing.assert_close(task.losses(prediction).double(), expected, rtol=1e-5, atol=1e-6)
    assert class_logits(torch.tensor([[200.0, 0.0, -200.0]])).isfinite().all()


def test_classes_are_targets_that_share_a_head_and_a_learnt_weight() -> None:
    assert [target.name for target in ALL] == ["click", "color_0", "color_1", "color_2", "stars"]
    assert heads_of(ALL) == [CLICK, COLOR, ALL[-1]]
    assert len(LabelsTask(small("mmoe", uncertainty_weights=True), [], ALL).log_variances) == 3


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ({"color": {"kind": "classes"}}, "labels.kind=classes num_buckets"),
        ({"color": {"kind": "classes", "num_buckets": 3}, "color_1": {}}, "'color_1' 'color'"),
        ({"color": {"kind": "classes", "num_buckets": 2, "values": {"a": 2, "b": 0}}}, "'a' 2 0 1"),
    ],
)
def test_bad_settings_are_refused(labels: dict[str, dict[str, object]], told: str) -> None:
    with pytest.raises(ConfigError, match=names(told)):
        ColumnsConfig(labels={name: LabelConfig(**each) for name, each in labels.items()})  # type: ignore[arg-type]


def _truth() -> np.ndarray:
    """The probability of each color of each item, [NUM_ITEMS, 3]."""
    scores = np.random.default_rng(1).normal(0, 1.5, (NUM_ITEMS, 3))
    return np.exp(scores) / np.exp(scores).sum(1, keepdims=True)


@pytest.mark.long
def test_planted_classes_are_learnt_on_two_ranks_and_served(ranks: RankPool, tmp_path: Path) -> None:
    random, truth = np.random.default_rng(0), _truth()
    items = random.integers(0, NUM_ITEMS, 8000)
    colors = (random.random(len(items))[:, None] > truth[items].cumsum(1)).sum(1)
    rows = [f"{random.integers(2)},{('red', 'green', 'blue')[color]},{item}" for color, item in zip(colors, items, strict=True)]  # fmt: skip
    (tmp_path / "rows.csv").write_text("\n".join(["click,color,item", *rows, ""]))
    data = ["data=default", "data.name=colors", "data.format=csv", f"data.columns.labels={LABELS}", "data.columns.sparse=[item]", f"data.path={tmp_path}/ds"]  # fmt: skip
    prepare(load_config(PrepareJob, [*data, f"source={tmp_path}/rows.csv", "threads=1"]))
    run = [*data, "model=shared_bottom", "model.hidden_layer_sizes=[16]", "model.tower_layer_sizes=[]", "tables.default.embedding_dim=8",
           "trainer.global_batch_size=256", "trainer.epochs=6", "optimizer.dense.lr=0.02", "optimizer.sparse.lr=0.1", "hardware=cpu",
           f"run_dir={tmp_path}/run", "checkpoint=at_end", "checkpoint.best_metric=color_2/ne", "logger.report=false", "logger.tensorboard=false"]  # fmt: skip
    summary = train_on(ranks, 2, run)
    assert {"color_0/auc", "color_2/calibration", "click/ne"} <= summary.validation.keys()
    run_export(f"{tmp_path}/run", tmp_path / "artifact", "precision=fp32")
    (tmp_path / "items.csv").write_text("\n".join(["item", *map(str, range(NUM_ITEMS)), ""]))
    words = [f"artifact={tmp_path}/artifact", f"source={tmp_path}/items.csv", f"output={tmp_path}/scores.parquet"]
    predict(load_config(PredictJob, words))
    table = pq.read_table(tmp_path / "scores.parquet")
    scores = np.stack([table[f"score_color_{color}"].to_numpy() for color in range(3)], axis=1)
    print("mean error", np.abs(scores - truth).mean())
    np.testing.assert_allclose(scores.sum(1), 1.0, atol=1e-5)
    assert np.abs(scores - truth).mean() < 0.03


def test_a_model_of_one_number_refuses_classes(tmp_path: Path) -> None:
    from pipeline.models.tasks.task import make_task

    with pytest.raises(ConfigError, match=names("model=dlrm 'color' classes num_buckets=3 3 model=shared_bottom")):
        make_task(small("dlrm"), torch.nn.Identity(), [], COLOR.classes)
