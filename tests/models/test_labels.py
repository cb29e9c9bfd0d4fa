"""Losses and metrics of labels of every kind, masks included, and the models with a tower for each label."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchrec.distributed import sharding_plan
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.config.registry import components
from pipeline.data.quality import auc
from pipeline.data.read.batch import Batch
from pipeline.data.targets import Target
from pipeline.devices.process_group import init_distributed
from pipeline.models.build import build_model
from pipeline.models.tasks.labels import LabelsTask
from pipeline.models.tasks.task import TaskModel, make_task
from pipeline.runtime.errors import ConfigError
from pipeline.serving.artifact.dense_export import export_layers, program_bytes, take_collection
from pipeline.serving.artifact.task_quality import ServedTask, scores_of
from pipeline.serving.scoring.dense_program import load_program
from pipeline.sharding.torchrec.sharding import make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.training.optimizer import build_optimizer
from tests.models.every_model import DATA, batch, materialize, small, tables_of
from tests.support.exchange_paths import default_comms
from tests.support.messages import names
from tests.support.optimizers import ROWWISE
from tests.support.ranks import RankPool

CLICK, ORDER = Target("click"), Target("order", mask="click")
STARS, SECONDS = Target("stars", "ordinal", 4, weight=0.5), Target("seconds", "regression")
ALL = [CLICK, STARS, SECONDS, ORDER]
TOWER_MODELS = [
    kind
    for kind, config in components("model").items()
    if config.__module__.startswith("pipeline.") and config().learns_all
]


def targets_for(kind: str) -> list[Target]:
    return [CLICK, ORDER] if kind == "esmm" else ALL


def labelled(rows: Batch, targets: list[Target]) -> Batch:
    """Labels that follow from the ids, and weights as a reader gives them."""
    ids = rows.sparse_features["user_id"].values() + rows.sparse_features["item_id"].values()
    values = {
        "click": (ids % 3 == 0).float(),
        "order": (ids % 2).float(),
        "stars": (ids % 4).float(),
        "seconds": ids / 10,
    }
    labels = torch.stack([values[target.name].float() for target in targets], dim=1)
    weights = torch.stack([values[target.mask] if target.mask else torch.ones(len(ids)) for target in targets], dim=1)
    return replace(rows, labels=labels, sample_weights=weights, present=torch.ones(len(ids), dtype=torch.bool))


SETTINGS = {"pepnet": {"domain_features": ["hour"], "prior_features": ["user_id", "item_id"]}}


def make(kind: str, **settings: Any) -> TaskModel:
    settings = {**SETTINGS.get(kind, {}), **settings}
    config, tables, targets = small(kind, **settings), tables_of(DATA["both"][0]), targets_for(kind)
    model = build_model(config, tables, DATA["both"][1], targets=targets)
    return make_task(config, model, tables, targets)


def test_each_label_has_the_loss_of_its_kind_on_the_rows_that_count() -> None:
    random = torch.Generator().manual_seed(0)
    outputs = torch.randn(6, 6, generator=random)
    labels = torch.tensor([[1, 3, 2.5, 1], [0, 0, -1, 0], [1, 1, 0, 0], [0, 2, 1, 1], [1, 3, 2, 1], [0, 1, 9, 0.0]])
    weights = torch.ones(6, 4)
    weights[:, 3] = labels[:, 0]
    weights[5] = 0.0
    task = LabelsTask(small("mmoe"), [], ALL)
    loss, prediction = task.eval()(outputs, Batch(outputs, None, labels, weights))
    wanted = torch.zeros(6)
    for row in range(5):
        stars = [
            F.binary_cross_entropy_with_logits(outputs[row, 1 + k], (labels[row, 1] > k).float()) for k in range(3)
        ]
        wanted[row] += F.binary_cross_entropy_with_logits(outputs[row, 0], labels[row, 0])
        wanted[row] += 0.5 * torch.stack(stars).mean() + (outputs[row, 4] - labels[row, 2]) ** 2
        wanted[row] += labels[row, 0] * F.binary_cross_entropy_with_logits(outputs[row, 5], labels[row, 3])
    torch.testing.assert_close(task.losses(prediction), wanted)
    torch.testing.assert_close(loss, wanted.mean())
    # What a mask leaves out may hold anything.
    labels[1, 3] = 1.0
    torch.testing.assert_close(task(outputs, Batch(outputs, None, labels, weights))[0], loss)


def test_the_loss_of_esmm_is_that_of_the_product_of_probabilities() -> None:
    outputs = 3 * torch.randn(64, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = (torch.rand(64, 2, generator=torch.Generator().manual_seed(1)) > 0.5).float()
    weights = torch.stack([torch.ones(64), labels[:, 0]], dim=1)
    task = make_task(small("esmm"), torch.nn.Identity(), [], [CLICK, ORDER]).task
    loss, _ = task(outputs, Batch(outputs, None, labels, weights))
    click, both = torch.sigmoid(outputs[:, 0]), torch.sigmoid(outputs[:, 0]) * torch.sigmoid(outputs[:, 1])
    wanted = F.binary_cross_entropy(click, labels[:, 0].double())
    wanted += F.binary_cross_entropy(both, (labels[:, 0] * labels[:, 1]).double())
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    extreme = torch.tensor([[60.0, 60.0], [-60.0, -60.0]], requires_grad=True)
    loss, _ = task(extreme, Batch(extreme, None, torch.tensor([[0.0, 0], [1, 1]]), torch.ones(2, 2)))
    loss.backward()
    assert loss.item() == pytest.approx((60 + 60 + 60 + 120) / 2, rel=0.02) and extreme.grad.isfinite().all()


def test_clicks_of_esmm_stand_for_all_impressions_by_their_inverse_propensity() -> None:
    outputs = torch.tensor([[-6.0, 0.5], [-1.0, 2.0], [-1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    labels, weights = torch.tensor([[1.0, 1], [1, 0], [0, 0]]), torch.tensor([[1.0, 1], [2, 2], [1, 0]])
    batch = Batch(outputs, None, labels, weights)
    losses = []
    for setting in (0.0, 0.25):
        config = replace(small("esmm"), inverse_propensity=setting, propensity_floor=0.02)
        losses.append(make_task(config, torch.nn.Identity(), [], [CLICK, ORDER]).task(outputs, batch)[0])
    own = F.binary_cross_entropy_with_logits(outputs[:, 1], labels[:, 1].double(), reduction="none")
    chance = torch.sigmoid(outputs[1, 0])
    difference = losses[1] - losses[0]
    assert difference.item() == pytest.approx(0.25 * (own[0] / 0.02 + 2 * own[1] / chance).item() / 3, rel=1e-5)
    (at_outputs,) = torch.autograd.grad(difference, outputs)
    assert (
        not at_outputs[:, 0].any() and at_outputs[:2, 1].all() and not at_outputs[2, 1]
    )  # propensities learn nothing of it


def test_logits_of_a_sampled_label_are_shifted_while_they_train() -> None:
    sampled = replace(CLICK, train_offset=1.5)
    rows = Batch(torch.zeros(4, 1), None, torch.tensor([1.0, 0, 1, 0]), torch.ones(4))

    class Model(torch.nn.Module):
        def forward(self, dense: torch.Tensor, sparse: object) -> torch.Tensor:
            return dense + 0.25

    for config in (small("dlrm"), small("shared_bottom")):
        task = make_task(config, Model(), [], [sampled])
        trained, measured = task.train()(rows)[0], task.eval()(rows)[0]
        assert trained.item() == pytest.approx(
            F.binary_cross_entropy_with_logits(torch.full((4,), 1.75), rows.labels).item()
        )
        assert measured.item() == pytest.approx(
            F.binary_cross_entropy_with_logits(torch.full((4,), 0.25), rows.labels).item()
        )


def _measured(rank: int, parts: int) -> dict[str, float]:
    context = init_distributed()
    task = LabelsTask(small("mmoe"), [], ALL).eval()
    measure = task.evaluation_measure(context, 100)
    for outputs, labels, weights in _drawn(parts)[rank :: context.world_size]:
        _, prediction = task(outputs, Batch(outputs, None, labels, weights))
        measure.update(prediction)
    return measure.compute()


def _drawn(parts: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    found = []
    for number in range(parts):
        random = torch.Generator().manual_seed(number)
        labels = torch.stack(
            [
                (torch.rand(100, generator=random) > 0.6).float(),
                torch.randint(0, 4, (100,), generator=random).float(),
                torch.randn(100, generator=random) * 3 + 1,
                (torch.rand(100, generator=random) > 0.5).float(),
            ],
            dim=1,
        )
        weights = torch.rand(100, 4, generator=random)
        weights[:, 3] *= labels[:, 0]
        weights[:9] = 0.0
        found.append((torch.randn(100, 6, generator=random), labels, weights))
    return found


def test_metrics_of_each_label_are_those_of_all_rows_over_ranks(ranks: RankPool) -> None:
    found = ranks.run(2, _measured, 4)
    assert found[0] == pytest.approx(found[1], nan_ok=True)
    outputs, labels, weights = (torch.cat(part).double().numpy() for part in zip(*_drawn(4), strict=True))
    counts, stars = weights[:, 3] > 0, weights[:, 1] / weights[:, 1].sum()
    assert found[0]["order/auc"] == pytest.approx(auc(outputs[counts, 5], labels[counts, 3], weights[counts, 3]))
    assert found[0]["order/num_samples"] == counts.sum() and found[0]["num_samples"] == 4 * 91
    share = weights[:, 2] / weights[:, 2].sum()
    error = outputs[:, 4] - labels[:, 2]
    mean = (share * labels[:, 2]).sum()
    assert found[0]["seconds/mse"] == pytest.approx((share * error**2).sum())
    assert found[0]["seconds/mae"] == pytest.approx((share * np.abs(error)).sum())
    assert found[0]["seconds/r2"] == pytest.approx(
        1 - (share * error**2).sum() / (share * (labels[:, 2] - mean) ** 2).sum()
    )
    chances = 1 / (1 + np.exp(-outputs[:, 1:4]))
    passed = labels[:, 1:2] > np.arange(3)
    losses = -np.where(passed, np.log(chances), np.log1p(-chances)).sum(1)
    rates = (stars[:, None] * passed).sum(0)
    entropy = -(rates * np.log(rates) + (1 - rates) * np.log1p(-rates)).sum()
    assert found[0]["stars/ne"] == pytest.approx((stars * losses).sum() / entropy)
    assert found[0]["stars/mae"] == pytest.approx((stars * np.abs(chances.sum(1) - labels[:, 1])).sum())
    assert {"click/ne", "click/calibration", "click/auc"} <= found[0].keys()


def test_scores_are_probabilities_values_and_expected_buckets() -> None:
    outputs = torch.tensor([[0.0, 40.0, 40.0, -40.0, 7.5]])
    tasks = [ServedTask("a", "binary"), ServedTask("b", "ordinal", 3), ServedTask("c", "regression")]
    assert scores_of(tasks, outputs).tolist() == [[0.5, 2.0, 7.5]]
    assert scores_of([], torch.zeros(2)).tolist() == [0.5, 0.5]


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("ple", "dbmtl", "pepnet") else pytest.mark.campaign)
        for kind in TOWER_MODELS
    ],
)
def test_towers_learn_and_are_exported_as_they_are_evaluated(kind: str) -> None:
    task, targets = materialize(make(kind, towers={"click": [7]})), targets_for(kind)
    rows = labelled(batch(0), targets)
    optimizer = torch.optim.Adam(task.parameters(), lr=0.01)
    with torch.no_grad():
        before = task.eval()(rows)[1].losses.mean()
    task.train()
    for _ in range(25):
        optimizer.zero_grad()
        task(rows)[0].backward()
        optimizer.step()
    assert all(weight.grad is not None for weight in task.parameters())
    with torch.no_grad():
        wanted = task.eval()(rows)[1]
        (collection,) = [module for module in task.modules() if isinstance(module, EmbeddingBagCollection)]
        found = collection(rows.sparse_features)
    assert wanted.losses.mean() < before - 0.05
    keys = list(DATA["both"][0])
    pooled = torch.cat([found[key] for key in keys], dim=1).detach()
    width = sum(target.width for target in targets)
    columns = sum(take_collection(task.model, keys))
    program = load_program(program_bytes(export_layers(task.model, "fp32", DATA["both"][1], columns, width)), "dense")
    torch.testing.assert_close(program(rows.dense_features, pooled), wanted.outputs, rtol=1e-5, atol=1e-5)


def _steps(rank: int, kind: str) -> list[torch.Tensor]:
    """The dense weights after three steps on this rank's rows of each global batch."""
    context = init_distributed()
    # No batch norm: under it biases have no gradient but noise, of which Adam makes whole steps.
    task = make(kind, uncertainty_weights=True, dropout=0.0, batch_norm=False)
    apply_sparse_optimizer(task, ROWWISE.sparse)
    sharders, plan = make_sharders(default_comms(), 0), ShardingPlan({})
    for path, module in task.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            placements = {name: sharding_plan.row_wise() for name in DATA["both"][0]}
            plan.plan[path] = sharding_plan.construct_module_sharding_plan(
                module,
                placements,
                sharder=sharders[0],
                local_size=context.world_size,
                world_size=context.world_size,
                device_type="cpu",
            )
    model = shard_model(task, plan, default_comms(), context, seed=0)
    optimizer = build_optimizer(model, ROWWISE)
    model.train()
    for number in range(3):
        rows = batch(number, rank=rank, world_size=context.world_size)
        optimizer.zero_grad()
        model(labelled(rows, targets_for(kind)))[0].backward()
        optimizer.step()
    return [weight.detach().clone() for name, weight in sorted(model.named_parameters()) if "embedding" not in name]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ple", "dbmtl", "pepnet"])
