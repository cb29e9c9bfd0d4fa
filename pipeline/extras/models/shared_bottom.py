"""Define the shared bottom: one MLP over all features, and a tower for each label (stdlib only;
layers import torch).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.extras.models.towers import TowersConfig
from pipeline.models.checks import check_layer_sizes

if TYPE_CHECKING:
    from torch import nn

    from pipeline.data.targets import Target


@register("model", "shared_bottom")
@dataclass
class SharedBottomConfig(TowersConfig):
    """Configure multitask learning by hard sharing (Caruana 1997): all labels read the same hidden
    layers.
    """

    kind: str = "shared_bottom"
    hidden_layer_sizes: list[int] = field(default_factory=lambda: [256, 128])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.hidden_layer_sizes", self.hidden_layer_sizes)

    def build_body(self, width: int, targets: list[Target]) -> tuple[nn.Module, int]:
        from pipeline.extras.models.layers.towers import SharedBottom
        from pipeline.models.layers.mlp import MLP

        layers = MLP(width, self.hidden_layer_sizes, self.layer_settings)
        return SharedBottom(layers, len(targets)), self.hidden_layer_sizes[-1]
