"""Split a batch's ids into ids of parts and positions of its tables, before they are sent.

The reader's thread does this in training. Serving uses the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.registry import from_extra
from pipeline.data.read.batch import keyed_jagged_tensor
from pipeline.data.read.streams import mix
from pipeline.embeddings.compression.kind import Bags, Split, compressed
from pipeline.embeddings.table import Table, position_features

SKIPPED = "tables.*.compression.skip_empty_bags"


class IdSplitter:
    """Convert, on the CPU, a KeyedJaggedTensor of features to a KeyedJaggedTensor of the features
    of parts and positions.

    Keys have the same order in every batch. Some of its features have ids whose rows dense
    parameters compute. skip_empty_bags: leave out empty bags of cold parts if ranks would otherwise
    send them.
    """

    def __init__(self, tables: Iterable[Table], *, skip_empty_bags: bool = False) -> None:
        tables = list(tables)
        kinds = [compressed(table) for table in tables]
        self._splits = {
            feature: kind.split(index)
            for kind in kinds
            if kind.table.compression is not None
            for index, feature in enumerate(kind.table.feature_names)
        }
        self._positions = {each.feature: each for table in tables for each in table.positions}
        self._order = _KeyOrder([name for kind in kinds for part in kind.parts() for name in part.feature_names])
        self._skipped = {name for kind in kinds for name in kind.often_empty_features()} if skip_empty_bags else set()

    @property
    def features(self) -> frozenset[str]:
        """Return the features whose ids are changed."""
        return frozenset({*self._splits, *self._positions})

    def __bool__(self) -> bool:
        """Return True if there is anything to split."""
        return bool(self._splits or self._positions)

    def __call__(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Split a batch. Raises ConfigError if a bag is too long for the compression."""
        if not self:
            return features
        keys: list[str] = []
        parts: list[Bags] = []
        bags = _bags_of(features)
        for key, own in bags.items():
            for name, part in self._split(key, own, bags):
                keys.append(name)
                parts.append(part)
        if self._positions:  # use the order of the lookups, which then copy nothing
            order = self._order(keys)
            keys, parts = [keys[number] for number in order], [parts[number] for number in order]
        split = keyed_jagged_tensor(
            keys,
            torch.from_numpy(np.concatenate([part.ids for part in parts])),
            torch.from_numpy(np.concatenate([part.lengths for part in parts])),
            features.stride(),
            [len(part.ids) for part in parts],
            None if features.weights_or_none() is None else torch.from_numpy(_weights_of(parts)),
        )
        if not self._skipped:
            return split
        leave_out: Callable[..., KeyedJaggedTensor] = from_extra("leave_out_empty_bags", SKIPPED)
        return leave_out(split, self._skipped)

    def _split(self, key: str, own: Bags, bags: dict[str, Bags]) -> Iterator[tuple[str, Bags]]:
        if key not in self._positions:
            yield from _parts_of(self._splits.get(key), key, own)
            return
        positions = self._positions[key]
        if positions.search_in is not None and positions.search_for is not None:
            own = matching(own, bags[positions.search_in], bags[positions.search_for])
        for name, part in zip(position_features(positions), newest(own, positions.num_positions), strict=True):
            yield from _parts_of(self._splits.get(name), name, part)


def _parts_of(split: Split | None, key: str, own: Bags) -> Iterator[tuple[str, Bags]]:
    return iter([(key, own)]) if split is None else split(own)


def _bags_of(features: KeyedJaggedTensor) -> dict[str, Bags]:
    values, begin, weights = features.values().numpy(), 0, features.weights_or_none()
    of_ids = None if weights is None else weights.numpy()
    lengths = features.lengths().numpy().reshape(-1, features.stride())
    found = {}
    for index, (key, count) in enumerate(zip(features.keys(), features.length_per_key(), strict=True)):
        ids = slice(begin, begin + count)
        found[key] = Bags(values[ids], lengths[index], None if of_ids is None else of_ids[ids])
        begin += count
    return found


def _weights_of(parts: list[Bags]) -> NDArray[np.float32]:
    """Return the weights of the ids of all parts. They are 1 for a part without weights."""
    return np.concatenate(
        [np.ones(len(part.ids), np.float32) if part.weights is None else part.weights for part in parts]
    )


