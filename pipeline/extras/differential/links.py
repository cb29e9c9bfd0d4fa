"""Define what a link of a chain stores: the table rows changed since the step before, and everything else completely.

    changed/<shard>/rows                            the changed rows, counted from the shard's first, ascending
    changed/<shard>/values/<row>/<column>/<key>     values of tensor <key> in these rows, at (row + rows, column)

<shard> is <rank>.<number>, or all.<number> for a table that every rank holds completely. <key>, <row> and
<column> are the same as in a full step, so a chain can be read under any plan. Weights and optimizer
states are stored as in memory, without rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from pipeline.checkpoint.changes import ChangedRows, Rows, ShardPlace, ShardRows
from pipeline.checkpoint.steps import is_link, read_manifest
from pipeline.checkpoint.tables import StoredTable, inventory_of_state, local_chunks
from pipeline.checkpoint.tensors import StepTensors
from pipeline.runtime.errors import CheckpointError, DamagedError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.manifest import MANIFEST, sealed_digest

PREFIX = "changed/"


@dataclass(frozen=True)
class Differential:
    """Saves links of a chain with the changed rows. Implements checkpoint.changes.Differential. A base follows after
    `most_links` links, or if they hold more than `most_bytes` times the base's bytes."""

    rows: ChangedRows
    most_links: int
    most_bytes: float = 0.5
    is_packed: bool = False

    def link_after(self, path: str) -> dict[str, Any] | None:
        manifest = read_manifest(path)
        size = sum(int(entry["size_bytes"]) for entry in manifest["files"].values())
        if is_link(manifest):
            before = manifest["chain"]
            base, base_bytes, links = before["base"], before["base_bytes"], before["links"]
            link_bytes = before["link_bytes"] + size
        else:
            base, base_bytes, links, link_bytes = manifest["step"], size, 0, 0
        if links >= self.most_links or link_bytes > self.most_bytes * base_bytes:
            return None
        return {
            "base": base,
            "base_bytes": base_bytes,
            "previous": manifest["step"],
            "previous_sha256": sealed_digest(storage.join(path, MANIFEST)),
            "links": links + 1,
            "link_bytes": link_bytes,
        }

    def link_state(self, flat: Mapping[str, Any], rows: ShardRows, rank: int) -> dict[str, Any]:
        return link_state(flat, rows, rank)


def is_change(key: str) -> bool:
    return key.startswith(PREFIX)


def link_state(flat: Mapping[str, Any], rows: ShardRows, rank: int) -> dict[str, Any]:
    """Return the part of a flat state (see tables.flatten) that a link (an incremental
    checkpoint) stores. Values of changed rows are copies. Raises CheckpointError if a table's changed rows are not among `rows`."""
    inventory = inventory_of_state(flat)
    state = {key: flat[key] for key in inventory.layers}
    number = 0
    for table in inventory.tables.values():
        whole = not isinstance(flat[table.key], ShardedTensor)
        for part, offsets in local_chunks(flat[table.key]):
            if not part.numel():
                continue
            place = ShardPlace(table.name, offsets[0], offsets[1])
            if place not in rows:
                raise CheckpointError(
                    f"nobody knows which rows of table {table.name!r} have changed; set checkpoint.differential=false"
                )
            shard = f"{PREFIX}{'all' if whole else rank}.{number}"
            number += 1
            if len(rows[place]):
                state |= _of_shard(shard, flat, table, place, part, rows[place])
    return state


def _of_shard(
    shard: str, flat: Mapping[str, Any], table: StoredTable, place: ShardPlace, weight: torch.Tensor, rows: Rows
) -> dict[str, torch.Tensor]:
    index = torch.from_numpy(rows)
    found = {f"{shard}/rows": index.to(torch.int32) if len(weight) < 2**31 else index}
    found[_key(shard, place.row, place.column, table.key)] = weight.detach()[index.to(weight.device)]
    for state in table.states.values():
        offsets, values = _state_of(flat[state.key], table, place)
        column = offsets[1] if len(offsets) > 1 else 0
        found[_key(shard, offsets[0], column, state.key)] = values.detach()[index.to(values.device)]
    return found


