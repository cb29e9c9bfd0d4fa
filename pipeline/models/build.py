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
from pipeline.models.config import DeepFMConfig, DLRMConfig, DLRMDCNConfig, ModelConfig
from pipeline.models.dlrm import CrossDLRM, DotDLRM


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


BUILDERS: dict[type[ModelConfig], Callable[[Any, list[Table], int], nn.Module]] = {
    DLRMConfig: build_dlrm,
    DLRMDCNConfig: build_dlrm_dcn,
    DeepFMConfig: build_deepfm,
}


def build_model(config: ModelConfig, tables: list[Table], num_dense_features: int, seed: int = 0) -> nn.Module:
    """A module with forward(dense_features [batch, num_dense], sparse_features) -> logits [batch, 1].

    Dense layers are drawn from `seed` alone, so every rank builds the same; the caller's random state is kept.

    Raises:
        ValueError: the model cannot be built on these tables.
    """
    config.check_tables(tables, num_dense_features)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BUILDERS[type(config)](config, tables, num_dense_features)
