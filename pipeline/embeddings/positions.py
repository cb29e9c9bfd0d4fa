"""Give each position of a sequence a feature of its own, so that its lookup is one of bags with one id at most (stdlib only).

To the planner, to sharding, to optimizers, to checkpoints and to quantization a sequence's table is then one as all others,
and the target feature may share it. The ADR "Sequences by position" says what that costs beside TorchRec's
EmbeddingCollection.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.embeddings.table import Positions, Table

# How many ids a sequence has is two numbers, count // 128 and count % 128: bf16 holds either exactly, as it does not 257.
COUNT_COLUMNS, COUNT_UNIT = 2, 128


def position_features(positions: Positions) -> list[str]:
    """The features that a table embeds in place of the sequence, oldest position first."""
    return [f"{positions.feature}__{number}" for number in range(positions.num_positions)]


def by_position(table: Table) -> Table:
    """The table with a feature for each position of its sequences; a table without sequences as it is."""
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
    """Columns of what a model is given of a feature: a sequence's rows one after the other, and how many there are."""
    for positions in table.positions:
        if positions.feature == feature:
            return positions.num_positions * table.embedding_dim + COUNT_COLUMNS
    return table.embedding_dim
