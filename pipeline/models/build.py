"""Build the module of a model config: tables on the meta device, dense layers initialized by the
seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.config.model import ModelConfig, used_tables
from pipeline.data.targets import Target
from pipeline.embeddings.table import Table

if TYPE_CHECKING:
    from torch import nn


def build_model(
    config: ModelConfig,
    tables: list[Table],
    num_dense_features: int,
    seed: int = 0,
    targets: Sequence[Target] | None = None,
) -> nn.Module:
    """Return a module with forward(dense_features [batch, num_dense], sparse_features) -> logits
    [batch, 1].

    A model that learns all labels returns as many numbers per row as the targets have in total. A
    two-tower model returns (users, items) and is trained by a separate task (models.tasks). Tables
    of features that the model does not read are left out.

    Dense layers are initialized from `seed` alone, so every rank builds the same layers. The random
    state of the caller is restored.

    Raises:
        ConfigError: the model cannot be built on these tables.
    """
    import torch  # imported here, because the configs of models are composed without torch

    from pipeline import devices
    from pipeline.models.layers.mlp import initialize_linear_layers

    config.check_tables(tables, num_dense_features)
    with devices.current().fork_rng():
        torch.manual_seed(seed)
        learnt = list(targets or [Target("label")])
        model = config.build_for(used_tables(config, tables), num_dense_features, learnt)
        initialize_linear_layers(model, config.init)
    return model
