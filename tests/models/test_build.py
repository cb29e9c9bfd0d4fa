"""Models are built from config: seeded, checked against the tables, ending in logits."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.model import ModelConfig
from pipeline.config.tables import TableConfig
from pipeline.embeddings.tables import resolve_tables
from pipeline.models.build import build_model
from pipeline.models.dlrm import DeepFMConfig, DLRMConfig, DLRMDCNConfig
from pipeline.runtime.errors import ConfigError
from tests.support.datasets import described_dataset
from tests.support.messages import names

TABLES = resolve_tables({"default": TableConfig(embedding_dim=8)}, described_dataset({"user": 100, "item": 50}))
CONFIGS = [
    DLRMConfig(dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1]),
    DLRMDCNConfig(dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1], dcn_num_layers=2, dcn_low_rank_dim=4),
    DeepFMConfig(hidden_layer_size=16, deep_fm_dimension=8),
]
by_kind = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)


@by_kind
def test_a_model_gives_one_unbounded_logit_a_sample(config: ModelConfig) -> None:
    model = build_model(config, TABLES, num_dense_features=2)
    model.sparse_arch.embedding_bag_collection.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=2.0)
    ids = KeyedJaggedTensor(["user", "item"], torch.arange(64) % 50, lengths=torch.ones(64, dtype=torch.int32))
    logits = model(torch.randn(32, 2) * 10, ids)
    assert logits.shape == (32, 1)
    assert logits.max() > 1 or logits.min() < 0  # not probabilities


@by_kind
def test_tables_are_on_meta_and_dense_layers_depend_on_the_seed_alone(config: ModelConfig) -> None:
    torch.manual_seed(1)
    first = build_model(config, TABLES, 2, seed=3)
    torch.manual_seed(2)
    state_before = torch.random.get_rng_state()
    second, other = build_model(config, TABLES, 2, seed=3), build_model(config, TABLES, 2, seed=4)
    assert torch.equal(torch.random.get_rng_state(), state_before)
    dense = {name: value for name, value in first.named_parameters() if not value.is_meta}
    assert dense
    assert all("embedding_bags" in name for name, value in first.named_parameters() if value.is_meta)
    assert all(torch.equal(value, dict(second.named_parameters())[name]) for name, value in dense.items())
    assert any(not torch.equal(value, dict(other.named_parameters())[name]) for name, value in dense.items())


@pytest.mark.parametrize(
    ("config", "default", "num_dense", "message"),
    [
        (CONFIGS[0], TableConfig(embedding_dim=16), 2, "embedding_dim 16"),
        (CONFIGS[0], TableConfig(embedding_dim=8), 0, "dense"),
        (CONFIGS[2], TableConfig(embedding_dim=8), 0, "dense"),
    ],
)
def test_a_model_that_does_not_fit_the_tables_is_refused(
    config: ModelConfig, default: TableConfig, num_dense: int, message: str
) -> None:
    tables = resolve_tables({"default": default}, described_dataset({"user": 100, "item": 50}))
    with pytest.raises(ConfigError, match=names(message)):
        build_model(config, tables, num_dense)


@by_kind
def test_tables_of_two_dims_are_refused(config: ModelConfig) -> None:
    tables = resolve_tables(
        {"default": TableConfig(embedding_dim=8), "item": TableConfig(embedding_dim=4)},
        described_dataset({"user": 100, "item": 50}),
    )
    with pytest.raises(ConfigError, match=names("embedding_dim [4 8] tables.user tables.item")):
        build_model(config, tables, 2)