def test_a_step_is_the_same_on_one_rank_and_two_with_learnt_weights(ranks: RankPool, kind: str) -> None:
    (one,), (two, _) = ranks.run(1, _steps, kind), ranks.run(2, _steps, kind)
    assert len(one) == len(two) > 10
    assert any(weight.shape == (4,) and (weight != 0).all() for weight in one)  # the log variances have moved
    for mine, theirs in zip(one, two, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings", "targets", "words"),
    [
        ("esmm", {}, [CLICK, SECONDS], "model=esmm seconds regression mask"),
        ("esmm", {}, [CLICK, Target("order")], "model=esmm mask"),
        ("mmoe", {"towers": {"clik": [4]}}, [CLICK, ORDER], "model.towers 'clik' 'click'"),
        ("dlrm", {}, [STARS], "model=dlrm 'stars' 4 3 model=shared_bottom"),
        ("two_tower", {}, [SECONDS], "model=two_tower seconds regression data.columns.label"),
    ],
)
def test_labels_that_a_model_cannot_learn_are_refused(
    kind: str, settings: dict[str, Any], targets: list[Target], words: str
) -> None:
    tables = tables_of(DATA["both"][0])
    with pytest.raises(ConfigError, match=names(words)):
        config = small(kind, **settings)
        model = build_model(config, tables, 3, targets=targets) if config.learns_all else torch.nn.Identity()
        make_task(config, model, tables, targets)


def test_one_number_a_row_learns_a_regression() -> None:
    config, tables = small("dlrm"), tables_of(DATA["both"][0])
    task = materialize(make_task(config, build_model(config, tables, 3, targets=[SECONDS]), tables, [SECONDS]))
    rows = replace(batch(0), labels=torch.full((32,), 2.0))
    loss, prediction = task.eval()(rows)
    wanted = (prediction.outputs[:, 0] - 2.0).square().mean()
    assert loss.item() == pytest.approx(wanted.item()) and not math.isnan(loss.item())
