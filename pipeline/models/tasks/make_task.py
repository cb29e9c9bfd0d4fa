"""Turn a model config and its model into what training calls: a task with its guarded loss."""

from __future__ import annotations

from torch import nn

from pipeline.config.model import ModelConfig
from pipeline.embeddings.table import Table
from pipeline.models.tasks.click import CTRTask
from pipeline.models.tasks.retrieval import InBatchLoss, RetrievalTask
from pipeline.models.user_item import TwoTowerConfig

Task = CTRTask | RetrievalTask


def make_task(
    config: ModelConfig,
    model: nn.Module,
    tables: list[Table],
    *,
    precision: str = "fp32",
    max_non_finite_in_a_row: int = 0,
    loss_scale: float = 1.0,
) -> Task:
    """Retrieval for a two-tower model, click-through rate for all others. `model` is build_model's for the same config."""
    if not isinstance(config, TwoTowerConfig):
        return CTRTask(model, precision, max_non_finite_in_a_row, loss_scale)
    item = config.item_features[0]
    frequencies = None
    if config.log_q_correction:
        frequencies = next(table.frequencies for table in tables if item in table.feature_names)
    loss = InBatchLoss(item, config.temperature, frequencies, max_non_finite_in_a_row, loss_scale)
    return RetrievalTask(model, loss, config.recall_at, precision)
