"""On planted clicks and conversions each label comes near its best AUC, and ESMM scores conversions of rows without a click."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.data.quality import auc
from pipeline.data.targets import Target
from pipeline.extras.generate.kinds import ConversionsConfig
from pipeline.extras.models.esmm import ESMMConfig
from pipeline.extras.models.mmoe import MMoEConfig
from pipeline.extras.models.ple import PLEConfig
from pipeline.extras.models.shared_bottom import SharedBottomConfig
from pipeline.extras.models.towers import TowersConfig
from tests.models.learning import Rows, conversion_rows, fit

BOTH = [Target("click"), Target("conversion", mask="click")]
MODELS = [
    SharedBottomConfig(hidden_layer_sizes=[64]),
    MMoEConfig(expert_layer_sizes=[32]),
    PLEConfig(expert_layer_sizes=[32]),
    PLEConfig(expert_layer_sizes=[32], num_levels=1, uncertainty_weights=True),
    ESMMConfig(hidden_layer_sizes=[64]),
]
EVERY_ID = ConversionsConfig(
    num_users=200, num_items=100, num_groups=6, num_categories=8, click_rate=0.3, conversion_rate=0.3
)
# Clicks of 1 in 20, and who is clicked converts: 62 % after a click, 20 % over all impressions.
FEW_CLICKS = replace(
    EVERY_ID,
    num_users=100,
    num_items=2000,
    click_rate=0.05,
    conversion_rate=0.2,
    dependence=1.0,
    teacher_scale=2.0,
    item_exponent=0.3,
)


@pytest.fixture(scope="module")
def every_id() -> Rows:
    return conversion_rows(EVERY_ID)


def _outputs(config: TowersConfig, rows: Rows, held_out: Rows, targets: list[Target], **settings: float) -> np.ndarray:
    """[rows, labels] of the held-out ones."""
    task = fit(config, rows, targets=targets, **settings)
    with torch.no_grad():
        _, prediction = task(held_out.batch(slice(None)))
    return prediction.outputs.double().numpy()


def _cut(rows: Rows) -> tuple[Rows, Rows]:
    cut = len(rows.labels) * 9 // 10
    return rows.part(slice(cut)), rows.part(slice(cut, None))


@pytest.mark.campaign
@pytest.mark.parametrize("config", MODELS, ids=lambda config: f"{config.kind}{getattr(config, 'num_levels', '')}")
def test_each_label_comes_within_three_percent_of_its_best_lift(config: TowersConfig, every_id: Rows) -> None:
    rows, held_out = _cut(every_id)
    outputs = _outputs(config, rows, held_out, BOTH, lr=0.003, epochs=2)
    for number, counts in enumerate((held_out.labels[:, 0] >= 0, held_out.labels[:, 0] == 1)):
        best = auc(held_out.truth[counts, number], held_out.labels[counts, number])
        share = (auc(outputs[counts, number], held_out.labels[counts, number]) - 0.5) / (best - 0.5)
        print(f"{config.kind} {BOTH[number].name}: {share:.4f} of the lift of {best:.4f}")
        assert share >= 0.97


def _on_clicks_alone(rows: Rows) -> Rows:
    """The clicked rows with their conversions, described as all rows are, so that tables are the same."""

    class Clicked(Rows):
        def dataset(self):
            return rows.dataset()

    clicked = rows.part(np.flatnonzero(rows.labels[:, 0]))
    return Clicked(clicked.dense, clicked.ids, clicked.labels[:, 1], clicked.truth[:, 1])


@pytest.mark.campaign
@pytest.mark.parametrize(("dim", "of_esmm", "of_plain"), [(8, 0.12, 0.25), (1, 0.06, 0.6)])
def test_esmm_predicts_conversions_of_all_impressions_where_training_on_clicks_overestimates_them(
    dim: int, of_esmm: float, of_plain: float
) -> None:
    """Mean predicted over mean true probability to convert, over impressions; the same tables and layers for both."""
    rows, held_out = _cut(conversion_rows(FEW_CLICKS))
    truth, settings = held_out.truth[:, 1], {"epochs": 4, "dim": dim}
    alone = Rows(held_out.dense, held_out.ids, held_out.labels[:, 1], truth)
    plain = _outputs(
        SharedBottomConfig(hidden_layer_sizes=[32]),
        _on_clicks_alone(rows),
        alone,
        [Target("conversion")],
        lr=0.003,
        **settings,
    )[:, 0]
    rate = 0.001 if dim == 8 else 0.003
    esmm = _outputs(ESMMConfig(hidden_layer_sizes=[32]), rows, held_out, BOTH, lr=rate, **settings)[:, 1]
    found = {}
    weighed = ESMMConfig(hidden_layer_sizes=[32], inverse_propensity=0.1)
    by_propensity = _outputs(weighed, rows, held_out, BOTH, lr=rate, **settings)[:, 1]
    for name, logits in (("plain", plain), ("esmm", esmm), ("by propensity", by_propensity)):
        chances = 1 / (1 + np.exp(-logits))
        clicked = held_out.labels[:, 0] == 1
        found[name] = chances.mean() / truth.mean() - 1
        on_clicks = chances[clicked].mean() / truth[clicked].mean() - 1
        print(f"dim {dim}, {name}: {found[name]:+.3f} over all impressions, {on_clicks:+.3f} over clicks")
        assert abs(on_clicks) < 0.06  # there both are right
    assert abs(found["esmm"]) < of_esmm and found["plain"] > of_plain
    assert dim == 1 or abs(found["by propensity"]) < 0.04
