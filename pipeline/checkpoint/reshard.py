"""Check that a step fits a model under another plan, and convert row-wise optimizer state to other
column blocks.

torch.distributed.checkpoint moves values between any two ways to split one tensor. But it loads
another dtype without an error, ignores tensors that the job does not have, and does not know that
row-wise state depends on the column blocks: each block's state is the running sum of the mean
squared gradient of its columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from pipeline.checkpoint.stored_rows import FirstWeights, StoredRows
from pipeline.checkpoint.tables import (
    TABLE_STATE,
    Inventory,
    StoredTable,
    describe_dtype,
    inventory_of_step,
    local_chunks,
)
from pipeline.checkpoint.tensors import StepTensors
from pipeline.runtime.errors import CheckpointError

MAX_LINES = 6
_StoredPart = tuple[str, StoredRows, Any]  # its key, its rows, its offsets


def check_fit(
    tensors: StepTensors,
    wanted: Inventory,
    run: str,
    *,
    with_optimizer: bool,
    average_row_state: bool,
    may_grow: bool = False,
) -> list[str]:
    """Return the keys whose row-wise state must be converted because the step has other column
    blocks.

    `wanted` is the merged inventory of all ranks. The hint in the error names `run`, the folder of
    the step's run. Without an optimizer, the step's optimizer state is ignored. may_grow: tables
    may have more rows than the step's.

    Raises:
        CheckpointError: tables or layers are missing, extra, or of another shape or dtype; the step has
            another optimizer; or row-wise state must be converted, and `average_row_state` is False.
    """
    stored = inventory_of_step(tensors)
    then = stored.tables
    if may_grow:
        then = then | {
            name: replace(then[name], rows=wanted.tables[name].rows) for name in grown_tables(stored, wanted)
        }
    lines = _table_lines(then, wanted.tables)
    lines += _layer_lines(stored, wanted, with_optimizer)
    both = sorted(wanted.tables.keys() & stored.tables.keys())
    if with_optimizer:
        lines += [line for name in both for line in _state_lines(stored.tables[name], wanted.tables[name])]
    if lines:
        more = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
        raise CheckpointError(
            f"checkpoint {tensors.path} does not fit this model, optimizer or plan:"
            + "".join(f"\n  {line}" for line in [*lines[:MAX_LINES], *more])
            + "\nTrain with the config in its manifest.json; or start another run from it, which says what becomes of "
            f"each table: run_dir=<another> warm_start.run={run}"
        )
    recut = _recut_tables(stored, wanted) if with_optimizer else []
    if recut and not average_row_state:
        raise CheckpointError(_refusal(tensors.path, stored, wanted, recut))
    return [state.key for name in recut for state in wanted.tables[name].states.values() if len(state.shape) == 1]


def grown_tables(stored: Inventory, wanted: Inventory) -> list[str]:
    """Return the tables that have more rows in `wanted` than in the step."""
    return [
        name for name, table in wanted.tables.items() if name in stored.tables and table.rows > stored.tables[name].rows
    ]


def _table_lines(stored: dict[str, StoredTable], wanted: dict[str, StoredTable]) -> list[str]:
    lines = []
    for name in sorted(wanted.keys() - stored.keys()):
        hint = _renamed(wanted[name], stored, wanted)
        lines.append(f"table {name!r}: the checkpoint has none of that name, the job has {_shape(wanted[name])}{hint}")
    for name in sorted(stored.keys() - wanted.keys()):
        lines.append(f"table {name!r}: the checkpoint has {_shape(stored[name])}, the job has none of that name")
    for name in sorted(stored.keys() & wanted.keys()):
        if (then := _shape(stored[name])) != (now := _shape(wanted[name])):
            lines.append(f"table {name!r}: the checkpoint has {then}, the job has {now}")
    return lines


def _renamed(table: StoredTable, stored: dict[str, StoredTable], wanted: dict[str, StoredTable]) -> str:
    """Return a text that suggests a rename if exactly one dropped table has the shape of this table."""
    gone = [name for name in stored.keys() - wanted.keys() if _shape(stored[name]) == _shape(table)]
    return f" (renamed from {gone[0]!r}? then warm_start.renames={{{gone[0]}: {table.name}}})" if len(gone) == 1 else ""


def _shape(table: StoredTable) -> str:
    return f"{table.rows:,} rows x {table.dim} {describe_dtype(table.dtype)}"


def _state_lines(stored: StoredTable, wanted: StoredTable) -> list[str]:
    lines = []
    for state in sorted(stored.states.keys() | wanted.states.keys()):
        then, now = _state_kind(stored, state), _state_kind(wanted, state)
        if then != now:
            lines.append(f"table {wanted.name!r}: the checkpoint has {then} as {state}, the optimizer of the job {now}")
    return lines


def _state_kind(table: StoredTable, state: str) -> str:
    if state not in table.states:
        return "nothing"
    kind = "a value a row" if table.is_row_wise(state) else "a value an element"
    return f"{kind} ({describe_dtype(table.states[state].dtype)})"


def _layer_lines(stored: Inventory, wanted: Inventory, with_optimizer: bool) -> list[str]:
    """Return one line per difference of dense layers, buffers, and their optimizer state."""

    def described(inventory: Inventory) -> dict[str, str]:
        kept = {
            key: layer for key, layer in inventory.layers.items() if with_optimizer or not key.startswith("optimizer.")
        }
        return {key: f"{list(shape)} {describe_dtype(dtype)}" for key, (shape, dtype) in kept.items()}

    then, now = described(stored), described(wanted)
    return [
        f"{key}: the checkpoint has {then.get(key, 'none')}, the job has {now.get(key, 'none')}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]


def _recut_tables(stored: Inventory, wanted: Inventory) -> list[str]:
    """Return tables with row-wise state that the wanted plan splits into other column blocks than
    the step's plan."""
    return sorted(
        name
        for name, table in wanted.tables.items()
        if any(table.is_row_wise(state) for state in table.states)
        and table.column_blocks != stored.tables[name].column_blocks
    )


