"""Define DIN: a weighted sum of a sequence, with a learnt weight for each position (stdlib only;
layers import torch).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipeline.config.model import ACTIVATIONS, LayerSettings, SequenceInput
from pipeline.config.registry import register
from pipeline.extras.models.histories import HistoryConfig
from pipeline.models.checks import check_layer_sizes
from pipeline.runtime.errors import ConfigError, check_choice, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from pipeline.extras.models.layers.history import HistoryInputs


@register("model", "din")
@dataclass
class DINConfig(HistoryConfig):
    """Configure the deep interest network (arXiv 1706.06978).

    attention_*: settings of the attention unit. As in the paper, its weights are not normalized by
    a softmax by default. search: one of `sequences`. The model then reads only the positions with
    the target's id, at most the newest num_positions of them. This is the hard search of SIM (arXiv
    2006.05639) by category: the data keep a long history, and the model reads a short one.
    """

    kind: str = "din"
    activation: str = "dice"
    attention_layer_sizes: list[int] = field(default_factory=lambda: [80, 40])
    attention_activation: str = "dice"
    attention_softmax: bool = False
    search: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.attention_layer_sizes", self.attention_layer_sizes)
        check_choice("model.attention_activation", self.attention_activation, ACTIVATIONS)
        searchable = self.sequences[: len(self.targets)]
        if self.search is not None and self.search not in searchable:
            raise ConfigError(
                f"model.search={self.search!r} is not a sequence with a "
                f"target{did_you_mean(self.search, searchable)}; name one of "
                f"{', '.join(searchable)}"
            )

    @property
    def sequence_inputs(self) -> list[SequenceInput]:
        read = super().sequence_inputs
        if self.search is None:
            return read
        target = self.targets[self.sequences.index(self.search)]
        return [replace(each, search_in=self.search, search_for=target) for each in read]

    def build_encoder(self, inputs: HistoryInputs, num_positions: int) -> tuple[nn.Module, int]:
        from pipeline.extras.models.layers.target_attention import TargetAttention

        settings = LayerSettings(self.attention_activation)
        unit = TargetAttention(
            inputs.target_width, inputs.row_width, self.attention_layer_sizes, settings, self.attention_softmax
        )
        return unit, inputs.row_width
