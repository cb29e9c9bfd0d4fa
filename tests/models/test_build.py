"""Models are built from config: seeded, checked against the tables, ending in logits."""

from __future__ import annotations

import pytest
import torch
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.model import ModelConfig
from pipeline.config.tables import InitConfig, TableConfig
from pipeline.embeddings.tables import resolve_tables
from pipeline.extras.models.simple_deepfm import SimpleDeepFMConfig
from pipeline.extras.models.xdeepfm import XDeepFMConfig
from pipeline.models.build import build_model
from pipeline.models.dcn import DCNConfig, DCNv2Config
from pipeline.models.deepfm import DeepFMConfig
from pipeline.models.dlrm import DLRMConfig, DLRMDCNConfig
from pipeline.models.linear import FMConfig, LogisticRegressionConfig, WideDeepConfig
from pipeline.runtime.errors import ConfigError
from pipeline.serving.artifact.dense_export import export_layers, take_collection
from tests.support.datasets import described_dataset
from tests.support.messages import names

TABLES = resolve_tables({"default": TableConfig(embedding_dim=8)}, described_dataset({"user": 100, "item": 50}))
CONFIGS = [
    DLRMConfig(dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1]),
    DLRMDCNConfig(dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1], dcn_num_layers=2, dcn_low_rank_dim=4),
    SimpleDeepFMConfig(hidden_layer_size=16, deep_fm_dimension=8),
]
OVER_ANY_DATA = [
    DLRMConfig(over_arch_layer_sizes=[16, 1], batch_norm=True, dropout=0.1),
    DLRMDCNConfig(over_arch_layer_sizes=[16, 1], dcn_low_rank_dim=4, layer_norm=True, activation="silu"),
    LogisticRegressionConfig(),
    FMConfig(),
    FMConfig(dense_features="values"),
    WideDeepConfig(hidden_layer_sizes=[8], dropout=0.1),
    DeepFMConfig(hidden_layer_sizes=[8]),
    DeepFMConfig(hidden_layer_sizes=[8], dense_features="values"),
    XDeepFMConfig(hidden_layer_sizes=[8], cin_layer_sizes=[4, 3]),
    XDeepFMConfig(hidden_layer_sizes=[], cin_layer_sizes=[4]),
    DCNConfig(hidden_layer_sizes=[8]),
    DCNConfig(hidden_layer_sizes=[]),
    DCNv2Config(hidden_layer_sizes=[8], structure="stacked", cross="low_rank", low_rank=4),
    DCNv2Config(hidden_layer_sizes=[8], structure="stacked_parallel", cross="mixture", low_rank=4, num_experts=2),
    DCNv2Config(hidden_layer_sizes=[8], structure="cross", dense_features="values"),
    DCNv2Config(hidden_layer_sizes=[8]),
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
        {"default": TableConfig(embedding_dim=8), "item.id": TableConfig(embedding_dim=4)},
        described_dataset({"user": 100, "item.id": 50}),
    )
    with pytest.raises(ConfigError, match=names("embedding_dim [4 8] tables.user tables.item.id")):
        build_model(config, tables, 2)


@pytest.mark.campaign  # what test_every_model.py shows by training, and one export a model
@pytest.mark.parametrize("num_dense", [0, 2])
@pytest.mark.parametrize("config", OVER_ANY_DATA, ids=lambda config: config.kind)
def test_a_model_takes_data_with_and_without_dense_features(config: ModelConfig, num_dense: int) -> None:
    """Every weight gets a gradient, evaluation is without dropout, and what is exported gives the same logits."""
    model = build_model(config, TABLES, num_dense)
    tables = next(module for module in model.modules() if isinstance(module, EmbeddingBagCollection))
    tables.to_empty(device="cpu")
    for parameter in tables.parameters():
        torch.nn.init.normal_(parameter)
    ids = KeyedJaggedTensor(["user", "item"], torch.arange(64) % 50, lengths=torch.ones(64, dtype=torch.int32))
    dense = torch.randn(32, num_dense)
    logits = model(dense, ids)
    assert logits.shape == (32, 1)
    logits.square().sum().backward()
    assert all(value.grad is not None and value.grad.any() for value in model.parameters()), config.kind
    model.eval()
    expected = model(dense, ids).reshape(-1)
    pooled = tables(ids).values()
    take_collection(model, ["user", "item"])
    exported = export_layers(model, "fp32", num_dense, pooled.shape[1]).module()
    torch.testing.assert_close(exported(dense, pooled), expected, rtol=1e-4, atol=1e-4)


def test_a_dlrms_bottom_ends_in_the_tables_dim_unless_it_is_given() -> None:
    assert build_model(DLRMConfig(), TABLES, 2).dense_arch.model._mlp[-1]._linear.out_features == 8


def test_a_dlrm_of_one_table_and_nothing_else_is_refused() -> None:
    tables = resolve_tables({"default": TableConfig(embedding_dim=8)}, described_dataset({"user": 100}))
    with pytest.raises(ConfigError, match=names("model=dlrm 1 sparse 0 dense")):
        build_model(DLRMConfig(), tables, 0)


def test_tables_begin_as_the_model_has_it_unless_the_job_says_otherwise() -> None:
    data = described_dataset({"user": 100, "item": 50})
    given = {"default": TableConfig(embedding_dim=8), "item": TableConfig(init=InitConfig("uniform", 0.5))}
    by_model = resolve_tables(given, data, auto_init=DeepFMConfig().table_init)
    assert [(table.init.kind, table.init.scale) for table in by_model] == [("normal", 0.01), ("uniform", 0.5)]
    scaled = {"default": TableConfig(init=InitConfig("auto", 0.2))}
    assert resolve_tables(scaled, data, auto_init=DLRMConfig().table_init)[0].init == InitConfig("uniform", 0.2)
    assert resolve_tables({}, data)[0].init == InitConfig("uniform")