def _refusal(path: str, stored: Inventory, wanted: Inventory, names: list[str]) -> str:
    name = names[0]
    more = f" (and {len(names) - 1} more tables)" if len(names) > 1 else ""
    then, now = ([width for _, width in table.column_blocks] for table in (stored.tables[name], wanted.tables[name]))
    works = (
        "table_wise, row_wise, table_row_wise or data_parallel (tables.default.sharding.sharding_types=[table_wise,row_wise])"
        if len(then) == 1
        else f"column_wise with column blocks of {', '.join(map(str, then))} for it, on any number of ranks"
    )
    return (
        f"checkpoint {path} holds row-wise optimizer state of table {name!r}{more} for column blocks of "
        f"{', '.join(map(str, then))}, and the plan cuts it into {', '.join(map(str, now))}: each block's state is that of its own "
        f"columns, so training would not go on exactly. A plan that would: {works}. To go on with averages instead: "
        "checkpoint.row_state_across_columns=average"
    )


def without(state: Mapping[str, Any], keys: list[str], prefix: str = "") -> dict[str, Any]:
    """Return a copy of nested dicts without the tensors of these flat keys."""
    kept: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            # DCP would store an empty dict as a pickled value
            if inner := without(value, keys, f"{prefix}{name}."):
                kept[name] = inner
        elif f"{prefix}{name}" not in keys:
            kept[name] = value
    return kept


