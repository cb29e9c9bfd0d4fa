"""PEPNet: gates are the paper's, give no gradient to the inputs that they scale, and learn what depends on domain and user."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.data.quality import auc
from pipeline.data.targets import Target
from pipeline.extras.models.pepnet import PEPNetConfig
from pipeline.extras.models.shared_bottom import SharedBottomConfig
from pipeline.extras.models.towers import TowersConfig
from pipeline.models.layers.features import FeatureInputs
from pipeline.runtime.errors import ConfigError
from tests.models.every_model import SIZES, tables_of
from tests.models.learning import Rows, fit
from tests.support.messages import names

NAMES, DIM, LABELS = ["user_id", "item_id", "scene"], 4, [Target("click"), Target("like")]


def _gate(weights: dict[str, torch.Tensor], gate: str, values: torch.Tensor) -> torch.Tensor:
    hidden = torch.clamp(values @ weights[f"{gate}.first.weight"].T + weights[f"{gate}.first.bias"], min=0)
    return 2 / (1 + torch.exp(-(hidden @ weights[f"{gate}.second.weight"].T + weights[f"{gate}.second.bias"])))


def test_gates_of_the_domain_scale_inputs_and_gates_of_the_prior_each_layer() -> None:
    """delta = 2 sigmoid(W' relu(W [domain, E])), O = delta * E, H' = relu(W (delta_l * H) + b)."""
    torch.manual_seed(0)
    config = PEPNetConfig(
        domain_features=["scene"], prior_features=["user_id", "item_id"], gate_size=5, tower_layer_sizes=[6], towers={"like": []}
    )  # fmt: skip
    towers = config.build_towers(FeatureInputs(3, 0, DIM, dense_as_vectors=True), NAMES, DIM, LABELS)
    for bias in (each for name, each in towers.named_parameters() if name.endswith("bias")):
        nn.init.normal_(bias)
    rows, weights = torch.randn(8, 3, DIM, requires_grad=True), dict(towers.named_parameters())
    inputs = rows.flatten(1)
    scaled = inputs * _gate(weights, "domain_gate", torch.cat([rows[:, 2], inputs.detach()], dim=1))
    prior = torch.cat([rows[:, 0], rows[:, 1], scaled.detach()], dim=1)
    logits = []
    for label, sizes in (("click", [6]), ("like", [])):
        hidden = scaled
        for number in range(len(sizes) + 1):
            layer = f"towers.{label}.layers.{number}" + ("._linear" if number < len(sizes) else "")
            hidden = hidden * _gate(weights, f"towers.{label}.gates.{number}", prior)
            hidden = hidden @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
            hidden = torch.clamp(hidden, min=0) if number < len(sizes) else hidden
        logits.append(hidden)
    found, wanted, random = towers(torch.empty(8, 0), rows), torch.cat(logits, dim=1), torch.randn(8, 2)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad((each * random).sum(), rows, retain_graph=True)[0] for each in (found, wanted)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "model.domain_features model.prior_features model=shared_bottom"),
        ({"domain_features": ["scene"]}, "model.domain_features 'scene' genre"),
        ({"prior_features": ["user_id", "user_id"]}, "model.prior_features 'user_id'"),
    ],
)
def test_gates_of_features_that_do_not_exist_are_refused(settings: dict[str, list[str]], said: str) -> None:
    with pytest.raises(ConfigError, match=names(said)):
        PEPNetConfig(**settings).check_tables(tables_of(SIZES), 3)


def test_preferences_that_depend_on_the_domain_and_on_the_user_are_learnt_by_gates_alone() -> None:
    """Clicks: scenes like the opposite items. Likes: users do. Linear towers can tell only by their gates."""
    random, num_rows = np.random.default_rng(0), 22_000
    columns = {
        name: random.integers(0, count, num_rows) for name, count in (("user_id", 30), ("item_id", 80), ("scene", 4))
    }
    value = np.random.default_rng(1).normal(0, 3, 80)[columns["item_id"]]
    signs = [np.where(columns[name] % 2, 1, -1) for name in ("scene", "user_id")]
    truth = 1 / (1 + np.exp(-np.stack([value * sign for sign in signs], axis=1)))
    rows = Rows(np.zeros((num_rows, 0)), {name: each + 1 for name, each in columns.items()}, random.random(truth.shape) < truth, truth)  # fmt: skip
    cut = 20_000

    def shares(config: TowersConfig) -> list[float]:
        task = fit(config, rows.part(slice(cut)), targets=LABELS, lr=0.01, epochs=6)
        with torch.no_grad():
            outputs = task(rows.part(slice(cut, None)).batch(slice(None)))[1].outputs.numpy()
        pairs = zip(outputs.T, truth[cut:].T, rows.labels[cut:].T, strict=True)
        return [(auc(found, label) - 0.5) / (auc(best, label) - 0.5) for found, best, label in pairs]

    gated = PEPNetConfig(domain_features=["scene"], prior_features=["user_id"], gate_size=16, tower_layer_sizes=[])
    found = {"gates": shares(gated), "none": shares(SharedBottomConfig(hidden_layer_sizes=[16], activation="identity"))}
    print("share of the lift of clicks and likes", found)
    assert min(found["gates"]) > 0.9 and max(found["none"]) < 0.3
