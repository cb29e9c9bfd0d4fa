"""Sampled negatives estimate the softmax over all items, and are the same on any number of ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.config.tables import InitConfig, TableConfig
from pipeline.data.dataset import Dataset, FrequencyCurve, SparseFeature, Split
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.embeddings.compression.kind import Bags
from pipeline.embeddings.table import Table
from pipeline.embeddings.tables import resolve_tables
from pipeline.extras.models.negatives import HardNegativesConfig, NegativesConfig, corpus_of
from pipeline.extras.models.tasks.item_rows import NO_ITEM
from pipeline.extras.models.tasks.negatives import CorpusProbability, SampledRows, append_rows
from pipeline.extras.models.tasks.retrieval import RetrievalTask, first_ids, hardest_items
from pipeline.extras.models.user_item import TwoTowerConfig
from pipeline.runtime.errors import ConfigError
from tests.support.messages import names

NUM_ITEMS, DIM, ROWS = 40, 4, 16
SHARES = (1.0 / np.arange(1, NUM_ITEMS + 1)) / (1.0 / np.arange(1, NUM_ITEMS + 1)).sum()
GENERATOR = torch.Generator().manual_seed(0)
USERS = torch.randn(ROWS, DIM, generator=GENERATOR)
ITEMS = torch.randn(NUM_ITEMS + 1, DIM, generator=GENERATOR)  # row 0 is the unknown item


def _tables(hash_size: int | None = None) -> list[Table]:
    """The curve has a point for each item, so it holds the frequencies exactly."""
    curve = FrequencyCurve([*range(1, NUM_ITEMS + 2)], [*np.cumsum(SHARES).tolist(), 1.0])
    item = SparseFeature("item_id", NUM_ITEMS + 1, False, 1.0, curve, hash_size=hash_size)
    data = Dataset("planted", "label", [], [item], {"train": Split([], 100, 50)}, 100, 100, 0, "none")
    return resolve_tables({"default": TableConfig(embedding_dim=DIM, init=InitConfig("normal", 0.1))}, data)


def _config(**negatives: object) -> TwoTowerConfig:
    return TwoTowerConfig(temperature=1.0, negatives=NegativesConfig(**negatives))


def _sampler(config: TwoTowerConfig, rank: int = 0, world_size: int = 1) -> SampledRows:
    negatives = config.negatives
    sample = CorpusProbability(corpus_of("item_id", _tables(), "x"), negatives.power).sampler()

    def bags(ids: np.ndarray) -> dict[str, Bags]:
        return {"item_id": Bags(ids[ids != NO_ITEM], (ids != NO_ITEM).astype(np.int32))}

    return SampledRows(sample, negatives.count, bags, 3, rank, world_size)


def _batch(positives: np.ndarray) -> Batch:
    ids = torch.from_numpy(positives)
    features = keyed_jagged_tensor(["item_id"], ids, torch.ones(ROWS), ROWS, [ROWS])
    return Batch(torch.zeros(ROWS, 0), features, torch.ones(ROWS), torch.ones(ROWS))


def _loss(task: RetrievalTask, batch: Batch, users: torch.Tensor, items: torch.Tensor) -> tuple[torch.Tensor, Any]:
    ids = first_ids(batch.sparse_features, "item_id")
    return task((users, items[ids.clamp(min=0)]), batch)


def _tasks(config: TwoTowerConfig) -> list[RetrievalTask]:
    """Return the task with the correction, and without it."""
    return [RetrievalTask(replace(config, log_q_correction=on), _tables()) for on in (True, False)]


KINDS = [
    {"kind": "corpus", "count": 60},
    {"kind": "corpus", "count": 60, "power": 0.75},
    {"kind": "mixed", "count": 60},
    {"kind": "mixed", "count": 60, "power": 1.0},
]


@pytest.mark.parametrize("negatives", KINDS, ids=lambda each: "-".join(map(str, each.values())))
def test_the_corrected_sum_over_negatives_is_the_sum_over_all_items(negatives: dict[str, object]) -> None:
    """exp(loss) is that sum over exp(positive score). Its mean is exact; without the correction it is far off."""
    config, random, steps = _config(**negatives), np.random.default_rng(1), 400
    sample, tasks = _sampler(config), _tasks(config)
    scores = USERS[0] @ ITEMS[1:].T
    exact = float(scores.exp().sum() / scores[4].exp())  # of item 5
    estimates = np.zeros((2, steps))
    for step in range(steps):
        # Items of other rows have the frequencies of the training rows.
        positives = 1 + random.choice(NUM_ITEMS, ROWS, p=SHARES)
        positives[0] = 5
        batch = _batch(positives)
        batch = replace(batch, sparse_features=sample(batch.sparse_features, 0, step))
        for row, one in enumerate(tasks):
            estimates[row, step] = math.exp(_loss(one, batch, USERS, ITEMS)[1].losses[0])
    errors = (estimates.mean(axis=1) - exact) / (estimates.std(axis=1) / steps**0.5)
    print(negatives, "exact", exact, "means", estimates.mean(axis=1), "in standard errors", errors)
    assert abs(errors[0]) < 4 and abs(errors[1]) > 10


@pytest.mark.parametrize("negatives", [KINDS[1], KINDS[3]], ids=["corpus", "mixed"])
def test_the_mean_gradient_is_that_of_the_softmax_over_all_items(negatives: dict[str, object]) -> None:
    config, random, steps = _config(**negatives | {"count": 2000}), np.random.default_rng(1), 60
    sample, tasks = _sampler(config), _tasks(config)
    found = torch.zeros(2, 2, NUM_ITEMS + 1, DIM)
    exact = torch.zeros_like(found[0])
    for step in range(steps):
        positives = 1 + random.choice(NUM_ITEMS, ROWS, p=SHARES)
        batch = _batch(positives)
        batch = replace(batch, sparse_features=sample(batch.sparse_features, 0, step))
        for into, one in zip((*found, exact), (*tasks, None), strict=True):
            users, items = USERS.clone().requires_grad_(), ITEMS.clone().requires_grad_()
            if one is None:
                loss = torch.nn.functional.cross_entropy(users @ items[1:].T, torch.from_numpy(positives) - 1)
            else:
                loss, _ = _loss(one, batch, users, items)
            loss.backward()
            into[0, :ROWS] += users.grad / steps
            into[1] += items.grad / steps
    size = exact.norm()
    errors = [float((each - exact).norm() / size) for each in found]
    print(negatives, "relative errors of the mean gradient", errors)
    assert errors[0] < 0.02 and errors[1] > 10 * errors[0]


def test_a_negative_that_is_the_rows_own_item_does_not_count() -> None:
    config = _config(kind="corpus", count=3)
    batch = _batch(np.full(ROWS, 5))
    others = np.array([5, 5, 7])
    bags = {"item_id": Bags(others, np.ones(3, np.int32))}
    batch = replace(batch, sparse_features=append_rows(batch.sparse_features, 3, bags))
    for task, correction in zip(_tasks(config), (math.log(3 / NUM_ITEMS), 0.0), strict=True):
        losses = _loss(task, batch, USERS, ITEMS)[1].losses
        expected = torch.nn.functional.softplus(USERS @ (ITEMS[7] - ITEMS[5]) - correction)
        torch.testing.assert_close(losses, expected)


def test_ranks_share_the_items_that_one_rank_samples() -> None:
    config = _config(kind="corpus", count=7, power=0.5)

    def sampled(rank: int, world_size: int, epoch: int, step: int) -> list[int]:
        features = _batch(np.arange(1, ROWS + 1)).sparse_features
        ids = first_ids(_sampler(config, rank, world_size)(features, epoch, step), "item_id")
        assert ids[:ROWS].tolist() == features.values().tolist()
        return ids[ROWS:].tolist()

    alone = sampled(0, 1, 2, 9)
    assert alone == sampled(0, 1, 2, 9) and len(alone) == 7
    assert len({tuple(sampled(0, 1, *at)) for at in ((2, 9), (2, 8), (1, 9), (9, 2))}) == 4
    assert sampled(0, 2, 2, 9) + sampled(1, 2, 2, 9) == [*alone, NO_ITEM]


def test_a_popular_item_is_sampled_as_often_as_its_power_says() -> None:
    found = CorpusProbability(corpus_of("item_id", _tables(), "x"), 0.5)
    counts = np.bincount(found.sampler()(np.random.default_rng(0), 200_000), minlength=NUM_ITEMS + 1)[1:]
    chances = SHARES**0.5 / (SHARES**0.5).sum()
    np.testing.assert_allclose(found(torch.arange(1, NUM_ITEMS + 1)).exp(), chances, rtol=1e-4)
    assert (abs(counts - 200_000 * chances) < 5 * (200_000 * chances) ** 0.5).all()


@pytest.mark.parametrize(
    ("negatives", "hash_size", "message"),
    [
        ({"kind": "corpus", "count": NUM_ITEMS + 1}, None, f"model.negatives.count={NUM_ITEMS + 1} {NUM_ITEMS} items"),
        (
            {"kind": "corpus", "count": 4, "hard": HardNegativesConfig(count=NUM_ITEMS)},
            None,
            f"model.negatives.hard.count={NUM_ITEMS} {NUM_ITEMS} items",
        ),
        ({"kind": "corpus", "count": 4}, NUM_ITEMS + 1, "model.negatives.kind=corpus item_id ids.kind=vocabulary"),
        ({"kind": "mixed", "count": 4}, NUM_ITEMS + 1, "model.negatives.kind=mixed item_id ids.kind=vocabulary"),
    ],
)
def test_items_that_cannot_be_sampled_are_an_error(
    negatives: dict[str, object], hash_size: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        _config(**negatives).negatives.check_tables("item_id", _tables(hash_size), False)


def test_hard_negatives_without_sampled_ones_are_an_error() -> None:
    with pytest.raises(ConfigError, match=names("model.negatives.hard.count=5 model.negatives.kind=mixed")):
        NegativesConfig(hard=HardNegativesConfig(count=5))


def test_other_models_have_no_negatives() -> None:
    with pytest.raises(ConfigError, match=names("model.negatives")):
        load_config(TrainJob, ["experiment=user_item_mf", "model.negatives.kind=corpus"])


def test_hard_negatives_have_the_highest_scores_and_count_once() -> None:
    """The hard negatives are summed exactly, the sampled ones estimate the remaining items."""
    config = _config(kind="corpus", count=60)
    config.negatives.hard.count = 5
    task, random, steps = RetrievalTask(config, _tables()), np.random.default_rng(1), 400
    task.item_index = ITEMS[1:]
    positives = 1 + random.choice(NUM_ITEMS, ROWS, p=SHARES)
    sample, scores = _sampler(config), USERS @ ITEMS[1:].T
    own, candidates = torch.from_numpy(positives), torch.tensor([NO_ITEM, 0, *range(1, NUM_ITEMS + 9)])
    hard, is_hard = hardest_items(ITEMS[1:], USERS, own, candidates, 5)
    order = scores.scatter(1, own[:, None] - 1, -math.inf).argsort(dim=1, descending=True) + 1
    assert hard.tolist() == order[:, :5].tolist()
    assert [candidates[row].tolist() for row in is_hard] == [sorted(row) for row in hard.tolist()]
    exact = (scores.exp().sum(dim=1) / scores.gather(1, own[:, None] - 1)[:, 0].exp()).numpy()
    found = np.zeros((2, steps, ROWS))
    for step in range(steps):
        batch = _batch(positives)
        batch = replace(batch, sparse_features=sample(batch.sparse_features, 0, step))
        for number, index in enumerate((ITEMS[1:], None)):
            task.item_index = index
            found[number, step] = _loss(task, batch, USERS, ITEMS)[1].losses.exp().numpy()
    errors = (found.mean(axis=1) - exact) / (found.std(axis=1) / steps**0.5)
    spreads = (found.std(axis=1) / exact).mean(axis=1)
    print("in standard errors", errors[0], "relative spread with and without", spreads)
    assert (abs(errors[0]) < 4).all() and spreads[0] < spreads[1] / 2


def test_hard_negatives_sharpen_the_gradient_of_users_and_leave_that_of_items() -> None:
    config = _config(kind="corpus", count=60)
    config.negatives.hard.count = 5
    task, sample = RetrievalTask(config, _tables()), _sampler(config)
    positives = np.arange(1, ROWS + 1)
    target = torch.from_numpy(positives) - 1
    errors, items_of = {True: 0.0, False: 0.0}, {}
    for step in range(40):
        batch = _batch(positives)
        batch = replace(batch, sparse_features=sample(batch.sparse_features, 0, step))
        for is_hard in errors:
            task.item_index = ITEMS[1:] if is_hard else None
            users, items = USERS.clone().requires_grad_(), ITEMS.clone().requires_grad_()
            _loss(task, batch, users, items)[0].backward()
            exact = USERS.clone().requires_grad_()
            torch.nn.functional.cross_entropy(exact @ ITEMS[1:].T, target).backward()
            errors[is_hard] += float((users.grad - exact.grad).square().sum())
            items_of[is_hard] = items.grad
        torch.testing.assert_close(items_of[True], items_of[False])
    print("squared errors of the users' gradients, with hard negatives and without", errors)
    assert errors[True] < errors[False] / 3