def newest(bags: Bags, num_positions: int) -> Iterator[Bags]:
    """Yield the ids of all samples at the first position, then at the second position, and so on.

    Of longer lists only the last ids are kept. Shorter lists have no id at later positions.
    """
    lengths = bags.lengths.astype(np.int64)
    begins = np.cumsum(lengths) - lengths
    kept = np.minimum(lengths, num_positions)
    begins += lengths - kept
    if not num_positions:
        return
    present = np.arange(num_positions)[:, None] < kept
    ids = bags.ids[(begins + np.arange(num_positions)[:, None])[present]]
    ends = np.cumsum(present.sum(axis=1))
    for number, (own, end) in enumerate(zip(present.astype(np.int32), ends, strict=True)):
        yield Bags(ids[ends[number - 1] if number else 0 : end], own)


def matching(bags: Bags, searched: Bags, wanted: Bags) -> Bags:
    """Keep the ids of each list at the positions where `searched` has the single id of the sample in `wanted`."""
    targets: NDArray[np.int64] = np.full(len(wanted.lengths), -1, np.int64)
    has_one = wanted.lengths == 1
    targets[has_one] = wanted.ids[np.repeat(has_one, wanted.lengths)]
    samples = np.repeat(np.arange(len(bags.lengths)), bags.lengths)
    found = (searched.ids == targets[samples]) & (searched.ids != 0)  # id 0 is any unknown value
    lengths = np.bincount(samples[found], minlength=len(bags.lengths))
    return Bags(bags.ids[found], lengths.astype(np.int32))


class _KeyOrder:
    """Compute the order of the keys. Keys that no table looks up are last."""

    def __init__(self, wanted: list[str]) -> None:
        self._places = {name: place for place, name in enumerate(wanted)}
        self._known: tuple[list[str], list[int]] = ([], [])

    def __call__(self, keys: list[str]) -> list[int]:
        if keys != self._known[0]:
            last = len(self._places)
            order = sorted(range(len(keys)), key=lambda number: (self._places.get(keys[number], last), number))
            self._known = (keys, order)
        return self._known[1]


def hashed_to(num_rows: int, seed: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each id a seeded hash below num_rows."""
    # The seed is mixed too; otherwise seeds 0 and 1 would swap neighbouring ids.
    words = mix(ids.view(np.uint64) ^ mix(np.array([seed], np.uint64)))
    # Scaling the upper half changes the probability of a row by at most 2**-32.
    return ((words >> np.uint64(32)) * np.uint64(num_rows) >> np.uint64(32)).view(np.int64)


def in_range(bags: Bags, first: int, end: int) -> Bags:
    """Keep the ids first .. end - 1 of each bag and subtract `first` from them."""
    inside = (bags.ids >= first) & (bags.ids < end)
    if len(bags.ids) == len(bags.lengths) and (bags.lengths == 1).all():
        return Bags(bags.ids[inside] - first, inside.astype(np.int32), at(bags.weights, inside))
    samples = np.repeat(np.arange(len(bags.lengths)), bags.lengths)
    lengths = np.bincount(samples[inside], minlength=len(bags.lengths))
    return Bags(bags.ids[inside] - first, lengths.astype(np.int32), at(bags.weights, inside))


def at(weights: NDArray[np.float32] | None, chosen: NDArray[Any]) -> NDArray[np.float32] | None:
    return None if weights is None else weights[chosen]


def sum_of_lengths(features: KeyedJaggedTensor, names: Sequence[str]) -> torch.Tensor:
    """Return [batch]: the number of ids of each sample in the features, also if empty bags were left out."""
    keys = features.keys()
    if not features.variable_stride_per_key():
        lengths = features.lengths().view(-1, features.stride())
        return lengths[[keys.index(name) for name in names]].sum(dim=0)
    by_key = dict(zip(keys, features.lengths().split(features.stride_per_key()), strict=True))
    bags = dict(zip(*features.inverse_indices(), strict=True))
    return torch.stack([by_key[name][bags[name]] for name in names]).sum(dim=0)
