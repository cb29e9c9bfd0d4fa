"""What trainer.metrics names equals its definition, on any number of ranks, and nothing else is taken."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.checkpoint.retention import is_higher_better
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.train import TrainJob
from pipeline.devices.process_group import init_distributed
from pipeline.models.metrics.metric import Metric
from pipeline.models.tasks.group_metrics import NamedMetrics
from pipeline.runtime.errors import ConfigError
from tests.support.messages import names
from tests.support.ranks import RankPool


def drawn(seed: int, num_rows: int = 400) -> SimpleNamespace:
    """Rows of a batch; some have weight 0."""
    draw = torch.Generator().manual_seed(seed)
    logits = 3.0 * torch.randn(num_rows, generator=draw)
    labels = (torch.rand(num_rows, generator=draw) < torch.sigmoid(logits / 2)).float()
    weights = torch.randint(0, 3, (num_rows,), generator=draw).float()
    return SimpleNamespace(logits=logits, labels=labels, sample_weights=weights)


def by_definition(batches: list[SimpleNamespace]) -> dict[str, float]:
    logits, labels, weights = (
        np.concatenate([getattr(batch, name).double().numpy() for batch in batches])
        for name in ("logits", "labels", "sample_weights")
    )
    predictions = 1.0 / (1.0 + np.exp(-logits))
    error = 0.0
    for bucket in range(100):
        rows = (predictions >= bucket / 100) & (predictions < (bucket + 1) / 100)
        error += abs((weights[rows] * predictions[rows]).sum() - (weights[rows] * labels[rows]).sum())
    return {
        "brier": (weights * (predictions - labels) ** 2).sum() / weights.sum(),
        "ece": error / weights.sum(),
    }


def measured_on_rank(rank: int, seeds: list[int]) -> dict[str, float]:
    """Collective: of the batches that this rank has, every world_size-th."""
    context = init_distributed()
    named = NamedMetrics(context, ["brier", "ece"])
    for seed in seeds[context.rank :: context.world_size]:
        named.update({"": drawn(seed)})
    return named.compute()


@pytest.mark.parametrize("world_size", [1, 2])
def test_brier_and_ece_equal_their_definitions_over_batches_and_ranks(ranks: RankPool, world_size: int) -> None:
    found = ranks.run(world_size, measured_on_rank, [1, 2, 3, 4])
    assert found[0] == pytest.approx(by_definition([drawn(seed) for seed in (1, 2, 3, 4)]), abs=1e-12)
    assert all(each == found[0] for each in found)


def test_each_binary_label_has_its_own(ranks: RankPool) -> None:
    (found,) = ranks.run(1, measured_by_label)
    assert found["click/brier"] == pytest.approx(by_definition([drawn(5)])["brier"])
    assert found["buy/brier"] == pytest.approx(by_definition([drawn(6)])["brier"])


def measured_by_label(rank: int) -> dict[str, float]:
    named = NamedMetrics(init_distributed(), ["brier"])
    named.update({"click/": drawn(5), "buy/": drawn(6)})
    return named.compute()


def test_a_split_without_rows_that_count_is_undefined(ranks: RankPool) -> None:
    (found,) = ranks.run(1, measured_without_rows)
    assert all(np.isnan(value) for value in found.values()) and len(found) == 2


def measured_without_rows(rank: int) -> dict[str, float]:
    rows = drawn(1)
    rows.sample_weights.zero_()
    named = NamedMetrics(init_distributed(), ["brier", "ece"])
    named.update({"": rows})
    return named.compute()


def test_training_can_stop_and_keep_steps_by_a_named_metric() -> None:
    job = load_config(
        TrainJob,
        [
            "data=quickstart",
            "trainer.metrics=[ece,brier]",
            "checkpoint.best_metric=brier",
            "early_stop=auc",
            "trainer.early_stop.metric=ece",
        ],
    )
    assert {"ece", "brier"} <= set(job.metrics)
    assert is_higher_better("gauc:user") and is_higher_better("seconds/xauc") and not is_higher_better("segmented_ne:a")
    assert not is_higher_better("brier") and not is_higher_better("click/ece") and is_higher_better("click/auc")


@pytest.mark.parametrize(
    ("kind", "words", "named"),
    [
        (TrainJob, ["data=quickstart", "trainer.metrics=[brrier]"], "trainer.metrics='brrier' brier plugins"),
        (EvaluateJob, ["run=r", "metrics=[ece2]"], "metrics='ece2' ece plugins"),
        (TrainJob, ["experiment=user_item_two_tower", "trainer.metrics=[ece]"], "trainer.metrics ece model=two_tower"),
        (TrainJob, ["data=quickstart", "trainer.metrics=[ece,ece]"], "trainer.metrics ece twice"),
        (
            TrainJob,
            ["data=quickstart", "trainer.metrics=[gauc]"],
            "trainer.metrics gauc gauc:user_id data.group_column",
        ),
        (TrainJob, ["data=quickstart", "trainer.metrics=[ece:user]"], "trainer.metrics ece no groups"),
        (EvaluateJob, ["run=r", "metrics=[guac:user]"], "metrics='guac' gauc"),
    ],
)
def test_a_name_that_measures_nothing_is_refused(kind: type, words: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=names(named)):
        load_config(kind, words)


def test_a_metric_without_its_methods_says_which() -> None:
    nothing = np.zeros(0)
    with pytest.raises(NotImplementedError, match="Metric has no sums"):
        Metric().sums(nothing, nothing, nothing)
    with pytest.raises(NotImplementedError, match="Metric has no value"):
        Metric().value(nothing)
