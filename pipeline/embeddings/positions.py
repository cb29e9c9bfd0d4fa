"""Give each position of a sequence its own feature, with at most one id per bag (stdlib only).

Planner, sharding, optimizers, checkpoints and quantization then treat a sequence's table like other
tables, and the target feature may share it. The ADR "Sequences by position" compares the cost with
TorchRec's EmbeddingCollection.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.embeddings.table import Positions, Table

# The number of ids is stored as two numbers, count // 128 and count % 128, because bf16 represents
# both exactly, but not 257.
COUNT_COLUMNS, COUNT_UNIT = 2, 128


def position_features(positions: Positions) -> list[str]:
    """Return the features that a table embeds instead of the sequence, oldest position first."""
    return [f"{positions.feature}__{number}" for number in range(positions.num_positions)]


def by_position(table: Table) -> Table:
    """Return the table with a feature for each position of its sequences.

    Without sequences it is unchanged.
    """
    if not table.positions:
        return table
    read = {positions.feature: positions for positions in table.positions}
    names: list[str] = []
    factors: list[float] = []
    max_ids: list[int | None] = []
    padding = 0.0
    limits = table.max_ids or [1] * len(table.feature_names)
    for feature, factor, limit in zip(table.feature_names, table.pooling_factors, limits, strict=True):
        if feature not in read:
            names, factors, max_ids = [*names, feature], [*factors, factor], [*max_ids, limit]
            continue
        count = read[feature].num_positions
        names += position_features(read[feature])
        factors += [min(1.0, factor / count)] * count
        max_ids += [1] * count
        padding += max(0.0, count - factor)
    return replace(table, feature_names=names, pooling_factors=factors, max_ids=max_ids, positions=[], padding=padding)


def width_of(table: Table, feature: str) -> int:
    """Return the number of columns that a model gets for a feature: a sequence's rows, then the
    number of ids."""
    for positions in table.positions:
        if positions.feature == feature:
            return positions.num_positions * table.embedding_dim + COUNT_COLUMNS
    return table.embedding_dim
