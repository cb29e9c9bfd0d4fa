"""Build the module of a model config: tables on meta, dense layers initialized by the seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.config.model import ModelConfig, used_tables
from pipeline.data.targets import Target
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import UserError

if TYPE_CHECKING:
    from torch import nn


def build_model(
    config: ModelConfig,
    tables: list[Table],
    num_dense_features: int,
    seed: int = 0,
    targets: Sequence[Target] | None = None,
) -> nn.Module:
    """Return a module: (dense_features [batch, num_dense], sparse_features) -> logits [batch, 1].

    A model that learns all labels returns [batch, sum of the targets' widths]; a two-tower model
    returns (users, items). Tables that the model does not read are left out. Dense layers depend on
    `seed` alone; the random state is restored. Raises ConfigError if the tables do not fit.
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


def find_layers_by_feature(
    config: ModelConfig, tables: list[Table], num_dense_features: int, targets: Sequence[Target]
) -> Callable[[str], bool]:
    """Return a function (parameter's name -> bool): whether its layout depends on the model's
    features.

    Such a parameter has another shape in a model with one more feature. If such a model has
    additional parameters (`fields.3.weight`), all parameters of the same numbered list depend on
    the features.
    """

    def shapes(tables: list[Table], num_dense: int) -> dict[str, tuple[int, ...]]:
        state = build_model(config, tables, num_dense, targets=targets).state_dict()
        return {name: tuple(value.shape) for name, value in state.items()}

    def unnumbered(name: str) -> str:
        return ".".join("*" if part.isdigit() else part for part in name.split("."))

    base = shapes(tables, num_dense_features)
    changed: set[str] = set()
    try:
        more = [shapes(tables, num_dense_features + 1)]
        if tables:
            extra = replace(tables[-1], name="one more", feature_names=["one more"], positions=[])
            more.append(shapes([*tables, extra], num_dense_features))
    except UserError:  # a model of exactly these features
        return lambda name: True
    for other in more:
        changed |= {name for name, shape in base.items() if other.get(name) != shape}
        added = {unnumbered(name) for name in other.keys() - base.keys()}
        changed |= {name for name in base if "*" in unnumbered(name) and unnumbered(name) in added}
    return lambda name: name in changed or name not in base
