"""Define the loss of ESMM: clicks, and clicks that convert, over all impressions (Ma et al., SIGIR
2018, section 2.2).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.data.targets import Target
from pipeline.embeddings.table import Table
from pipeline.models.tasks.labels import LabelsTask


@register("task", "esmm")
class ESMMTask(LabelsTask):
    """Compute the cross-entropy of the click, and of (click * conversion) with the product of both
    probabilities.

    Both losses use all rows. The mask of the conversion only selects the rows of its metrics. A
    config may have `inverse_propensity` and `propensity_floor` (extras/models/esmm.py).
    """

    def __init__(self, config: ModelConfig, tables: list[Table], targets: list[Target]) -> None:
        super().__init__(config, tables, targets)
        self._conversion = next(number for number, target in enumerate(targets) if target.mask)
        self._click = 1 - self._conversion
        self._inverse_propensity = getattr(config, "inverse_propensity", 0.0)
        self._propensity_floor = getattr(config, "propensity_floor", 0.0)

    def losses_of_targets(
        self, outputs: list[torch.Tensor], labels: torch.Tensor, weights: torch.Tensor
    ) -> list[torch.Tensor]:
        click, conversion = outputs[self._click][:, 0], outputs[self._conversion][:, 0]
        rows, clicked = weights[:, self._click], labels[:, self._click]
        converted = clicked * labels[:, self._conversion]
        # log of the product; below: log of 1 minus the product
        both = F.logsigmoid(click) + F.logsigmoid(conversion)
        neither = torch.stack([-click, -conversion, -click - conversion], dim=1).logsumexp(dim=1) + both
        losses = {
            self._click: F.binary_cross_entropy_with_logits(click, clicked, reduction="none"),
            self._conversion: -(converted * both + (1.0 - converted) * neither),
        }
        if self._inverse_propensity:
            chance = torch.sigmoid(click.detach()).clamp(min=self._propensity_floor)
            own = F.binary_cross_entropy_with_logits(conversion, converted, reduction="none")
            losses[self._conversion] += self._inverse_propensity * clicked / chance * own
        return [self.targets[number].weight * rows * losses[number] for number in range(2)]
