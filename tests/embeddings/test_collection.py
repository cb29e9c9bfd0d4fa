"""Resolved tables become EmbeddingBagConfigs field by field, without memory."""

from __future__ import annotations

import pytest
import torch
from torchrec.modules.embedding_configs import DataType, PoolingType

from pipeline.config.tables import InitConfig, TableConfig
from pipeline.embeddings.collection import build_embedding_bag_collection, init_function
from pipeline.embeddings.tables import resolve_tables
from tests.support.datasets import described_dataset


def test_a_collection_lies_on_meta_and_carries_every_field() -> None:
    tables = resolve_tables(
        {
            "default": TableConfig(embedding_dim=8),
            "shared": TableConfig(feature_names=["user", "context"], pooling="mean", data_type="fp16"),
        },
        described_dataset({"user": 100, "item": 5000, "context": 7}),
    )
    collection = build_embedding_bag_collection(tables)
    shared, item = collection.embedding_bag_configs()
    assert all(parameter.is_meta for parameter in collection.parameters())
    assert (shared.name, shared.feature_names, shared.pooling, shared.data_type) == (
        "shared",
        ["user", "context"],
        PoolingType.MEAN,
        DataType.FP16,
    )
    assert (item.num_embeddings, item.embedding_dim, item.pooling) == (5000, 8, PoolingType.SUM)


@pytest.mark.parametrize(
    ("init", "deviation"),
    [
        (InitConfig("uniform"), 0.1 / 3**0.5),
        (InitConfig("uniform", 0.3), 0.3 / 3**0.5),
        (InitConfig("normal"), 0.25),
        (InitConfig("normal", 0.7), 0.7),
        (InitConfig("xavier_uniform"), (2 / 116) ** 0.5),
        (InitConfig("xavier_normal", 0.5), 0.5 * (2 / 116) ** 0.5),
        (InitConfig("zeros"), 0.0),
    ],
)
def test_init_has_the_stated_spread(init: InitConfig, deviation: float) -> None:
    bound = deviation * 3**0.5 * 1.001 if "uniform" in init.kind else None
    weights = init_function(init, num_embeddings=100, embedding_dim=16)(torch.full((5000, 16), 9.0))
    assert float(weights.std()) == pytest.approx(deviation, rel=0.02)
    assert bound is None or float(weights.abs().max()) <= bound
