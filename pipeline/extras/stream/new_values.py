"""Give ids to values that a stream brings and the vocabularies of its data set lack.

A value that batch n holds and nobody knows is drawn for an id; from batch n + 1 on it has the next free row of its table. A step holds
the values that its next batch is encoded with, as a file of its own, so that a training that goes on gives every value the row that it had.
Which values get an id depends on the rows of the batches alone: read once more, they give the same ids.
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
    """Ids of a vocabulary for new values: from `first` up to the rows of its table, `end`."""

    table: str
    first: int
    end: int
    may_grow: bool = True


class NewValues:
    """Of one run; `capacities` by vocabulary. Values are added in one thread, and known_to() is called in another."""

    def __init__(self, capacities: Mapping[str, TableCapacity], admit_probability: float) -> None:
        self.capacities, self._probability = dict(capacities), admit_probability
        self._values: Values = {name: [] for name in capacities}
        self._recent: deque[tuple[int, dict[str, int]]] = deque()  # (batch, how many values each vocabulary has gained)
        self._waiting: tuple[int, Values] = (0, {})  # from which batch on
        self._lock = threading.Lock()

    def restore(self, batch: int, known: Known) -> None:
        """To what a step keeps of batch `batch`."""
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
        """Of the `unknown` values of the batch before, those that have ids from batch `batch` on; and the tables that must
        grow, for they have no row for one that was drawn."""
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
        """From batch `batch` on."""
        if not added:
            return
        with self._lock:
            self._recent.append((batch, {name: len(values) for name, values in added.items()}))
            for name, values in added.items():
                self._values[name].extend(values)

    def known_to(self, batch: int) -> Known:
        """What batch `batch` is encoded with; no earlier one is asked for any more."""
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
