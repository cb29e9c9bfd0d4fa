"""Each model learns the part of a planted signal that it can express, and no more."""

from __future__ import annotations

import pytest
import torch

from pipeline.config.generated import SyntheticConfig
from pipeline.config.model import ModelConfig
from pipeline.extras.generate.kinds import UserItemConfig
from pipeline.extras.models.tasks.retrieval_metrics import RetrievalMetrics
from pipeline.extras.models.user_item import MatrixFactorizationConfig, NCFConfig, TwoTowerConfig
from pipeline.models.linear import FMConfig, LogisticRegressionConfig, WideDeepConfig
from tests.models.learning import ALONE, Rows, click_rows, fit, share_of_lift, user_item_rows

USERS_AND_ITEMS = UserItemConfig(num_rows=60_000, num_users=200, num_items=120, latent_dim=4, teacher_scale=3.0)
# Pairs of small features, so that few rows are enough to learn all of them.
CLICKS = SyntheticConfig(num_rows=30_000, cardinalities=[5 + 2 * i for i in range(26)], num_interactions=8)


@pytest.fixture(scope="module")
def users_and_items() -> Rows:
    return user_item_rows(USERS_AND_ITEMS)


@pytest.fixture(scope="module")
def linear_share(users_and_items: Rows) -> float:
    """Of what effects of single features, added up, can say of users and items."""
    return share_of_lift(LogisticRegressionConfig(), users_and_items)


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "least"),
    [
        (MatrixFactorizationConfig(), 0.88),
        (FMConfig(), 0.88),
        (NCFConfig(variant="gmf"), 0.75),
        (NCFConfig(variant="mlp"), 0.75),
        (NCFConfig(variant="neumf"), 0.8),
    ],
    ids=["matrix_factorization", "fm", "gmf", "mlp", "neumf"],
)
def test_models_of_users_and_items_learn_their_planted_vectors(
    users_and_items: Rows, linear_share: float, config: ModelConfig, least: float
) -> None:
    share = share_of_lift(config, users_and_items, dim=8, epochs=4)
    assert share > max(least, linear_share + 0.15)


@pytest.mark.long
def test_logistic_regression_learns_linear_effects_and_wide_deep_what_dense_features_bend() -> None:
    rows = click_rows(CLICKS)
    linear, deep = (
        share_of_lift(one, rows, epochs=2)
        for one in (LogisticRegressionConfig(), WideDeepConfig(hidden_layer_sizes=[64]))
    )
    assert linear > 0.45 and deep > linear + 0.01  # 0.014 to 0.038 over six first weights


def _recalls(config: TwoTowerConfig, rows: Rows) -> dict[str, float]:
    cut = len(rows.labels) * 9 // 10
    task = fit(config, rows.part(slice(cut)), epochs=2, lr=0.005)
    measure = RetrievalMetrics(ALONE, config.recall_at)
    with torch.no_grad():
        _, prediction = task(rows.part(slice(cut, None)).batch(slice(None)))
    measure.update(prediction)
    found = measure.compute()
    print({name: round(value, 4) for name, value in found.items()})
    return found


def test_two_tower_retrieves_what_users_click_and_log_q_makes_up_for_frequent_negatives() -> None:
    rows = user_item_rows(
        UserItemConfig(
            num_rows=40_000, num_users=200, num_items=300, latent_dim=4, teacher_scale=3.0, item_exponent=1.0
        )
    )
    both = TwoTowerConfig(
        user_features=["user_id", "user_group"],
        item_features=["item_id", "item_genre"],
        user_layer_sizes=[16],
        item_layer_sizes=[16],
        recall_at=[10],
    )
    corrected = _recalls(both, rows)
    both.log_q_correction = False
    plain = _recalls(both, rows)
    assert corrected["recall_at_10"] > plain["recall_at_10"] > 10 / 300
