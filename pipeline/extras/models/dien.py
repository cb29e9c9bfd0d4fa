"""Define DIEN: how an interest develops along a sequence, as far as it concerns the target (stdlib only;
layers import torch).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.embeddings.table import Table
from pipeline.extras.models.histories import HistoryConfig
from pipeline.models.checks import dims_of_features
from pipeline.runtime.errors import check_at_least

if TYPE_CHECKING:
    from torch import nn

    from pipeline.extras.models.layers.history import HistoryInputs


@register("model", "dien")
@dataclass
class DIENConfig(HistoryConfig):
    """Configure the deep interest evolution network (arXiv 1809.03672).

    A GRU reads the sequence. A second one (AUGRU) reads its states and moves only as far as each
    state concerns the target. auxiliary_weight: of the loss that predicts each id of a sequence
    from the state before it; 0 leaves it out. Its negatives are the same positions of the
    neighbouring row in the batch.
    """

    not_of_encoder = ("auxiliary_weight",)
    kind: str = "dien"
    activation: str = "dice"
    auxiliary_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("model.auxiliary_weight", self.auxiliary_weight, 0.0)

    @property
    def task(self) -> str:
        return "interest_evolution" if self.auxiliary_weight else "click"

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.extras.models.layers.interest_evolution import EvolutionArch, EvolutionModel, InterestEvolution
        from pipeline.models.layers.mlp import MLP

        if not self.auxiliary_weight:
            return super().build(tables, num_dense_features)
        others = [name for name in dims_of_features(tables) if name not in self.sequences]
        inputs, encoder, width = self.build_history(tables, others)
        assert isinstance(encoder, InterestEvolution)
        width += inputs.other_width + num_dense_features
        layers = MLP(width, self.hidden_layer_sizes, self.layer_settings, out_features=1)
        return EvolutionModel(build_embeddings(tables), inputs, EvolutionArch(encoder, layers))

    def build_encoder(self, inputs: HistoryInputs, num_positions: int) -> tuple[nn.Module, int]:
        from pipeline.extras.models.layers.interest_evolution import InterestEvolution

        return InterestEvolution(inputs.target_width, inputs.row_width), inputs.row_width
