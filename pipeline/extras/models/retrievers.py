"""Define the base of models that find items by the dot product of a user's and an item's vector (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config.model import ModelConfig
from pipeline.embeddings.table import Table
from pipeline.extras.models.negatives import NegativesConfig
from pipeline.models.checks import check_layer_sizes
from pipeline.runtime.errors import ConfigError, check_above, check_at_least


@dataclass
class RetrieverConfig(ModelConfig):
    """Configure how items are ranked and which negatives a clicked row has.

    Clicked rows are the positives. Their negatives are the items of the global batch, on all ranks,
    or items of the corpus (`negatives`). log_q_correction: subtract each item's log frequency among
    the negatives from its score, because frequent items are frequent negatives. hard_negatives: how
    many negatives with the highest scores are used in a row's loss; None: all.
    """

    temperature: float = 0.1
    normalize: bool = True
    log_q_correction: bool = True
    negatives: NegativesConfig = field(default_factory=NegativesConfig)
    hard_negatives: int | None = None
    recall_at: list[int] = field(default_factory=lambda: [10, 100])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above("model.temperature", self.temperature, 0.0)
        check_at_least("model.hard_negatives", self.hard_negatives, 1, allow_none=True)
        check_layer_sizes("model.recall_at", self.recall_at)

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*(f"recall_at_{k}" for k in self.recall_at), *(f"ndcg_at_{k}" for k in self.recall_at), "mrr")

    def check_items(self, item: str, tables: list[Table], shared: bool = False) -> Table:
        """Return the table of the items. Raise ConfigError if its rows cannot be ranked or sampled.

        shared: the table may have other features, such as a user's history.
        """
        table = next(table for table in tables if item in table.feature_names)
        if table.compression is not None:
            raise ConfigError(
                f"tables.{table.config_name}.compression={table.compression.kind}, but the ids of {item!r} name the items of the "
                "catalogue; leave that table uncompressed, or name another feature for the items"
            )
        self.negatives.check_tables(item, tables, self.log_q_correction, shared)
        return table
