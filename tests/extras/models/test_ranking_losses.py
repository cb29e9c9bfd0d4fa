"""Losses within groups: they equal their formulas, find what log loss cannot, and train on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.config.model import ModelConfig
from pipeline.config.optimizers import DenseOptimizerConfig
from pipeline.config.training import LossConfig
from pipeline.data.read.batch import Batch
from pipeline.extras.models.tasks.ranking import RANKINGS, ListRows
from pipeline.extras.models.tasks.reshaped_click import ReshapedClickTask
from pipeline.extras.step_time.recorded_layers import Inputs, record_dense
from pipeline.models.tasks.task import TaskModel
from pipeline.runtime.errors import ConfigError
from tests.extras.models.planted_logs import job, prepared, sigmoid, train_on
from tests.support.clicks import labelled
from tests.support.messages import names
from tests.support.ranks import RankPool
from tests.support.stored_tensors import stored_tensors

DRAW = torch.Generator().manual_seed(0)
STREAMS, ROWS = 2, 40
LOGITS = 3 * torch.randn(STREAMS * ROWS, generator=DRAW, dtype=torch.float64)
LABELS = (torch.rand(STREAMS * ROWS, generator=DRAW) < 0.4).double()
WEIGHTS = torch.randint(0, 3, (STREAMS * ROWS,), generator=DRAW).double()
GROUPS = torch.randint(0, 7, (STREAMS * ROWS,), generator=DRAW)


def _batch(labels: torch.Tensor, weights: torch.Tensor, groups: torch.Tensor) -> Batch:
    return replace(labelled(labels, weights), groups=groups)


def _expected(kind: str, row: int) -> float:
    """By its formula, over the rows of the same group and stream; a row of weight 2 is two rows."""
    stream = slice(row // ROWS * ROWS, (row // ROWS + 1) * ROWS)
    if GROUPS[row] == 0 or not WEIGHTS[row]:
        return 0.0
    peers = [each for each in range(stream.start, stream.stop) if GROUPS[each] == GROUPS[row] for _ in range(int(WEIGHTS[each]))]  # fmt: skip
    logits, labels = LOGITS[peers], LABELS[peers]
    positive, own = bool(LABELS[row]), LOGITS[row]
    if kind == "pairwise":
        negatives = logits[labels == 0]
        found = -F.logsigmoid(own - negatives).mean().item() if positive and len(negatives) else 0.0
    elif kind == "listwise":
        found = -(own - logits.logsumexp(0)).item() if positive else 0.0
    else:
        sign = 0.5 if positive else -0.5
        found = -(sign * own - (sign * logits).logsumexp(0)).item()
    return WEIGHTS[row].item() * found


@pytest.mark.parametrize("kind", RANKINGS)
def test_a_ranking_loss_equals_its_formula(kind: str) -> None:
    rows = ListRows.of(LOGITS, _batch(LABELS, WEIGHTS, GROUPS), ROWS)
    expected = torch.tensor([_expected(kind, row) for row in range(STREAMS * ROWS)], dtype=torch.float64)
    assert (expected != 0).sum() > 10
    torch.testing.assert_close(RANKINGS[kind](rows).reshape(-1), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", RANKINGS)
def test_gradients_are_finite_for_rows_alone_and_of_weight_0(kind: str) -> None:
    logits = torch.tensor([80.0, -80.0, 0.0, 3.0]).requires_grad_()
    batch = _batch(torch.tensor([1.0, 0, 1, 1]), torch.tensor([1.0, 1, 0, 1]), torch.tensor([4, 4, 4, 0]))
    task = ReshapedClickTask(ModelConfig(), [], LossConfig(ranking=kind, ranking_weight=1.0), rows_per_stream=4).train()
    task(logits[:, None], batch)[0].backward()
    assert logits.grad is not None and logits.grad.isfinite().all() and not logits.grad[2:].any()


def _confounded() -> tuple[np.ndarray, torch.Tensor, Batch]:
    """Lists that are clicked more are shown worse items, so an item's rate of clicks misleads."""
    random = np.random.default_rng(0)
    items, lists, length = np.linspace(-1.0, 1.0, 20), 4000, 4
    mood = random.normal(0, 2.0, (lists, 1))
    shown = np.argsort(-(random.gumbel(size=(lists, 20)) - 1.5 * mood * items))[:, :length]
    labels = random.random((lists, length)) < sigmoid(items[shown] + mood)
    groups = torch.arange(1, lists + 1).repeat_interleave(length)
    values = torch.from_numpy(labels.reshape(-1)).float()
    return items, torch.from_numpy(shown.reshape(-1)), _batch(values, torch.ones_like(values), groups)


