"""Define the base of models that read one behaviour sequence for a target (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pipeline.config.model import LayersConfig, SequenceInput
from pipeline.config.tables import InitConfig
from pipeline.embeddings.table import Table
from pipeline.extras.models.roles import check_features
from pipeline.models.checks import check_layer_sizes, dims_of_features
from pipeline.runtime.errors import ConfigError, check_at_least, check_below_one

if TYPE_CHECKING:
    from torch import nn

    from pipeline.extras.models.layers.history import HistoryInputs


@dataclass
class HistoryConfig(LayersConfig):
    """Configure a model that reads a sequence position by position and passes the result to an MLP
    with all other features.

    sequences: the behaviour first, then its side information. targets: for the first sequences, in
    their order, the feature of the current row with the same meaning (the item for a sequence of
    items, the item's category for a sequence of categories). num_positions: read only this many
    newest ids; None: all ids that the data keep. Other sequences of the data set are pooled.
    """

    not_of_encoder: ClassVar[tuple[str, ...]] = ()  # settings that model=sequence_encoders cannot use
    init: str = "xavier_normal"
    sequences: list[str] = field(default_factory=lambda: ["history"])
    targets: list[str] = field(default_factory=lambda: ["item_id"])
    num_positions: int | None = None
    hidden_layer_sizes: list[int] = field(default_factory=lambda: [200, 80])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.hidden_layer_sizes", self.hidden_layer_sizes)
        check_at_least("model.num_positions", self.num_positions, 1, allow_none=True)
        if not 0 < len(self.targets) <= len(self.sequences):
            raise ConfigError(
                f"model.targets has {len(self.targets)} features and model.sequences {len(self.sequences)}: name a target for "
                "the first sequence at least, and none without its sequence"
            )

    @property
    def table_init(self) -> InitConfig:
        return InitConfig("normal", 0.01)

    @property
    def sequence_inputs(self) -> list[SequenceInput]:
        return [SequenceInput(name, self.num_positions) for name in self.sequences]

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        roles = [("model.sequences", name) for name in self.sequences]
        check_features([*roles, *(("model.targets", name) for name in self.targets)], tables)
        dims = dims_of_features(tables)
        counts = {each.feature: each.num_positions for table in tables for each in table.positions}
        for sequence, target in zip(self.sequences, self.targets, strict=False):
            if dims[sequence] != dims[target]:
                raise ConfigError(
                    f"model.sequences compares {sequence!r} of {dims[sequence]} columns with {target!r} of {dims[target]}; give "
                    f"their tables one embedding_dim, or prepare {sequence!r} with shares={target}"
                )
        for name in self.sequences[1:]:
            if counts[name] != counts[self.sequences[0]]:
                raise ConfigError(
                    f"model.sequences has {counts[self.sequences[0]]} positions of {self.sequences[0]!r} and {counts[name]} of "
                    f"{name!r}: prepare {name!r} with beside={self.sequences[0]}"
                )

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.extras.models.layers.history import HistoryModel
        from pipeline.models.layers.mlp import MLP

        others = [name for name in dims_of_features(tables) if name not in self.sequences]
        inputs, encoder, width = self.build_history(tables, others)
        width += inputs.other_width + num_dense_features
        layers = MLP(width, self.hidden_layer_sizes, self.layer_settings, out_features=1)
        return HistoryModel(build_embeddings(tables), inputs, encoder, layers)

    def build_history(self, tables: list[Table], others: list[str]) -> tuple[HistoryInputs, nn.Module, int]:
        """Return the encoder's inputs with the features `others`, the encoder, and its output
        width.
        """
        from pipeline.extras.models.layers.history import HistoryInputs

        inputs = HistoryInputs(self.sequences, self.targets, others, dims_of_features(tables))
        positions = next(each for table in tables for each in table.positions if each.feature == self.sequences[0])
        return inputs, *self.build_encoder(inputs, positions.num_positions)

    def build_encoder(self, inputs: HistoryInputs, num_positions: int) -> tuple[nn.Module, int]:
        """Return a module and its output width.

        The module maps target [B, Q], rows [B, num_positions, K] and mask [B, num_positions] to [B,
        width].
        """
        raise NotImplementedError(f"{type(self).__name__} has no build_encoder()")


@dataclass
class SelfAttentionConfig(HistoryConfig):
    """Configure a model with blocks of self attention, `attention_dim` wide, over the sequence and
    the target after it.
    """

    learnt_positions: ClassVar[bool] = True
    attention_dim: int = 32
    num_heads: int = 2
    num_blocks: int = 1
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("attention_dim", "num_heads", "num_blocks"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        check_below_one("model.attention_dropout", self.attention_dropout)
        if self.attention_dim % self.num_heads:
            raise ConfigError(
                f"model.attention_dim={self.attention_dim} is not a multiple of "
                f"model.num_heads={self.num_heads}; choose another"
            )

    def build_block(self, num_positions: int) -> nn.Module:
        """Return a block that takes (values [B, L, attention_dim], ages [B, L], seen [B, L, L])."""
        raise NotImplementedError(f"{type(self).__name__} has no build_block()")

    def build_encoder(self, inputs: HistoryInputs, num_positions: int) -> tuple[nn.Module, int]:
        from pipeline.extras.models.layers.self_attention import WithTarget

        blocks = [self.build_block(num_positions) for _ in range(self.num_blocks)]
        encoder = WithTarget(
            inputs.target_width, inputs.row_width, num_positions, self.attention_dim, blocks, self.learnt_positions
        )
        return encoder, self.attention_dim
