"""Bring a loaded artifact up to its newest delta: read and verify first, then change tables and layers in one go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeGuard

import numpy as np
import torch

from pipeline.runtime.errors import DamagedError, ServingError
from pipeline.runtime.logs import get_logger
from pipeline.serving.artifact.composed import ComposedTables
from pipeline.serving.artifact.deltas import (
    LAYERS_FILE,
    VALUES_FILE,
    Delta,
    NewIds,
    deltas_folder,
    newest_sequence,
    read_delta,
    tensors_from_bytes,
    values_from_bytes,
)
from pipeline.serving.artifact.manifest import COMPOSED_FILE, Manifest
from pipeline.serving.scoring.predictor import Predictor

logger = get_logger(__name__)


@dataclass(frozen=True)
class Patch:
    """`ids` [n] int64 ascending, `rows` [n, row_bytes] uint8: rows of a table as its file has them."""

    table: int
    ids: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class StagedDelta:
    """A delta in memory, verified; nothing of it serves yet."""

    delta: Delta
    patches: list[Patch]
    constants: list[torch.Tensor]
    composed: ComposedTables | None
    values: dict[str, NewIds] = field(default_factory=dict)  # by feature: those that have ids from now on


def follows_deltas(scorer: object) -> TypeGuard[Predictor]:
    """Whether it is an artifact's predictor; a retriever's items would have to be found anew."""
    return isinstance(scorer, Predictor)


def catch_up(scorer: object, artifact: str) -> None:
    """Before it serves, bring what was loaded from `artifact` up to its newest delta, or to the one before a damaged one."""
    if not follows_deltas(scorer):
        return
    try:
        for sequence in range(scorer.sequence + 1, newest_sequence(deltas_folder(artifact)) + 1):
            scorer.apply(stage_delta(artifact, scorer.manifest, sequence))
    except (OSError, ServingError, DamagedError) as error:
        logger.error("%s serves delta %d, and not the ones after it: %s", artifact, scorer.sequence, error)


def stage_delta(artifact: str, manifest: Manifest, sequence: int) -> StagedDelta:
    """Raises DamagedError where it cannot follow on what serves, or names rows that there are not."""
    delta = read_delta(deltas_folder(artifact), artifact, manifest, sequence)
    patches = []
    for change in delta.tables:
        table = manifest.tables[change.table]
        ids = np.frombuffer(delta.content(change.ids), "<u8")
        if (np.diff(ids.astype(np.int64)) <= 0).any() or int(ids[-1]) >= table.stored_rows:
            raise DamagedError(f"{delta.path}: {change.ids} names no ascending rows below {table.stored_rows}")
        rows = np.frombuffer(bytearray(delta.content(change.values)), np.uint8).reshape(len(ids), -1)
        patches.append(Patch(change.table, torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(rows)))
    constants = tensors_from_bytes(delta.content(LAYERS_FILE))
    composed = None
    if COMPOSED_FILE in delta.files:
        try:
            composed = ComposedTables.from_bytes(delta.content(COMPOSED_FILE))
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise DamagedError(f"{delta.path}: {COMPOSED_FILE} is not of this release ({error})") from None
    values = values_from_bytes(delta.content(VALUES_FILE), manifest) if VALUES_FILE in delta.files else {}
    return StagedDelta(delta, patches, constants, composed, values)
