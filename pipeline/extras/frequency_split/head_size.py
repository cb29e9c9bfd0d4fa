"""Count the bytes that a table sends in a step, by the number of its replicated rows (stdlib only).

As in arXiv 2411.01611: looking up a row of another rank sends its id there, the row back, and its
gradient there. A replicated row sends none of these. But in every step the gradient of a replicated
row is part of an all-reduce, also if no id used the row. So the head grows as long as one more row
saves more bytes than it costs.

TorchRec sends one pooled row per bag, not per lookup. So the bytes of a bag are saved only if none
of its ids is cold (embeddings/id_splitter.py). The ids of a bag are assumed to be independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.data.dataset import FrequencyCurve, SparseFeature
from pipeline.embeddings.row_frequencies import share_of

ID_BYTES = 8
LENGTH_BYTES = 4
GRADIENT_BYTES = 4
BISECTIONS = 60


@dataclass(frozen=True)
class BagShape:
    """Describe the bags of a feature: a sample has `num_ids` ids distributed by `curve`, and
    `num_even` ids distributed uniformly.

    num_ids is a mean; the bags have one of the two nearest integers.
    """

    curve: FrequencyCurve
    num_ids: float
    num_even: int = 0

    @property
    def num_rows(self) -> int:
        return self.curve.ranks[-1]

    def cold_ids(self, head_rows: int) -> float:
        """Return the expected number of ids per sample on rows from `head_rows` on."""
        hot, even = self._shares(head_rows)
        return self.num_ids * (1 - hot) + self.num_even * (1 - even)

    def cold_bags(self, head_rows: int) -> float:
        """Return the share of samples with at least one id on rows from `head_rows` on."""
        hot, even = self._shares(head_rows)
        few = math.floor(self.num_ids)
        more = self.num_ids - few
        all_hot = (1 - more) * _power(hot, few) + more * _power(hot, few + 1)
        return 1 - all_hot * _power(even, self.num_even)

    def _shares(self, head_rows: int) -> tuple[float, float]:
        hot = share_of(self.curve, head_rows) if head_rows else 0.0
        return hot, min(1.0, head_rows / self.num_rows)


def _power(share: float, count: int) -> float:
    return share**count if count else 1.0


def bag_shapes(features: Sequence[SparseFeature], multi_hot: dict[str, int]) -> list[BagShape]:
    """Return the shapes of bags. multi_hot: features whose bags have one id from the data and
    additional uniform ids (data/read/multi_hot.py).
    """
    return [
        BagShape(feature.frequency_curve, 1.0, multi_hot[feature.name] - 1)
        if feature.name in multi_hot
        else BagShape(feature.frequency_curve, feature.mean_pooling_factor)
        for feature in features
    ]


@dataclass(frozen=True)
class Wire:
    """Describe how pooled rows are sent.

    `batch_size` is per rank; bytes are per number of a pooled row, and of its gradient.

    by_rows: the tail is split by rows, so every rank has a part of every bag. summed_twice: a
    reduce-scatter is an all-reduce whose result is mostly discarded, as in gloo;
    extras/frequency_split/variable_batches.py avoids it. column_shards: the number of shards that
    each get all ids.
    """

    world_size: int
    batch_size: int
    forward_bytes: float = 4.0
    backward_bytes: float = 4.0
    by_rows: bool = False
    summed_twice: bool = False
    column_shards: int = 1


@dataclass(frozen=True)
class StepBytes:
    """Hold the bytes that leave a rank in a step, as a mean over ranks.

    `head`: bytes of the all-reduce of the replicated rows' gradients.
    """

    ids: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    head: float = 0.0

    @property
    def total(self) -> float:
        return self.ids + self.forward + self.backward + self.head


@dataclass(frozen=True)
class HeadTable:
    """Hold the inputs for a table. `state_bytes`: bytes of optimizer state per row."""

    name: str
    num_embeddings: int
    embedding_dim: int
    bags: list[BagShape]
    state_bytes: int = 4

    def candidates(self) -> list[int]:
        """Return the head sizes to compare: no head, a head at each point of the curves, all rows.

        Between its points, a curve is only an estimate.
        """
        ranks = {rank for bag in self.bags for rank in bag.curve.ranks if rank < self.num_embeddings}
        return [0, *sorted(ranks), self.num_embeddings]

    def head_bytes(self, head_rows: int) -> float:
        """Return a rank's memory for the replicated rows: weights, gradient and optimizer state."""
        return head_rows * (2 * GRADIENT_BYTES * self.embedding_dim + self.state_bytes)

    def tail_bytes(self, head_rows: int, world_size: int) -> float:
        """Return a rank's memory for the remaining rows, which are divided evenly over ranks."""
        return (self.num_embeddings - head_rows) * (4 * self.embedding_dim + self.state_bytes) / world_size


def step_bytes(table: HeadTable, head_rows: int, wire: Wire) -> StepBytes:
    """Return the expected bytes. With 0 head rows there is no head, so every bag is sent."""
    # a rank keeps its part of what it sends to all ranks
    away = (wire.world_size - 1) / wire.world_size
    # In a ring, an all-reduce sends every number through a rank twice, except for the part that the
    # rank sums up.
    head = 2 * away * head_rows * table.embedding_dim * GRADIENT_BYTES
    if head_rows >= table.num_embeddings:
        return StepBytes(head=head)
    num_ids = num_bags = 0.0
    for bag in table.bags:
        num_ids += wire.batch_size * bag.cold_ids(head_rows)
        # Bags without a cold id share the first bag; empty bags fill up to a multiple of 8
        # (embeddings/id_splitter.py).
        num_bags += wire.batch_size * bag.cold_bags(head_rows) + 1 + (8 - 1) / 2 if head_rows else wire.batch_size
    copies = wire.world_size if wire.by_rows else 1
    numbers = num_bags * table.embedding_dim * copies
    return StepBytes(
        ids=away * wire.column_shards * (num_ids * ID_BYTES + num_bags * LENGTH_BYTES * copies),
        forward=away
        * numbers
        * wire.forward_bytes
        * (2 if wire.by_rows and wire.summed_twice and not head_rows else 1),
        backward=away * numbers * wire.backward_bytes,
        head=head,
    )


def choose_head_rows(
    tables: Sequence[HeadTable], wire_of: Callable[[HeadTable], Wire], room_bytes: float
) -> dict[str, int]:
    """Return the heads that send the fewest bytes and together need at most `room_bytes` of a rank,
    tails included.

    If the best heads do not fit, bisection finds a price per byte of memory at which heads fit. For
    concave curves this is the best choice, up to the last step of the bisection.
    """
    options = {
        table.name: [
            (
                rows,
                step_bytes(table, rows, wire_of(table)).total,
                table.head_bytes(rows) + table.tail_bytes(rows, wire_of(table).world_size),
            )
            for rows in table.candidates()
        ]
        for table in tables
    }

    def at(price: float) -> dict[str, tuple[int, float, float]]:
        return {
            name: min(of, key=lambda option: (option[1] + price * option[2], option[2])) for name, of in options.items()
        }

    def taken(chosen: dict[str, tuple[int, float, float]]) -> float:
        return sum(memory for _, _, memory in chosen.values())

    chosen = at(0.0)
    if taken(chosen) > room_bytes:
        low, high = 0.0, 1.0
        while taken(at(high)) > room_bytes and high < 1e12:
            high *= 4
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if taken(at(middle)) <= room_bytes else (middle, high)
        chosen = at(high)
    return {name: rows for name, (rows, _, _) in chosen.items()}
