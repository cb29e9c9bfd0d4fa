"""Define the base of models of several labels: a body that labels share, and a tower for each label
(stdlib only).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.data.targets import heads_of
from pipeline.embeddings.table import Table
from pipeline.models.checks import check_layer_sizes, dims_of_features
from pipeline.models.vectors import DIM_WITHOUT_TABLES, VectorsConfig
from pipeline.runtime.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from pipeline.data.targets import Target
    from pipeline.models.layers.features import FeatureInputs


@dataclass
class TowersConfig(VectorsConfig):
    """Configure a model that learns all labels of the data set (data.columns.labels).

    tower_layer_sizes: the hidden layers of each label's MLP. towers: other hidden layers for some
    labels, by label. uncertainty_weights: learn weights of the labels in the loss (Kendall et al.,
    CVPR 2018), in addition to the given weights.
    """

    tower_layer_sizes: list[int] = field(default_factory=lambda: [64])
    towers: dict[str, list[int]] = field(default_factory=dict)
    uncertainty_weights: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.tower_layer_sizes", self.tower_layer_sizes, least=0)
        for name, sizes in self.towers.items():
            check_layer_sizes(f"model.towers.{name}", sizes, least=0)

    @property
    def task(self) -> str:
        return "labels"

    @property
    def learns_all(self) -> bool:
        return True

    def build_for(self, tables: list[Table], num_dense_features: int, targets: list[Target]) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.models.layers.features import FeatureInputs, RowsModel

        self.check_targets(targets)
        dims = dims_of_features(tables)
        dim = next(iter(dims.values()), DIM_WITHOUT_TABLES)
        inputs = FeatureInputs(len(dims), num_dense_features, dim, self.dense_features == "vectors")
        towers = self.build_towers(inputs, list(dims), dim, heads_of(targets))
        return RowsModel(build_embeddings(tables), list(dims), dim, towers)

    def build_towers(self, inputs: FeatureInputs, names: list[str], dim: int, targets: list[Target]) -> nn.Module:
        """Return a module: (dense [B, num_dense], rows [B, F, dim] of the features `names`) ->
        [B, sum of the targets' widths].
        """
        from pipeline.extras.models.layers.towers import Towers

        body, width = self.build_body(inputs.width, targets)
        return Towers(inputs, body, width, targets, [self.sizes_of(each) for each in targets], self.layer_settings)

    def sizes_of(self, target: Target) -> list[int]:
        """Return the hidden layers of the label's tower."""
        return self.towers.get(target.name, self.tower_layer_sizes)

    def check_targets(self, targets: list[Target]) -> None:
        """Raise ConfigError if the model cannot learn these labels."""
        names = [target.name for target in heads_of(targets)]
        if unknown := [name for name in self.towers if name not in names]:
            raise ConfigError(
                f"model.towers names {unknown[0]!r}, which is not a "
                f"label{did_you_mean(unknown[0], names)}; there are {', '.join(names)}"
            )

    def build_body(self, width: int, targets: list[Target]) -> tuple[nn.Module, int]:
        """Return a module that maps inputs [B, width] to one tensor per target, and the width of a
        tensor.
        """
        raise NotImplementedError(f"{type(self).__name__} has no build_body()")
