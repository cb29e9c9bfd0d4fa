"""Compute the logits of TorchRec's DLRM and DLRM_DCN with less copying.

Parameters, names and results are the same as TorchRec's. TorchRec's forward reads the embeddings
key by key, copies them twice and gathers the pairs by index, which on a CPU takes longer than the
layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN, InteractionArch
from torchrec.modules.mlp import Perceptron
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.model import LayerSettings
from pipeline.models.layers.cross import CrossNetwork, MatrixCross
from pipeline.models.layers.interaction import DotInteraction, PooledRows
from pipeline.models.layers.mlp import MLP, Layer


class _LessCopying(DLRM):
    is_plain = False  # True: run TorchRec's forward

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        if self.is_plain:
            return super().forward(dense_features, sparse_features)
        dense = self.dense_arch(dense_features)
        rows = self.pooled_rows(self.sparse_arch.embedding_bag_collection(sparse_features))
        logits: torch.Tensor = self.over_arch(self.inter_arch(dense, rows))
        return logits


class DotDLRM(_LessCopying):
    """Compute forward(dense_features [B, num_dense], sparse_features) -> logits [B, 1]."""

    def __init__(self, settings: LayerSettings = LayerSettings(), **arguments: Any) -> None:  # noqa: B008  # frozen
        super().__init__(**arguments)
        names = self.sparse_arch.sparse_feature_names
        _set_layers(self, settings)
        self.pooled_rows = PooledRows(names)
        self.inter_arch = DotInteraction(len(names))


class CrossDLRM(_LessCopying, DLRM_DCN):
    """Compute forward(dense_features [B, num_dense], sparse_features) -> logits [B, 1]."""

    def __init__(self, settings: LayerSettings = LayerSettings(), **arguments: Any) -> None:  # noqa: B008  # frozen
        super().__init__(**arguments)
        _set_layers(self, settings)
        self.pooled_rows = PooledRows(self.sparse_arch.sparse_feature_names)


class SparseDLRM(nn.Module):
    """Compute forward(dense_features [B, 0], sparse_features) -> logits [B, 1], without a dense
    arch.

    `inter_arch`: (None, rows [B, F, D]) -> [B, inter_arch.out_features].
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        feature_names: list[str],
        inter_arch: DotInteraction | CrossedRows,
        over_arch_layer_sizes: list[int],
        settings: LayerSettings,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.pooled_rows = PooledRows(feature_names)
        self.inter_arch = inter_arch
        *hidden, last = over_arch_layer_sizes
        self.over_arch = MLP(inter_arch.out_features, hidden, settings, out_features=last)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.pooled_rows(self.embedding_bag_collection(sparse_features))
        logits: torch.Tensor = self.over_arch(self.inter_arch(None, rows))
        return logits


class CrossedRows(nn.Module):
    """Map (None, rows [B, F, D]) to [B, F D] by low-rank crosses of all columns."""

    def __init__(self, width: int, num_layers: int, rank: int) -> None:
        super().__init__()
        self.crossnet = CrossNetwork([MatrixCross(width, rank) for _ in range(num_layers)])
        self.out_features = width

    def forward(self, dense: None, rows: torch.Tensor) -> torch.Tensor:
        crossed: torch.Tensor = self.crossnet(rows.flatten(1))
        return crossed


def _set_layers(model: _LessCopying, settings: LayerSettings) -> None:
    """Replace layers by layers with norms, dropout or other activations. The names of the weights
    do not change.

    The dense arch's output has neither norm nor dropout, like the vectors of the tables.
    """
    if settings == LayerSettings():
        _activate_in_place(model)
        return
    sizes = _sizes(model.dense_arch.model)
    model.dense_arch.model = MLP(sizes[0], sizes[1:-1], settings)
    model.dense_arch.model._mlp.append(Layer(sizes[-2], sizes[-1], LayerSettings(settings.activation)))
    sizes = _sizes(model.over_arch.model[0])
    model.over_arch.model[0] = MLP(sizes[0], sizes[1:], settings)


def _sizes(mlp: nn.Module) -> list[int]:
    """Return the width of the input and the width of each layer's output."""
    layers = [layer for layer in mlp.modules() if isinstance(layer, nn.Linear)]
    return [layers[0].in_features, *(layer.out_features for layer in layers)]


def _activate_in_place(model: nn.Module) -> None:
    """Apply relu in place. This is safe because only relu uses the layer's output, and its backward needs no input."""
    for layer in model.modules():
        if isinstance(layer, Perceptron) and layer._activation_fn is torch.relu:
            layer._activation_fn = torch.relu_


def use_torchrec_layers(model: nn.Module) -> None:
    """Let each DLRM run TorchRec's forward, interaction and activations, as a baseline."""
    for dlrm in model.modules():
        if isinstance(dlrm, DotDLRM):
            dlrm.inter_arch = InteractionArch(len(dlrm.sparse_arch.sparse_feature_names))
        if isinstance(dlrm, _LessCopying):
            dlrm.is_plain = True
        if isinstance(dlrm, SparseDLRM) and isinstance(dlrm.inter_arch, DotInteraction):
            dlrm.inter_arch.uses_kernel = False  # TorchRec has no such model
    for layer in model.modules():
        if isinstance(layer, Perceptron) and layer._activation_fn is torch.relu_:
            layer._activation_fn = torch.relu


def join_lookups_to_products(model: nn.Module) -> int:
    """Let lookups write rows directly into the inputs of the dot products, in their dtype. Return
    the number of lookups.

    This needs one lookup that has all tables in the model's order and with one width. Each row is
    rounded once, as before, so the results are the same.
    """
    joined = 0
    for dlrm in (module for module in model.modules() if isinstance(module, DotDLRM)):
        tables = dlrm.sparse_arch.embedding_bag_collection
        lookup = getattr(tables, "fused_lookup", None)
        if lookup is None or tables._embedding_names != dlrm.pooled_rows.feature_names or len(set(lookup.dims)) > 1:
            continue
        lookup.reserve_columns(lookup.dims[0])
        dlrm.inter_arch.rows_are_padded = True
        joined += 1
    return joined
