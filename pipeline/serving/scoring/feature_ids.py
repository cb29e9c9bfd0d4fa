"""Map the values of a schema's categorical features to ids, for all features at once.

Requests repeat values, so their ids are cached.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.data.raw.hashing import hash_ids, texts_of
from pipeline.data.read.value_index import HASH_SEED, ValueIndex
from pipeline.serving.artifact.raw_schema import RawFeature

MIN_ROWS = 32  # fewer rows are read faster by dictionaries of Python


class ColumnIds:
    """Looks up features that have one value in each row. Only one thread may call it.

    `vocabularies`: the numbers in `index` of the features that are not hashed.
    """

    def __init__(self, features: Sequence[RawFeature], index: ValueIndex, vocabularies: Sequence[int]) -> None:
        self._features, self._index, self._vocabularies = features, index, vocabularies
        self._bits = np.uint64(index.number_bits)
        numbers = np.arange(max(vocabularies, default=-1) + 2, dtype=np.uint64)
        begins = np.searchsorted(index.keys, numbers[:-1] << (np.uint64(64) - self._bits))
        self._begins = [*begins.tolist(), len(index)]
        self._directories = [
            _directory_of(index.keys[begin:end] << self._bits)
            for begin, end in zip(self._begins, self._begins[1:], strict=False)
        ]
        self.ids([pa.array([""])] * len(features))  # loads the kernels or compiles them, before a request waits

    def part(self, features: Sequence[RawFeature], vocabularies: Sequence[int]) -> ColumnIds:
        """Return the lookup of other features of the same vocabularies."""
        part = copy.copy(self)
        part._features, part._vocabularies = features, vocabularies
        return part

    def ids(self, columns: Sequence[pa.Array]) -> NDArray[np.int64] | None:
        """Return the ids of each column, one after the other: 0 for a missing, empty or unknown value.

        The columns must have types for which is_read() is True. Returns None if bytes are not valid
        text.
        """
        from pipeline.devices.cpu.kernels import columns as kernels

        if not columns:
            return np.empty(0, np.int64)
        try:
            values = pa.concat_arrays([column.cast(pa.string()) for column in columns])
            values = values.fill_null("") if values.null_count else values
            values.validate(full=True)
        except (pa.ArrowInvalid, UnicodeDecodeError):
            return None
        texts, num_rows = texts_of([values]), len(columns[0])
        hashes, slots = np.empty(len(texts), np.uint64), np.empty(len(texts), np.int64)
        ids, index = np.empty(len(texts), np.int64), self._index
        known = index.keys, index.row_ids, index.texts.all_words, index.texts.offsets
        for column, (feature, number) in enumerate(zip(self._features, self._vocabularies, strict=True)):
            span = column * num_rows, (column + 1) * num_rows
            seed = HASH_SEED if feature.hash_size is None else feature.hash_seed
            kernels.hash_values(texts.all_words, texts.offsets, np.uint64(seed), hashes, *span)
            if feature.hash_size is None:
                directory = self._directories[number]
                kernels.find_slots(hashes, *directory, self._begins[number], slots, *span)
                kernels.listed_ids(
                    (texts.all_words, texts.offsets, hashes), slots, known, (np.uint64(number), self._bits), ids, *span
                )
            else:
                kernels.hashed_ids(texts.offsets, hashes, np.uint64(feature.hash_size), ids, *span)
        return ids


def _directory_of(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int32], np.uint64]:
    """Return [2^bits + 1], the number of ascending hashes below each value of the leading `bits`, and bits."""
    bits = np.uint64(max(1, len(hashes).bit_length() - 1))
    counts = np.bincount((hashes >> (np.uint64(64) - bits)).astype(np.int64), minlength=1 << int(bits))
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), bits


def is_read(kind: pa.DataType) -> bool:
    """Return True if ColumnIds reads columns of this type. Other types are read by prepare's functions."""
    return is_whole_number(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_whole_number(kind: pa.DataType) -> bool:
    """Return True if int64 can hold all numbers of the type."""
    return pa.types.is_integer(kind) and kind != pa.uint64()


REMEMBERED = 1 << 18  # values of all features together, some 40 MB
LONGEST_REMEMBERED = 64  # characters


class AddedIds:
    """Values that were given ids after the vocabularies were prepared: by a stream, or by a delta.

    Features have the same numbers as in FeatureIds. Only one thread may call it.
    """

    def __init__(self) -> None:
        self._ids: dict[int, dict[str, int]] = {}
        self._unknown: dict[int, set[str]] = {}

    def add(self, feature: int, first: int, values: Sequence[str]) -> Callable[[], None]:
        """Give the values the ids from `first` on. Return a function that removes these values again."""
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
        """Return for each feature the values without an id that were looked up since the last call."""
        found = {feature: values for feature, values in self._unknown.items() if values}
        self._unknown = {feature: set() for feature in self._unknown}
        return found

    def has(self, feature: int) -> bool:
        """Return True if the feature has values to look up."""
        return feature in self._ids or feature in self._unknown

    def ids(self, feature: int, values: pa.Array) -> NDArray[np.int64]:
        """Return [len(values)] ids of values that the vocabulary lacks; 0 if missing, empty or unknown here too."""
        coded = values.dictionary_encode()
        texts: list[str] = coded.dictionary.to_pylist()
        own, unknown = self._ids.get(feature, {}), self._unknown.get(feature)
        found = np.array([own.get(text, 0) for text in texts] + [0], np.int64)
        if unknown is not None:
            unknown.update(text for text, row_id in zip(texts, found.tolist(), strict=False) if not row_id and text)
        indices = coded.indices.fill_null(len(texts)).to_numpy(zero_copy_only=False)
        return found[indices]


class FeatureIds:
    """`vocabularies`: feature -> the result of value_index.index_values for its values, if it is
    not hashed. Only one thread may call it.
    """

    def __init__(
        self, features: Sequence[RawFeature], vocabularies: Mapping[str, pa.Table], null_values: Sequence[str] = ()
    ) -> None:
        self._features, self._numbers = list(features), np.arange(len(features))  # numbers: in `added`
        self._missing: dict[str | None, int] = {None: 0, "": 0, **dict.fromkeys(null_values, 0)}
        listed = [feature.hash_size is None for feature in features]
        self._index = ValueIndex(vocabularies[feature.name] for feature in features if feature.hash_size is None)
        self._vocabularies = np.cumsum(listed) - 1  # of a feature, the number of its vocabulary
        self._sizes = np.array([feature.hash_size or 0 for feature in features], np.int64)
        self._seeds = np.array([feature.hash_seed for feature in features], np.int64)
        self._kinds = {None if feature.hash_size is None else feature.hash_seed for feature in features}
        self._is_listed = np.array(listed, np.bool_)
        self._known: list[dict[str | None, int]] = [dict(self._missing) for _ in features]
        self._room = REMEMBERED // max(1, len(features))
        self.added = AddedIds()
        # ColumnIds needs Numba, and reads no lists, drawn bags, buckets and null_values.
        self._can_read_columns = not null_values and find_spec("numba") is not None
        self._all_columns: ColumnIds | None = None
        self._of_arrow = self._column_ids() if self._can_read_columns and _are_plain(features) else None

    def _column_ids(self) -> ColumnIds:
        if self._all_columns is None:
            self._all_columns = ColumnIds(self._features, self._index, self._vocabularies.tolist())
        return self._all_columns

    def part(self, positions: Sequence[int]) -> FeatureIds:
        """Return the lookup of some features. Vocabularies, cached ids and added values are shared."""
        part = copy.copy(self)
        part._features = [self._features[position] for position in positions]
        part._known = [self._known[position] for position in positions]
        for name in ("_numbers", "_vocabularies", "_sizes", "_seeds", "_is_listed"):
            setattr(part, name, getattr(self, name)[list(positions)])
        part._of_arrow = None
        if self._can_read_columns and _are_plain(part._features):
            part._of_arrow = self._column_ids().part(part._features, part._vocabularies.tolist())
        return part

    def forget_added(self) -> None:
        """Remove all added values, so that only values of the vocabularies are known."""
        self.added.forget()
        self._known = [dict(self._missing) for _ in self._known]

    @property
    def reads_columns(self) -> bool:
        return self._of_arrow is not None

    def of_arrow(self, columns: Sequence[pa.Array]) -> NDArray[np.int64] | None:
        """Return the same as ColumnIds.ids, including ids of added values."""
        assert self._of_arrow is not None
        ids = self._of_arrow.ids(columns)
        if ids is None:
            return None
        numbers, num_rows = self._numbers.tolist(), len(ids) // max(1, len(columns))
        for feature, column, own in zip(numbers, columns, ids.reshape(len(columns), num_rows), strict=True):
            if self.added.has(feature) and len(unknown := np.flatnonzero(own == 0)):
                values = column.take(pa.array(unknown))
                own[unknown] = self.added.ids(
                    feature, values.cast(pa.string()) if is_whole_number(column.type) else values
                )
        return ids

    def look_up(self, features: NDArray[np.int64], values: pa.Array) -> NDArray[np.int64]:
        """Return [len(values)]: the id of each value (text, not missing) for feature number features[i]."""
        found = np.zeros(len(values), np.int64)
        for seed in self._kinds:
            is_listed = self._is_listed[features]
            which = np.flatnonzero(is_listed if seed is None else ~is_listed & (self._seeds[features] == seed))
            part, owners = (
                (values, features) if len(self._kinds) == 1 else (values.take(pa.array(which)), features[which])
            )
            if seed is None:
                found[which] = self._index.ids(self._vocabularies[owners], part)
                self._look_up_added(features, values, found, which[found[which] == 0])
            else:
                found[which] = hash_ids(part, self._sizes[owners], seed)
        return found

    def _look_up_added(
        self, features: NDArray[np.int64], values: pa.Array, found: NDArray[np.int64], unknown: NDArray[np.int64]
    ) -> None:
        """Fill `found` at the positions `unknown`."""
        owners = self._numbers[features[unknown]]
        for feature in np.unique(owners).tolist():
            if self.added.has(feature):
                which = unknown[owners == feature]
                found[which] = self.added.ids(feature, values.take(pa.array(which)))

    def of_columns(self, columns: Sequence[Sequence[str | None]]) -> NDArray[np.int64]:
        """Return the ids of the values of each feature, one feature after the other. Missing and empty values get 0."""
        ids: list[int | None] = []
        for known, column in zip(self._known, columns, strict=True):
            ids += map(known.get, column)
        if None in ids:
            self._fill(ids, columns)
        return np.array(ids, np.int64)

    def _fill(self, ids: list[int | None], columns: Sequence[Sequence[str | None]]) -> None:
        """Look up the ids that are not cached, and cache them."""
        positions = [position for position, found in enumerate(ids) if found is None]
        features = np.repeat(np.arange(len(columns)), [len(column) for column in columns])[positions]
        values = list(chain.from_iterable(columns))
        texts = [values[position] for position in positions]
        found = self.look_up(features, pa.array(texts, pa.large_string())).tolist()
        for position, feature, text, row_id in zip(positions, features.tolist(), texts, found, strict=True):
            ids[position] = row_id
            assert text is not None, "a missing value is known"
            if len(text) <= LONGEST_REMEMBERED:
                self._remember(feature, text, row_id)

    def _remember(self, feature: int, text: str, found: int) -> None:
        known = self._known[feature]
        if not self._is_listed[feature]:
            if len(known) >= self._room:
                known = self._known[feature] = dict(self._missing)
            known[text] = found
        elif 0 < found <= self._room:  # the most frequent values: ids are in the order of frequency
            known[text] = found


def _are_plain(features: Sequence[RawFeature]) -> bool:
    """Return True if each feature has one id in each row, which is not the number of a bucket."""
    return all(not each.multi_hot and each.bag_size == 1 and each.boundaries is None for each in features)
