"""Define PLE: levels of shared experts and of separate experts for each label (stdlib only; layers
import torch).
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


@register("model", "ple")
@dataclass
class PLEConfig(TowersConfig):
    """Configure progressive layered extraction (Tang et al., RecSys 2020). num_levels=1 is CGC
    (customized gate control).

    Each level has `num_own_experts` experts for each label and `num_shared_experts` shared experts.
    An expert is an MLP of `expert_layer_sizes` units.
    """

    kind: str = "ple"
    num_levels: int = 2
    num_own_experts: int = 1
    num_shared_experts: int = 2
    expert_layer_sizes: list[int] = field(default_factory=lambda: [128])

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_levels", "num_own_experts", "num_shared_experts"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        check_layer_sizes("model.expert_layer_sizes", self.expert_layer_sizes)

    def build_body(self, width: int, targets: list[Target]) -> tuple[nn.Module, int]:
        from pipeline.extras.models.layers.towers import ExtractionLevel, ProgressiveExtraction

        sizes = self.expert_layer_sizes
        levels = [
            ExtractionLevel(
                width if number == 0 else sizes[-1],
                sizes,
                len(targets),
                self.num_own_experts,
                self.num_shared_experts,
                number == self.num_levels - 1,
                self.layer_settings,
            )
            for number in range(self.num_levels)
        ]
        return ProgressiveExtraction(levels, len(targets)), sizes[-1]
