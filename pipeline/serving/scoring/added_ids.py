"""Look up values that were given ids after the vocabularies were prepared: while a training follows a stream, or by a delta."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


class AddedIds:
    """Of features, which are numbered as FeatureIds numbers them. For one caller at a time."""

    def __init__(self) -> None:
        self._ids: dict[int, dict[str, int]] = {}
        self._unknown: dict[int, set[str]] = {}

    def add(self, feature: int, first: int, values: Sequence[str]) -> Callable[[], None]:
        """Give the values ids from `first` on. Return a function that takes them away again."""
        own = self._ids.setdefault(feature, {})
        before = {value: own[value] for value in values if value in own}
        own.update(zip(values, range(first, first + len(values)), strict=True))

        def take_away() -> None:
            for value in values:
                own.pop(value, None)
            own.update(before)

        return take_away

    def forget(self) -> None:
        self._ids.clear()

    def note_unknown(self, features: Iterable[int]) -> None:
        self._unknown = {feature: set() for feature in features}

    def take_unknown(self) -> dict[int, set[str]]:
        """By feature: the values without an id that were looked up since this was called last."""
        found = {feature: values for feature, values in self._unknown.items() if values}
        self._unknown = {feature: set() for feature in self._unknown}
        return found

    def has(self, feature: int) -> bool:
        """Whether anything is to be looked up of a feature."""
        return feature in self._ids or feature in self._unknown

    def ids(self, feature: int, values: pa.Array) -> NDArray[np.int64]:
        """[len(values)]: of values that the vocabulary lacks; 0 for those that are missing, empty or unknown here too."""
        coded = values.dictionary_encode()
        texts: list[str] = coded.dictionary.to_pylist()
        own, unknown = self._ids.get(feature, {}), self._unknown.get(feature)
        found = np.array([own.get(text, 0) for text in texts] + [0], np.int64)
        if unknown is not None:
            unknown.update(text for text, row_id in zip(texts, found.tolist(), strict=False) if not row_id and text)
        indices = coded.indices.fill_null(len(texts)).to_numpy(zero_copy_only=False)
        return found[indices]
