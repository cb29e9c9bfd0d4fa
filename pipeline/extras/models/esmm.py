"""Define ESMM: learn conversions on all impressions, as the probability of a click times that of a
conversion after it (stdlib only; layers import torch).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.extras.models.towers import TowersConfig
from pipeline.models.checks import check_layer_sizes
from pipeline.runtime.errors import ConfigError, check_above, check_at_least

if TYPE_CHECKING:
    from torch import nn

    from pipeline.data.targets import Target


@register("model", "esmm")
@dataclass
class ESMMConfig(TowersConfig):
    """Configure the entire space multi-task model (Ma et al., SIGIR 2018): one label is a click,
    the other is a conversion that is masked without a click.

    The towers share the tables. The score of the conversion is its probability after a click. The
    loss uses its product with the probability of a click, which is the probability of a click that
    converts. hidden_layer_sizes: the layers of each tower, below tower_layer_sizes.

    inverse_propensity: the weight of a second conversion loss over clicked rows. Each row's loss is
    divided by the predicted probability of the click, so that clicked rows represent all
    impressions (ESCM2-IPS: Wang et al., SIGIR 2022, section 3.2). propensity_floor: the smallest
    probability to divide by.
    """

    kind: str = "esmm"
    hidden_layer_sizes: list[int] = field(default_factory=lambda: [256, 128])
    inverse_propensity: float = 0.0
    propensity_floor: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.hidden_layer_sizes", self.hidden_layer_sizes)
        check_at_least("model.inverse_propensity", self.inverse_propensity, 0.0)
        check_above("model.propensity_floor", self.propensity_floor, 0.0)

    @property
    def task(self) -> str:
        return "esmm"

    def check_targets(self, targets: list[Target]) -> None:
        super().check_targets(targets)
        kinds = {target.kind for target in targets}
        masks = {target.mask for target in targets}
        if len(targets) != 2 or kinds != {"binary"} or len(masks - {None}) != 1 or None not in masks:
            said = ", ".join(f"{each.name} ({each.kind}, mask {each.mask})" for each in targets)
            raise ConfigError(
                f"model=esmm learns two binary labels of which one masks the other, not {said}: set data.columns.labels, as in "
                "{click: {}, conversion: {mask: click}}"
            )

    def build_body(self, width: int, targets: list[Target]) -> tuple[nn.Module, int]:
        from pipeline.extras.models.layers.towers import OwnBottoms
        from pipeline.models.layers.mlp import MLP

        layers = [MLP(width, self.hidden_layer_sizes, self.layer_settings) for _ in targets]
        return OwnBottoms(layers), self.hidden_layer_sizes[-1]
