"""Turn categorical values into the ids of a prepared vocabulary, many at a time, with no process but ours.

A feature's values lie in the order of their 64-bit hashes, each with its id. A value is looked for by its hash and then
compared, so that another value of the same hash is another value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.data.hashing import hash_text

HASH_SEED = 0
NAMES = ["id", "value"]
OFFSET_LIMIT = 2**31 - 1  # bytes of text that 32-bit offsets reach


def index_values(
    batches: Iterable[tuple[int, list[str]]], keep: Callable[[NDArray[np.int64]], NDArray[np.bool_]] | None = None
) -> pa.Table:
    """id int32 and value, by ascending hash, of a vocabulary's (first id, values); `keep` says of ids whether they stay."""
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
    """The ids of a feature's values. Raises ValueError for a table that index_values has not made."""

    def __init__(self, table: pa.Table) -> None:
        if table.column_names != NAMES or table["id"].null_count or table["value"].null_count:
            raise ValueError(
                f"a vocabulary has the columns {NAMES} and a value for each id, this one {table.schema.names}"
            )
        table = table.combine_chunks()
        self._ids = table["id"].to_numpy()
        self._values = pa.concat_arrays(table["value"].chunks) if table.num_rows else pa.array([], pa.string())
        self._hashes = hash_text(self._values, HASH_SEED)
        if (self._hashes[1:] < self._hashes[:-1]).any():
            raise ValueError("a vocabulary's values are in the order of their hashes, these are not")
        # Values of one hash lie side by side; more than one is a matter of billions of values.
        self._longest_run = _longest_run(self._hashes[1:] == self._hashes[:-1]) + 1

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self, values: pa.Array, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """[len(values)]; 0 for values that the vocabulary lacks. `values` are text, none missing; `hashes` are hashes_of them."""
        found = np.zeros(len(values), np.int64)
        if not len(values) or not len(self):
            return found
        first = np.searchsorted(self._hashes, hashes)
        for step in range(self._longest_run):
            place = np.minimum(first + step, len(self) - 1)
            alike = np.flatnonzero(self._hashes[place] == hashes)
            text = values.take(pa.array(alike)).cast(self._values.type)
            same = pc.equal(self._values.take(pa.array(place[alike])), text)
            chosen = alike[same.to_numpy(zero_copy_only=False)]
            found[chosen] = self._ids[place[chosen]]
        return found


def hashes_of(columns: list[pa.Array]) -> list[NDArray[np.uint64]]:
    """Of the values of each column, text: at once, for a call costs more than a few values do."""
    if not columns:
        return []
    whole = hash_text(pa.concat_arrays([column.cast(pa.large_string()) for column in columns]), HASH_SEED)
    return np.split(whole, np.cumsum([len(column) for column in columns])[:-1])


def _longest_run(flags: NDArray[np.bool_]) -> int:
    """Of neighbours that are all true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return int((edges[1::2] - edges[::2]).max(initial=0))
