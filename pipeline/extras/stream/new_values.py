"""Give ids to values of a stream that are not in the vocabularies of its data set.

An unknown value in batch n may be sampled to get an id. From batch n + 1 on it has the next free
row of its table. A step stores the values that its next batch is encoded with in a separate file,
so that a resumed training gives every value its previous row. Which values get an id depends only
on the rows of the batches, so reading them again gives the same ids.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.data.raw.hashing import hash_text
from pipeline.data.read.endless import Known, Values


@dataclass(frozen=True)
class TableCapacity:
    """The free ids of a vocabulary for new values: from `first` up to, but not including, `end`,
    the number of rows of its table.
    """

    table: str
    first: int
    end: int
    may_grow: bool = True


class NewValues:
    """The new values of one run.

    One thread adds values, and another thread calls known_to(). `capacities`: vocabulary -> free
    ids.
    """

    def __init__(self, capacities: Mapping[str, TableCapacity], admit_probability: float) -> None:
        self.capacities, self._probability = dict(capacities), admit_probability
        self._values: Values = {name: [] for name in capacities}
        # (batch, number of values added to each vocabulary)
        self._recent: deque[tuple[int, dict[str, int]]] = deque()
        self._waiting: tuple[int, Values] = (0, {})  # the batch from which they count
        self._lock = threading.Lock()

    def restore(self, batch: int, known: Known) -> None:
        """Restore the new values that a step has stored for batch `batch`."""
        with self._lock:
            self._recent.clear()
            self._values = {name: list(known.values.get(name, ())) for name in {**self.capacities, **known.values}}
            self._waiting = (batch, known.waiting)

    @property
    def values(self) -> Values:
        return self._values

    @property
    def count(self) -> int:
        return sum(map(len, self._values.values()))

    def admit(self, batch: int, unknown: Mapping[str, set[str]]) -> tuple[Values, set[str]]:
        """Return the values that get ids from batch `batch` on, and the tables without a free row
        for a sampled value.

        unknown: values of the previous batch.
        """
        (since, waiting), added, still = self._waiting, Values(), Values()
        waiting = waiting if since == batch else {}
        for name in sorted({*unknown, *waiting} & self.capacities.keys()):
            capacity = self.capacities[name]
            drawn = [*waiting.get(name, ()), *self._drawn(batch, sorted(unknown.get(name, ())))]
            free = max(0, capacity.end - capacity.first - len(self._values[name]))
            if drawn[free:] and capacity.may_grow:
                still[name] = drawn[free:]
            if drawn[:free]:
                added[name] = drawn[:free]
        self.add(batch, added)
        self._waiting = (batch, still)
        return added, {self.capacities[name].table for name in still}

    def _drawn(self, batch: int, values: list[str]) -> list[str]:
        if self._probability >= 1.0:
            return values
        draws = hash_text(pa.array(values, pa.large_string()), batch + 1) / np.float64(2**64)
        return [value for value, draw in zip(values, draws.tolist(), strict=True) if draw < self._probability]

    def add(self, batch: int, added: Mapping[str, Sequence[str]]) -> None:
        """Add values from batch `batch` on."""
        if not added:
            return
        with self._lock:
            self._recent.append((batch, {name: len(values) for name, values in added.items()}))
            for name, values in added.items():
                self._values[name].extend(values)

    def known_to(self, batch: int) -> Known:
        """Return the values that batch `batch` is encoded with. Values for earlier batches are forgotten."""
        with self._lock:
            while self._recent and self._recent[0][0] <= batch:
                self._recent.popleft()
            later: dict[str, int] = {}
            for _, counts in self._recent:
                for name, count in counts.items():
                    later[name] = later.get(name, 0) + count
            values = {name: own[: len(own) - later.get(name, 0)] for name, own in self._values.items() if own}
            since, waiting = self._waiting
            return Known(values, waiting if since == batch else {})
