"""Define PEPNet: gates computed from the domain and from the user scale the inputs and layers of each
label (stdlib only; layers import torch).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.embeddings.table import Table
from pipeline.extras.models.roles import check_features
from pipeline.extras.models.towers import TowersConfig
from pipeline.runtime.errors import ConfigError, check_at_least

if TYPE_CHECKING:
    from torch import nn

    from pipeline.data.targets import Target
    from pipeline.models.layers.features import FeatureInputs


@register("model", "pepnet")
@dataclass
class PEPNetConfig(TowersConfig):
    """Configure the parameter and embedding personalized network (arXiv 2302.01115).

    domain_features: such as the scene or the tab; a gate of them scales all inputs (EPNet).
    prior_features: such as user and item; gates of them scale the input of every layer of every
    label (PPNet). With one of both lists empty, only the other gates are used. gate_size: the
    hidden units of a gate. tower_layer_sizes: the hidden layers of each label.
    """

    kind: str = "pepnet"
    domain_features: list[str] = field(default_factory=list)
    prior_features: list[str] = field(default_factory=list)
    gate_size: int = 64
    tower_layer_sizes: list[int] = field(default_factory=lambda: [256, 128])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("model.gate_size", self.gate_size, 1)

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        super().check_tables(tables, num_dense_features)
        if not self.domain_features and not self.prior_features:
            raise ConfigError(
                "model.domain_features and model.prior_features are both empty, so model=pepnet has no gates; name the "
                "features of the domain or of the user and item, or use model=shared_bottom"
            )
        for key in ("domain_features", "prior_features"):
            check_features(((f"model.{key}", name) for name in getattr(self, key)), tables)

    def build_towers(self, inputs: FeatureInputs, names: list[str], dim: int, targets: list[Target]) -> nn.Module:
        from pipeline.extras.models.layers.gated_towers import GatedTower, GatedTowers, GateUnit

        domain, prior = ([names.index(name) for name in own] for own in (self.domain_features, self.prior_features))
        towers = {}
        for target in targets:
            sizes = self.sizes_of(target)
            widths = [inputs.width, *sizes] if prior else []
            gates = [GateUnit(len(prior) * dim + inputs.width, self.gate_size, width) for width in widths]
            towers[target.name] = GatedTower(inputs.width, sizes, target, self.layer_settings, gates)
        gate = GateUnit(len(domain) * dim + inputs.width, self.gate_size, inputs.width) if domain else None
        return GatedTowers(inputs, domain, gate, prior, towers)
