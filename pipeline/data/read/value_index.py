"""Look up the ids of categorical values in prepared vocabularies, many at a time, within the
process.

A vocabulary's values are sorted by their 64-bit hashes, each with its id. All vocabularies of a
data set are searched at once: a value's key is the number of its vocabulary, then its hash. After
the search by key the values are compared, so a different value with the same hash is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.data.raw.hashing import WORD_BYTES, Texts, hash_text, hash_texts, texts_of
from pipeline.runtime.errors import DataError

HASH_SEED = 0
NAMES = ["id", "value"]
OFFSET_LIMIT = 2**31 - 1  # maximum bytes of text with 32-bit offsets


def index_values(
    batches: Iterable[tuple[int, list[str]]], keep: Callable[[NDArray[np.int64]], NDArray[np.bool_]] | None = None
) -> pa.Table:
    """Return a table of id (int32) and value, sorted by hash, from (first id, values) of a vocabulary.

    `keep` receives ids and returns which of them stay in the table.
    """
    ids, values = [np.zeros(0, np.int32)], [pa.array([], pa.large_string())]
    for first, batch in batches:
        numbers, text = np.arange(first, first + len(batch)), pa.array(batch, pa.large_string())
        if keep is not None:
            stays = keep(numbers)
            numbers, text = numbers[stays], text.filter(pa.array(stays))
        ids.append(numbers.astype(np.int32))
        values.append(text)
    text = pa.concat_arrays(values)
    order = np.argsort(hash_text(text, HASH_SEED), kind="stable")
    text = text.take(pa.array(order))
    if text.nbytes < OFFSET_LIMIT:
        text = text.cast(pa.string())
    return pa.table([pa.array(np.concatenate(ids)[order]), text], names=NAMES)


class ValueIndex:
    """The ids of the values of several vocabularies, which are numbered in the order of the
    argument.

    `keys` are sorted; `row_ids` and `texts` have the id and the value for each key. The upper
    `number_bits` bits of a key are the number of the vocabulary.

    Raises DataError if a table was not made by index_values.
    """

    def __init__(self, vocabularies: Iterable[pa.Table]) -> None:
        hashes, ids, values = [], [np.zeros(0, np.int32)], []
        for table in vocabularies:
            ids.append(_checked(table)["id"].to_numpy())
            values.append(table["value"].combine_chunks())
            hashes.append(hash_text(values[-1], HASH_SEED))
            if (hashes[-1][1:] < hashes[-1][:-1]).any():
                raise DataError("a vocabulary's values must be sorted by their hashes, but these are not")
        self.number_bits = max(1, (len(hashes) - 1).bit_length())
        numbers = np.repeat(np.arange(len(hashes)), [len(each) for each in hashes])
        self.keys = self._keys_of(numbers, np.concatenate([np.zeros(0, np.uint64), *hashes]))
        self.row_ids = np.concatenate(ids)
        del hashes, ids, numbers
        self.texts = texts_of(values)
        # Values with one key are neighbours. More than one needs billions of values.
        self._longest_run = _longest_run(self.keys[1:] == self.keys[:-1]) + 1

    def __len__(self) -> int:
        """Return the number of values in all vocabularies together."""
        return len(self.row_ids)

    def _keys_of(self, vocabularies: NDArray[np.integer], hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = np.uint64(self.number_bits)
        return vocabularies.astype(np.uint64) << (np.uint64(64) - bits) | hashes >> bits

    def ids(self, vocabularies: NDArray[np.integer], values: pa.Array) -> NDArray[np.int64]:
        """Return [len(values)]: the id of each text in the vocabulary with the given number; 0 if
        the vocabulary does not have the text.
        """
        found = np.zeros(len(values), np.int64)
        if not len(values) or not len(self):
            return found
        texts = texts_of([values])
        keys = self._keys_of(vocabularies, hash_texts(texts, HASH_SEED))
        first = np.searchsorted(self.keys, keys)
        for step in range(self._longest_run):
            slots = np.minimum(first + step, len(self) - 1)
            which = np.flatnonzero(self.keys[slots] == keys)
            same = _are_same(texts, which, self.texts, slots[which])
            found[which[same]] = self.row_ids[slots[which[same]]]
        return found


def _checked(table: pa.Table) -> pa.Table:
    if table.column_names != NAMES or table["id"].null_count or table["value"].null_count:
        raise DataError(
            f"a vocabulary must have the columns {NAMES} and a value for each id, but this one has {table.schema.names}"
        )
    return table


def _are_same(left: Texts, which: NDArray[np.int64], right: Texts, others: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return [len(which)]: True if left[which[i]] equals right[others[i]]."""
    lengths = left.lengths(which)
    same = lengths == right.lengths(others)
    for begin in range(0, int(lengths[same].max(initial=0)), WORD_BYTES):
        left_to_see = np.flatnonzero(same & (lengths > begin))
        same[left_to_see] = left.words(which[left_to_see], begin) == right.words(others[left_to_see], begin)
    return same


def _longest_run(flags: NDArray[np.bool_]) -> int:
    """Return the length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return int((edges[1::2] - edges[::2]).max(initial=0))
