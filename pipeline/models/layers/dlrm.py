"""Compute the logits of TorchRec's DLRM and DLRM_DCN with less copying.

Parameters, their names and the numbers are TorchRec's. Its own forward reads the embeddings key by key, copies them
twice and gathers the pairs by index: on a CPU that takes longer than the layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN, InteractionArch
from torchrec.modules.mlp import Perceptron
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.models.layers.interaction import DotInteraction, PooledRows


class DotDLRM(DLRM):
    """forward(dense_features [B, num_dense], sparse_features) -> logits [B, 1]."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        names = self.sparse_arch.sparse_feature_names
        _activate_in_place(self)
        self.pooled_rows = PooledRows(names)
        self.inter_arch = DotInteraction(len(names))
        self.is_plain = False

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        if self.is_plain:
            return super().forward(dense_features, sparse_features)  # type: ignore[no-any-return]
        return _forward(self, dense_features, sparse_features)


class CrossDLRM(DLRM_DCN):
    """forward(dense_features [B, num_dense], sparse_features) -> logits [B, 1]."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        _activate_in_place(self)
        self.pooled_rows = PooledRows(self.sparse_arch.sparse_feature_names)
        self.is_plain = False

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        if self.is_plain:
            return super().forward(dense_features, sparse_features)  # type: ignore[no-any-return]
        return _forward(self, dense_features, sparse_features)


def _activate_in_place(model: nn.Module) -> None:
    """A layer's own output is nobody else's, and its backward does not ask for it."""
    for layer in model.modules():
        if isinstance(layer, Perceptron) and layer._activation_fn is torch.relu:
            layer._activation_fn = torch.relu_


def use_torchrec_layers(model: nn.Module) -> None:
    """Let each DLRM inside `model` run TorchRec's own forward, interaction and activations, to compare with.

    Parameters and their names stay as they are.
    """
    for dlrm in model.modules():
        if isinstance(dlrm, DotDLRM):
            dlrm.inter_arch = InteractionArch(len(dlrm.sparse_arch.sparse_feature_names))
        if isinstance(dlrm, (DotDLRM, CrossDLRM)):
            dlrm.is_plain = True
    for layer in model.modules():
        if isinstance(layer, Perceptron) and layer._activation_fn is torch.relu_:
            layer._activation_fn = torch.relu


def _forward(
    model: DotDLRM | CrossDLRM, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor
) -> torch.Tensor:
    dense = model.dense_arch(dense_features)
    rows = model.pooled_rows(model.sparse_arch.embedding_bag_collection(sparse_features))
    logits: torch.Tensor = model.over_arch(model.inter_arch(dense, rows))
    return logits


def join_lookups_to_products(model: nn.Module) -> int:
    """Let each DLRM's lookup leave its rows where its dot products want them, in their type; how many do.

    Where one lookup holds all tables, in the model's order and of one width: what it leaves is then the dot products' whole
    input but for the dense layers' row. The numbers are the same: a row is rounded once, at another point.
    """
    joined = 0
    for dlrm in (module for module in model.modules() if isinstance(module, DotDLRM)):
        tables = dlrm.sparse_arch.embedding_bag_collection
        lookup = getattr(tables, "whole_lookup", None)
        if lookup is None or tables._embedding_names != dlrm.pooled_rows.feature_names or len(set(lookup.dims)) > 1:
            continue
        lookup.room, lookup.follows_autocast = lookup.dims[0], True
        dlrm.inter_arch.rows_have_room = True
        joined += 1
    return joined