def _key(shard: str, row: int, column: int, key: str) -> str:
    return f"{shard}/values/{row}/{column}/{key}"


def _state_of(value: Any, table: StoredTable, place: ShardPlace) -> tuple[tuple[int, ...], torch.Tensor]:
    """Return the part of an optimizer state that belongs to the shard at `place`, and its offsets
    in the full state."""
    for part, offsets in local_chunks(value):
        if not part.numel():
            continue
        if len(offsets) > 1 and (offsets[0], offsets[1]) == (place.row, place.column):
            return offsets, part
        if len(offsets) == 1 and any(
            (piece.row, piece.column, piece.state_offset) == (place.row, place.column, offsets[0])
            for piece in table.pieces
        ):
            return offsets, part
    raise CheckpointError(
        f"the optimizer has no state of table {table.name!r} at row {place.row}, column {place.column}; set "
        "checkpoint.differential=false"
    )


@dataclass(frozen=True)
class _Change:
    """Changed rows of one tensor. `rows_key` names the rows, counted from `row`; `values_key` their
    values from `column` on."""

    rows_key: str
    values_key: str
    row: int
    column: int


class LinkChanges:
    """The changed rows of one link, by tensor. Rows are kept in memory, values are read when
    needed."""

    def __init__(self, tensors: StepTensors) -> None:
        """Index the changes. Raises DamagedError if a key does not follow the format of links."""
        self._tensors = tensors
        self._by_key: dict[str, list[_Change]] = {}
        self._rows: dict[str, Rows] = {}
        for name in filter(is_change, tensors.entries):
            parts = name.split("/", 5)
            if len(parts) == 3 and parts[2] == "rows":
                continue
            if len(parts) != 6 or parts[2] != "values" or not (parts[3].isdigit() and parts[4].isdigit()):
                raise DamagedError(f"{tensors.path}: .metadata names {name!r}, which is no change of a tensor")
            rows_key = f"{PREFIX}{parts[1]}/rows"
            self._by_key.setdefault(parts[5], []).append(_Change(rows_key, name, int(parts[3]), int(parts[4])))

    @property
    def keys(self) -> list[str]:
        """Return the keys of the changed tensors."""
        return sorted(self._by_key)

    def changed_rows(self, key: str) -> Iterator[tuple[Rows, int]]:
        """Yield (rows of the tensor, first column) for each piece."""
        for change in self._by_key.get(key, ()):
            yield self._rows_of(change), change.column

    def overlay(self, key: str, offsets: Sequence[int], values: torch.Tensor) -> None:
        """Write the changed rows of `key` into `values`, the box of the tensor that begins at
        `offsets`.

        Raises:
            DamagedError: rows and values do not fit each other.
            CheckpointError: they cannot be read.
        """
        for change in self._by_key.get(key, ()):
            rows = self._rows_of(change)
            low, high = np.searchsorted(rows, [offsets[0], offsets[0] + len(values)]).tolist()
            shape = self._tensors.shape(change.values_key)
            if len(shape) != values.dim() or shape[0] != len(rows):
                raise DamagedError(f"{self._tensors.path}: {change.values_key} is {list(shape)} for {len(rows)} rows")
            if low == high:
                continue
            into = torch.from_numpy(rows[low:high] - offsets[0])
            if values.dim() == 1:
                values[into] = self._tensors.read(change.values_key, [low], [high - low])
                continue
            first = max(offsets[1], change.column)
            last = min(offsets[1] + values.shape[1], change.column + shape[1])
            if first < last:
                own = self._tensors.read(change.values_key, [low, first - change.column], [high - low, last - first])
                values[into, first - offsets[1] : last - offsets[1]] = own

    def _rows_of(self, change: _Change) -> Rows:
        """Return rows of the complete tensor, ascending."""
        if change.rows_key not in self._rows:
            if change.rows_key not in self._tensors.entries:
                raise DamagedError(f"{self._tensors.path} holds values for rows {change.rows_key!r}, and no such rows")
            (count,) = self._tensors.shape(change.rows_key)
            self._rows[change.rows_key] = self._tensors.read(change.rows_key, [0], [count]).numpy().astype(np.int64)
        return self._rows[change.rows_key] + change.row
