"""Define what all model configs have in common (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from pipeline.embeddings.table import Table

CLICK_METRICS = ("ne", "auc", "logloss")


@dataclass
class ModelConfig:
    """Base of all model configs; a group file under conf/model picks the subclass, `kind` names it in saved files."""

    kind: str = "???"

    @property
    def task(self) -> str:
        """The name of its loss and measures among the registered tasks."""
        return "click"

    @property
    def metrics(self) -> tuple[str, ...]:
        """What an evaluation measures that early stopping and checkpoints can go by; the first where none is chosen.

        auc, mrr and recall_at_<k> are the better the higher, all others the lower.
        """
        return CLICK_METRICS

    @property
    def used_features(self) -> list[str] | None:
        """The sparse features that the model reads; None: all of the data set's."""
        return None

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        """Raises ConfigError when the model cannot be built on these tables."""

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        """The model, with tables on the meta device; import torch in here, for a config is composed without it.

        `tables` are those of the features that the model reads. Its forward(dense_features [batch, num_dense_features],
        sparse_features: KeyedJaggedTensor) gives logits [batch, 1].
        """
        raise NotImplementedError(f"{type(self).__name__} has no build()")


def used_tables(config: ModelConfig, tables: list[Table]) -> list[Table]:
    """Those of the features that the model reads: no other takes memory."""
    used = config.used_features
    return tables if used is None else [table for table in tables if set(used) & set(table.feature_names)]
