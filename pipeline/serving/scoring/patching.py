"""Read a delta of an artifact into memory and check all of it, before anything that serves changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.runtime.errors import DamagedError
from pipeline.serving.artifact.deltas import (
    LAYERS_FILE,
    VALUES_FILE,
    Delta,
    NewIds,
    TableChange,
    deltas_folder,
    read_delta,
    tensors_from_bytes,
    values_from_bytes,
)
from pipeline.serving.artifact.manifest import COMPOSED_FILE, Manifest

if TYPE_CHECKING:
    from pipeline.serving.artifact.composed import ComposedTables


@dataclass(frozen=True)
class Patch:
    """`ids` [n] int64 ascending, `rows` [n, row_bytes] uint8: rows of a table as its file has them."""

    table: int
    ids: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class StagedDelta:
    """A verified delta in memory. Nothing of it serves yet."""

    delta: Delta
    patches: list[Patch]
    constants: list[torch.Tensor]
    composed: ComposedTables | None
    values: dict[str, NewIds] = field(default_factory=dict)  # by feature: those that have ids from now on


def stage_delta(artifact: str, manifest: Manifest, sequence: int) -> StagedDelta:
    """Raise DamagedError if the delta does not follow on the artifact, or names rows that do not exist."""
    delta = read_delta(deltas_folder(artifact), artifact, manifest, sequence)
    patches = [_read_patch(delta, change, manifest.tables[change.table].stored_rows) for change in delta.tables]
    constants = tensors_from_bytes(delta.content(LAYERS_FILE))
    composed = None
    if COMPOSED_FILE in delta.files:
        from pipeline.serving.artifact.composed import ComposedTables  # it imports TorchRec

        try:
            composed = ComposedTables.from_bytes(delta.content(COMPOSED_FILE))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise DamagedError(f"{delta.path}: {COMPOSED_FILE} is not of this release ({error!r})") from None
    values = values_from_bytes(delta.content(VALUES_FILE), manifest) if VALUES_FILE in delta.files else {}
    return StagedDelta(delta, patches, constants, composed, values)


def _read_patch(delta: Delta, change: TableChange, stored_rows: int) -> Patch:
    """Compare ids as the unsigned numbers that they are: as int64 an id of 2^63 or more is a negative number."""
    ids = np.frombuffer(delta.content(change.ids), "<u8")
    if (ids[1:] <= ids[:-1]).any() or int(ids[-1]) >= stored_rows:
        raise DamagedError(
            f"{delta.path}: {change.ids} has ids from {ids.min()} to {ids.max()}, and they must ascend below the "
            f"{stored_rows} rows of table {change.table}; publish the delta again"
        )
    rows = np.frombuffer(bytearray(delta.content(change.values)), np.uint8).reshape(len(ids), -1)
    return Patch(change.table, torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(rows))