@torch.no_grad()
def fill_row_states(tensors: StepTensors, flat: Mapping[str, Any], keys: list[str], wanted: Inventory) -> None:
    """Fill this rank's parts of `keys` with averages over the columns of each part. Local. Each
    element of a row is assumed to have the state of its column block. The average over a new
    block's columns is then the state that the new block would have after the same gradients.
    Raises CheckpointError if the step's files cannot be read.
    """
    if not keys:
        return
    stored = inventory_of_step(tensors).tables
    for key in keys:
        match = TABLE_STATE.fullmatch(key)
        assert match is not None
        table = wanted.tables[match["table"]]
        pieces = {piece.state_offset: piece for piece in table.pieces}
        for part, (offset,) in local_chunks(flat[key]) if key in flat else ():
            if part.numel():
                piece = pieces[offset]
                columns = (piece.column, piece.column + piece.num_columns)
                part.copy_(read_row_state(tensors, stored[table.name], match["state"], piece.row, len(part), columns))


def stored_keys(flat: Mapping[str, Any]) -> list[str]:
    """Return the keys of a flat state whose tensors this rank keeps in a row store."""
    return [
        key
        for key, value in flat.items()
        if isinstance(value, ShardedTensor) and any(isinstance(part, StoredRows) for part, _ in local_chunks(value))
    ]


@torch.no_grad()
def begin_stored_rows(tensors: StepTensors, flat: Mapping[str, Any], keys: list[str]) -> None:
    """Reset this rank's rows of `keys`. Rows that the step leaves out get the same initial weights
    as in the run that saved the step. Local.
    """
    for key in keys:
        for part, offsets in local_chunks(flat[key]):
            if isinstance(part, StoredRows) and part.column == 0:
                first = tensors.first_weights(key) or FirstWeights()
                row, column = offsets
                part.source.begin(replace(first, row=first.row + row, column=first.column + column))


@torch.no_grad()
def fill_stored_rows(tensors: StepTensors, flat: Mapping[str, Any], keys: list[str]) -> None:
    """Fill this rank's parts of `keys` in blocks, except for rows that were never updated. Local.
    Call begin_stored_rows first. Raises CheckpointError if the step's files cannot be read."""
    parts = [
        (key, part, offsets)
        for key in keys
        for part, offsets in local_chunks(flat[key])
        if isinstance(part, StoredRows)
    ]
    weights = {id(part.source): (key, part, offsets) for key, part, offsets in parts if part.column == 0}
    with tensors.kept_open():
        for key, part, offsets in parts:
            _fill_stored_part(tensors, key, part, offsets, weights[id(part.source)])


def _fill_stored_part(tensors: StepTensors, key: str, part: StoredRows, offsets: Any, weights: _StoredPart) -> None:
    """Fill one part. `weights` are the weights of the same rows. They show which rows were never
    updated.
    """
    weight_key, weight, at = weights
    for first in range(0, len(part), part.rows_a_block):
        count = min(part.rows_a_block, len(part) - first)
        held = tensors.held_rows(weight_key, [at[0] + first, at[1]], [count, weight.shape[1]])
        if held.any():
            begin, sizes = [offsets[0] + first, *offsets[1:]], [count, *part.shape[1:]]
            rows = torch.from_numpy(np.flatnonzero(held))
            values = tensors.read(key, begin, sizes, with_sampled=False)
            part.source.write_rows(part.column, part.first_row + first + rows, values[rows])


def read_row_state(
    tensors: StepTensors, table: StoredTable, state: str, first_row: int, num_rows: int, columns: tuple[int, int]
) -> torch.Tensor:
    """Return [num_rows], the row-wise state averaged over columns begin..end. The result is exact
    if these columns are one block of the step.
    """
    total = torch.zeros(num_rows, dtype=torch.float64)
    alone = None
    for piece in table.pieces:
        width = min(columns[1], piece.column + piece.num_columns) - max(columns[0], piece.column)
        begin = max(first_row, piece.row)
        count = min(first_row + num_rows, piece.row + piece.num_rows) - begin
        if width <= 0 or count <= 0:
            continue
        values = tensors.read(table.states[state].key, [piece.state_offset + begin - piece.row], [count])
        if width == columns[1] - columns[0] and count == num_rows:
            alone = values
        total[begin - first_row : begin - first_row + count] += values.double() * (width / (columns[1] - columns[0]))
    return total.to(table.states[state].dtype) if alone is None else alone
