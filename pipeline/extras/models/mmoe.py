"""Define MMoE: experts that all labels share, and a gate over them for each label (stdlib only;
layers import torch).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.extras.models.towers import TowersConfig
from pipeline.models.checks import check_layer_sizes
from pipeline.runtime.errors import check_at_least

if TYPE_CHECKING:
    from torch import nn

    from pipeline.data.targets import Target


@register("model", "mmoe")
@dataclass
class MMoEConfig(TowersConfig):
    """Configure multi-gate mixture-of-experts (Ma et al., KDD 2018). expert_layer_sizes: the units
    of each expert's MLP.
    """

    kind: str = "mmoe"
    num_experts: int = 4
    expert_layer_sizes: list[int] = field(default_factory=lambda: [256, 128])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("model.num_experts", self.num_experts, 1)
        check_layer_sizes("model.expert_layer_sizes", self.expert_layer_sizes)

    def build_body(self, width: int, targets: list[Target]) -> tuple[nn.Module, int]:
        from pipeline.extras.models.layers.towers import MixtureOfExperts

        sizes = self.expert_layer_sizes
        return MixtureOfExperts(width, self.num_experts, sizes, len(targets), self.layer_settings), sizes[-1]
