"""DBMTL: a label's layers read the layers of the labels that it depends on, as in the paper, and learn from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.data.quality import auc
from pipeline.data.read.batch import Batch
from pipeline.data.targets import Target
from pipeline.extras.models.dbmtl import DBMTLConfig
from pipeline.runtime.errors import ConfigError
from tests.models.learning import Rows, fit
from tests.support.messages import names

LABELS = [Target("click"), Target("cart"), Target("buy")]


def _plain(weights: dict[str, torch.Tensor], layers: str, inputs: torch.Tensor) -> torch.Tensor:
    for number in range(sum(name.startswith(f"{layers}._mlp") and name.endswith("weight") for name in weights)):
        layer = f"{layers}._mlp.{number}._linear"
        inputs = torch.clamp(inputs @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"], min=0)
    return inputs


def test_relation_layers_read_the_labels_that_a_label_depends_on() -> None:
    """h_buy = relation([own(x), h_click]) although buy is listed first, and cart depends on both."""
    torch.manual_seed(0)
    config = DBMTLConfig(
        hidden_layer_sizes=[7], own_layer_sizes=[6, 5], relation_layer_sizes=[4], depends_on={"buy": ["click"], "cart": ["buy", "click"]}
    )  # fmt: skip
    labels = [LABELS[2], LABELS[1], LABELS[0]]
    body, width = config.build_body(9, labels)
    for bias in (each for name, each in body.named_parameters() if name.endswith("bias")):
        nn.init.normal_(bias)
    inputs, weights = torch.randn(8, 9), dict(body.named_parameters())
    shared = _plain(weights, "shared", inputs)
    own = [_plain(weights, f"own.{number}", shared) for number in range(3)]
    click = _plain(weights, "relations.2", own[2])
    buy = _plain(weights, "relations.0", torch.cat([own[0], click], dim=1))
    cart = _plain(weights, "relations.1", torch.cat([own[1], buy, click], dim=1))
    assert width == 4
    for found, wanted in zip(body(inputs), (buy, cart, click), strict=True):
        torch.testing.assert_close(found, wanted)


def test_by_default_a_label_depends_on_all_labels_before_it() -> None:
    body, _ = DBMTLConfig(own_layer_sizes=[5], relation_layer_sizes=[4]).build_body(9, LABELS)
    assert [each._mlp[0]._linear.in_features for each in body.relations] == [5, 9, 13]


@pytest.mark.parametrize(
    ("depends_on", "said"),
    [
        ({"buy": ["clik"]}, "model.depends_on 'clik' 'click'"),
        ({"order": ["click"]}, "model.depends_on 'order'"),
        ({"buy": ["cart"], "cart": ["buy"]}, "model.depends_on buy -> cart -> buy"),
        ({"buy": ["buy"]}, "model.depends_on buy -> buy"),
    ],
)
def test_dependencies_that_cannot_be_are_refused(depends_on: dict[str, list[str]], said: str) -> None:
    with pytest.raises(ConfigError, match=names(said)):
        DBMTLConfig(depends_on=depends_on).check_targets(LABELS)


@dataclass(frozen=True)
class _RarelyKnown(Rows):
    """The second label counts in one of 20 rows."""

    def part(self, rows: slice) -> Rows:
        return _RarelyKnown(**vars(super().part(rows)))

    def batch(self, rows: slice | np.ndarray) -> Batch:
        batch = super().batch(rows)
        known = torch.from_numpy(np.arange(len(self.labels))[rows] % 20 == 0).float()
        return replace(batch, sample_weights=torch.stack([torch.ones(len(known)), known], dim=1))


@pytest.mark.long
def test_a_rare_label_is_learnt_better_from_the_label_that_it_depends_on() -> None:
    """Both logits are one wave of two dense features; an id turns the sign of the second."""
    random = np.random.default_rng(0)
    dense, sign = random.uniform(-1.5, 1.5, (24_000, 2)), random.integers(1, 3, 24_000)
    wave = 4 * np.sin(3 * dense[:, 0]) * np.sin(3 * dense[:, 1])
    truth = 1 / (1 + np.exp(-np.stack([wave, wave * (2 * sign - 3)], axis=1)))
    rows = _RarelyKnown(dense, {"sign": sign}, random.random(truth.shape) < truth, truth)
    cut, found = 20_000, {}
    for name, depends_on in (("click", {"buy": ["click"]}), ("nothing", {})):
        config = DBMTLConfig(
            hidden_layer_sizes=[], own_layer_sizes=[48, 24], relation_layer_sizes=[16], depends_on=depends_on, dense_features="values"
        )  # fmt: skip
        task = fit(config, rows.part(slice(cut)), targets=[LABELS[0], Target("buy", weight=10.0)], lr=0.01, epochs=12)
        with torch.no_grad():
            outputs = task(rows.part(slice(cut, None)).batch(slice(None)))[1].outputs.numpy()
        best = auc(truth[cut:, 1], rows.labels[cut:, 1])
        found[name] = (auc(outputs[:, 1], rows.labels[cut:, 1]) - 0.5) / (best - 0.5)
    print("share of the lift of the rare label, if it depends on", found)
    assert found["click"] > 0.8 and found["nothing"] < 0.4
