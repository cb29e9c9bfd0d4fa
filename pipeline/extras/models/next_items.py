"""Define the base of models that predict the next item of a sequence (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipeline.config.model import SequenceInput
from pipeline.config.tables import InitConfig
from pipeline.embeddings.table import Table
from pipeline.extras.models.retrievers import RetrieverConfig
from pipeline.extras.models.roles import check_features
from pipeline.models.checks import dims_of_features
from pipeline.runtime.errors import ConfigError, check_at_least, check_below_one

if TYPE_CHECKING:
    from torch import nn


@dataclass
class NextItemConfig(RetrieverConfig):
    """Configure a retriever whose user vector is computed from the history by blocks of causal self
    attention. An item's vector is its row of the table that the history uses.

    every_position: predict each item of the history from the items before it, in addition to the
    row's item, so that one row for each user is enough; false: only the row's item, for data with a
    row for each click. exclude_history: evaluations do not rank the items of the row's history.
    """

    learnt_positions: ClassVar[bool] = True
    init: str = "xavier_normal"
    history: str = "history"
    item_feature: str = "item_id"
    num_positions: int | None = None
    num_heads: int = 2
    num_blocks: int = 2
    dropout: float = 0.2
    every_position: bool = True
    exclude_history: bool = True
    temperature: float = 0.07

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_heads", "num_blocks"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        check_at_least("model.num_positions", self.num_positions, 1, allow_none=True)
        check_below_one("model.dropout", self.dropout)
        if self.negatives.hard.count:
            raise ConfigError(
                f"model.negatives.hard.count={self.negatives.hard.count} needs model=two_tower; remove it for model={self.kind}"
            )

    @property
    def user_features(self) -> list[str]:
        return [self.history]

    @property
    def item_features(self) -> list[str]:
        return [self.item_feature]

    @property
    def used_features(self) -> list[str]:
        return [self.item_feature, self.history]

    @property
    def sequence_inputs(self) -> list[SequenceInput]:
        return [SequenceInput(self.history, self.num_positions)]

    @property
    def table_init(self) -> InitConfig:
        return InitConfig("normal", 0.02)

    @property
    def task(self) -> str:
        return "next_item"

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        check_features([("model.history", self.history), ("model.item_feature", self.item_feature)], tables)
        table = self.check_items(self.item_feature, tables, shared=True)
        if self.history not in table.feature_names:
            raise ConfigError(
                f"model.history={self.history} has another table than model.item_feature={self.item_feature}: prepare it "
                f"with data.columns.sequence.{self.history}.shares={self.item_feature}"
            )
        if table.embedding_dim % self.num_heads:
            raise ConfigError(
                f"tables.{table.config_name}.embedding_dim={table.embedding_dim} is not a multiple of "
                f"model.num_heads={self.num_heads}; choose another"
            )

    def build_block(self, dim: int, num_positions: int) -> nn.Module:
        """Return a block that takes (values [B, L, dim], ages [B, L], seen [B, L, L])."""
        raise NotImplementedError(f"{type(self).__name__} has no build_block()")

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.extras.models.layers.next_item import NextItem, NextItemLayers

        dim = dims_of_features(tables)[self.item_feature]
        num_positions = next(each.num_positions for table in tables for each in table.positions)
        layers = NextItemLayers(
            self.history,
            self.item_feature,
            dim,
            num_positions,
            [self.build_block(dim, num_positions) for _ in range(self.num_blocks)],
            self.learnt_positions,
            self.normalize,
            self.dropout,
        )
        return NextItem(build_embeddings(tables), layers)
