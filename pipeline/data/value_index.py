"""Turn categorical values into the ids of a prepared vocabulary, many at a time, with no process but ours.

A feature's values lie in an Arrow file in the order of their 64-bit hashes, each with its hash and id. A value is looked
for by its hash and then compared, so that another value of the same hash is another value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.data.hashing import hash_text

HASH_SEED = 0
SCHEMA = pa.schema([("hash", pa.uint64()), ("id", pa.int32()), ("value", pa.large_string())])
ROWS_AT_ONCE = 1 << 18


def index_values(batches: Iterable[tuple[int, list[str]]], keep: Callable[[NDArray[np.int64]], NDArray[np.bool_]] | None = None) -> pa.Table:  # fmt: skip
    """SCHEMA, by ascending hash, of a vocabulary's (first id, values); `keep` says of ids whether they stay."""
    parts = []
    for first, values in batches:
        ids = np.arange(first, first + len(values))
        text = pa.array(values, pa.large_string())
        if keep is not None:
            stays = keep(ids)
            ids, text = ids[stays], text.filter(pa.array(stays))
        parts.append(pa.table([hash_text(text, HASH_SEED), ids.astype(np.int32), text], schema=SCHEMA))
    whole = pa.concat_tables(parts) if parts else SCHEMA.empty_table()
    return whole.take(pa.array(np.argsort(whole["hash"].to_numpy(), kind="stable"))).combine_chunks()


class ValueIndex:
    """The ids of a feature's values. Raises ValueError for a table that index_values has not made."""

    def __init__(self, table: pa.Table) -> None:
        if not table.schema.equals(SCHEMA):
            raise ValueError(f"a vocabulary's columns are {SCHEMA.names}, these are {table.schema.names}")
        self._hashes = table["hash"].to_numpy()
        self._ids = table["id"].to_numpy()
        self._values = table["value"].combine_chunks()
        repeats = np.diff(self._hashes)
        if len(repeats) and (self._hashes[1:] < self._hashes[:-1]).any():
            raise ValueError("a vocabulary's hashes do not ascend")
        # Values of one hash lie side by side; more than one is a matter of billions of values.
        self._longest_run = _longest_run(repeats == 0) + 1 if len(self._hashes) else 0

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self, values: pa.Array) -> NDArray[np.int64]:
        """[len(values)]; 0 for values that the vocabulary lacks. `values` are text, none missing."""
        found = np.zeros(len(values), np.int64)
        if not len(values) or not len(self):
            return found
        hashes = hash_text(values, HASH_SEED)
        text = values.cast(pa.large_string())
        first = np.searchsorted(self._hashes, hashes)
        for step in range(self._longest_run):
            place = np.minimum(first + step, len(self) - 1)
            alike = np.flatnonzero(self._hashes[place] == hashes)
            same = pc.equal(self._values.take(pa.array(place[alike])), text.take(pa.array(alike)))
            chosen = alike[same.to_numpy(zero_copy_only=False)]
            found[chosen] = self._ids[place[chosen]]
        return found


def _longest_run(flags: NDArray[np.bool_]) -> int:
    """Of neighbours that are all true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return int((edges[1::2] - edges[::2]).max(initial=0))
