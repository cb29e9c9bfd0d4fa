"""Turn a model config and tables into an nn.Module: tables on the meta device, dense layers real and seeded.

The layers are TorchRec's own; pooled embeddings are read by key, for a plan leaves them in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchrec.models.deepfm import SimpleDeepFMNN

from pipeline.embeddings.collection import build_embeddings
from pipeline.embeddings.config import Table
from pipeline.models.config import (
    DeepFMConfig,
    DLRMConfig,
    DLRMDCNConfig,
    FMConfig,
    LogisticRegressionConfig,
    MatrixFactorizationConfig,
    ModelConfig,
    NCFConfig,
    TwoTowerConfig,
    WideDeepConfig,
    used_tables,
)
from pipeline.models.dlrm import CrossDLRM, DotDLRM
from pipeline.models.linear import FactorizationMachine, LogisticRegression, WideDeep
from pipeline.models.two_tower import TwoTower
from pipeline.models.user_item import BiasedDot, NeuralFiltering, UserItemModel


def build_dlrm(config: DLRMConfig, tables: list[Table], num_dense_features: int) -> nn.Module:
    return DotDLRM(**_dlrm_arguments(config, tables, num_dense_features))


def build_dlrm_dcn(config: DLRMDCNConfig, tables: list[Table], num_dense_features: int) -> nn.Module:
    return CrossDLRM(
        **_dlrm_arguments(config, tables, num_dense_features),
        dcn_num_layers=config.dcn_num_layers,
        dcn_low_rank_dim=config.dcn_low_rank_dim,
    )


def _dlrm_arguments(config: DLRMConfig, tables: list[Table], num_dense_features: int) -> dict[str, Any]:
    return {
        "embedding_bag_collection": build_embeddings(tables),
        "dense_in_features": num_dense_features,
        "dense_arch_layer_sizes": list(config.dense_arch_layer_sizes),
        "over_arch_layer_sizes": list(config.over_arch_layer_sizes),
    }


def build_deepfm(config: DeepFMConfig, tables: list[Table], num_dense_features: int) -> nn.Module:
    model = SimpleDeepFMNN(
        num_dense_features=num_dense_features,
        embedding_bag_collection=build_embeddings(tables),
        hidden_layer_size=config.hidden_layer_size,
        deep_fm_dimension=config.deep_fm_dimension,
    )
    # TorchRec ends the model in a sigmoid; the task wants logits, whose loss is stable in the tails.
    model.over_arch.model = model.over_arch.model[0]
    return model


def build_logistic_regression(
    config: LogisticRegressionConfig, tables: list[Table], num_dense_features: int
) -> nn.Module:
    return LogisticRegression(build_embeddings(tables), num_dense_features)


def build_fm(config: FMConfig, tables: list[Table], num_dense_features: int) -> nn.Module:
    dims = _dims(tables)
    dim = next(iter(dims.values()))
    return FactorizationMachine(build_embeddings(tables), list(dims), dim, num_dense_features)


def build_wide_deep(config: WideDeepConfig, tables: list[Table], num_dense_features: int) -> nn.Module:
    return WideDeep(build_embeddings(tables), _dims(tables), num_dense_features, list(config.hidden_layer_sizes))


def build_matrix_factorization(
    config: MatrixFactorizationConfig, tables: list[Table], num_dense_features: int
) -> nn.Module:
    return UserItemModel(build_embeddings(tables), config.user_feature, config.item_feature, BiasedDot())


def build_ncf(config: NCFConfig, tables: list[Table], num_dense_features: int) -> nn.Module:
    dim = _dims(tables)[config.user_feature]
    over_arch = NeuralFiltering(dim, config.gmf_columns(dim), list(config.mlp_layer_sizes))
    return UserItemModel(build_embeddings(tables), config.user_feature, config.item_feature, over_arch)


def build_two_tower(config: TwoTowerConfig, tables: list[Table], num_dense_features: int) -> nn.Module:
    return TwoTower(
        build_embeddings(tables),
        _dims(tables),
        list(config.user_features),
        list(config.item_features),
        list(config.user_layer_sizes),
        list(config.item_layer_sizes),
        num_dense_features,
        config.normalize,
    )


def _dims(tables: list[Table]) -> dict[str, int]:
    """Feature -> embedding_dim of its table."""
    return {feature: table.embedding_dim for table in tables for feature in table.feature_names}


BUILDERS: dict[type[ModelConfig], Callable[[Any, list[Table], int], nn.Module]] = {
    DLRMConfig: build_dlrm,
    DLRMDCNConfig: build_dlrm_dcn,
    DeepFMConfig: build_deepfm,
    LogisticRegressionConfig: build_logistic_regression,
    FMConfig: build_fm,
    WideDeepConfig: build_wide_deep,
    MatrixFactorizationConfig: build_matrix_factorization,
    NCFConfig: build_ncf,
    TwoTowerConfig: build_two_tower,
}


def build_model(config: ModelConfig, tables: list[Table], num_dense_features: int, seed: int = 0) -> nn.Module:
    """A module with forward(dense_features [batch, num_dense], sparse_features) -> logits [batch, 1].

    A two-tower model gives (users, items) instead, and is trained by a task of its own (models.tasks). Tables of features
    that the model does not read are left out.

    Dense layers are drawn from `seed` alone, so every rank builds the same; the caller's random state is kept.

    Raises:
        ValueError: the model cannot be built on these tables.
    """
    config.check_tables(tables, num_dense_features)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BUILDERS[type(config)](config, used_tables(config, tables), num_dense_features)