@pytest.mark.long
@pytest.mark.parametrize("kind", [None, *RANKINGS])
def test_ranking_finds_planted_values_of_items_where_lists_differ(kind: str | None) -> None:
    truth, shown, batch = _confounded()
    task = ReshapedClickTask(
        ModelConfig(), [], LossConfig(ranking=kind, ranking_weight=0.9), rows_per_stream=40
    ).train()
    values = torch.zeros(len(truth), requires_grad=True)
    optimizer = torch.optim.Adam([values], lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        task(values[shown][:, None], batch)[0].backward()
        optimizer.step()
    correlation = np.corrcoef(values.detach().numpy(), truth)[0, 1]
    print(kind, round(float(correlation), 3))
    assert correlation < 0 if kind is None else correlation > 0.9


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("trainer.loss.ranking=bpr", "trainer.loss.ranking='bpr' pairwise"),
        ("trainer.loss.ranking=jrc trainer.loss.ranking_weight=0", "trainer.loss.ranking_weight=0.0 above 0"),
        ("trainer.loss.ranking=jrc", "trainer.loss.ranking=jrc data.group_column"),
        (
            "trainer.loss.ranking=jrc data.group_column=cat_0",
            "data.reader.shuffle=row_groups data.reader.shuffle=groups",
        ),
        (
            "trainer.loss.ranking=jrc data.group_column=cat_0 data.reader.shuffle=groups trainer.global_batch_size=16",
            "trainer.loss.ranking=jrc 16 data.reader.num_streams=16",
        ),
        ("data.reader.shuffle=groups", "data.reader.shuffle=groups data.group_column"),
    ],
)
def test_bad_settings_are_refused(words: str, told: str) -> None:
    with pytest.raises(ConfigError, match=names(told)):
        load_config(TrainJob, ["data=quickstart", *words.split()])


def test_batches_without_groups_are_refused() -> None:
    task = ReshapedClickTask(ModelConfig(), [], LossConfig(ranking="jrc")).train()
    with pytest.raises(ConfigError, match=names("trainer.loss.ranking groups stream")):
        task(torch.zeros(2, 1), labelled(torch.zeros(2)))


class _Linear(nn.Linear):
    def forward(self, dense: torch.Tensor, sparse: object) -> torch.Tensor:  # type: ignore[override]
        return super().forward(dense)


def test_the_step_of_a_loss_that_reads_groups_and_columns_can_be_predicted() -> None:
    loss = LossConfig(ranking="pairwise", position="place", teacher="teacher")
    task = TaskModel(_Linear(3, 1), ReshapedClickTask(ModelConfig(), [], loss, rows_per_stream=4))
    part = record_dense(task, Inputs(8, 3, [], []), DenseOptimizerConfig())
    assert {"addmm", "softplus"} <= {operation.name for operation in part.operations}


@pytest.mark.long
def test_a_run_is_the_same_on_two_ranks_and_resumes_bit_for_bit(ranks: RankPool, tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    ranked = [
        "trainer.loss.ranking=jrc",
        "trainer.loss.position=place",
        "trainer.loss.teacher=teacher",
        "data.reader.shuffle=groups",
        "trainer.max_steps=12",
        "trainer.log_every_steps=4",
    ]
    one, two = (train_on(ranks, count, job(folder, tmp_path / str(count), *ranked)) for count in (1, 2))
    assert one.validation == pytest.approx(two.validation, rel=1e-4) and one.validation["gauc"] > 0.6
    plain = train_on(ranks, 1, job(folder, tmp_path / "plain", "trainer.max_steps=12"))
    assert one.validation["ne"] != plain.validation["ne"]
    cut = job(folder, tmp_path / "cut", *ranked)
    train_on(ranks, 2, [*cut, "trainer.max_steps=5"])
    assert stored_tensors(train_on(ranks, 2, cut).checkpoint) == stored_tensors(two.checkpoint)
