"""Initialize a run's weights from a step of another run, under any plan and number of ranks, one
block at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from pipeline.checkpoint.chains import open_tensors
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.collective_errors import Ranks
from pipeline.checkpoint.reshard import read_row_state
from pipeline.checkpoint.steps import STEP_FOLDER, list_steps, read_manifest, step_path
from pipeline.checkpoint.tables import (
    Inventory,
    StoredTable,
    flatten,
    inventory_of_state,
    inventory_of_step,
    local_chunks,
    merge,
)
from pipeline.checkpoint.tensors import BLOCK_BYTES, StepTensors
from pipeline.checkpoint.warm_start_policy import Decisions, NewData, TableDecision, decide
from pipeline.config.training import WarmStartConfig
from pipeline.runtime.errors import CheckpointError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.runtime.storage import storage

logger = get_logger(__name__)
Pairs = tuple[np.ndarray, np.ndarray]  # old rows in ascending order, and their new rows


@dataclass(frozen=True)
class TableReport:
    """What the warm start did with a table. Of its `rows`, `rows_loaded` come from the checkpoint;
    the other rows have initial weights.
    """

    table: str
    source: str | None
    rows: int
    rows_loaded: int
    optimizer_state: bool
    changes: list[str]


@dataclass(frozen=True)
class WarmStartReport:
    checkpoint: str
    tables: list[TableReport]
    dropped: list[str]
    layers_loaded: list[str]
    layers_fresh: list[str]

    def lines(self) -> list[str]:
        """Return the report as one line per table."""
        lines = [
            f"warm start from {self.checkpoint}: {sum(report.source is not None for report in self.tables)} of {len(self.tables)} tables, "
            f"{len(self.layers_loaded)} dense layers loaded, {len(self.layers_fresh)} fresh"
        ]
        for report in self.tables:
            what = ", ".join(report.changes) or "as it was"
            state = "with its optimizer state" if report.optimizer_state else "optimizer state reset"
            kept = f"{report.rows_loaded:,} of {report.rows:,} rows loaded {state}; " if report.source else "fresh; "
            lines.append(f"  table {report.table}: {kept}{what}")
        return lines + [f"  table {name}: dropped" for name in self.dropped]


@dataclass(frozen=True)
class _Source:
    tensors: StepTensors
    stored: Inventory
    manifest: dict[str, Any]
    is_local: bool


def warm_start(
    config: WarmStartConfig,
    folder: str | None,
    model: nn.Module,
    optimizer: KeyedOptimizer,
    context: DistributedContext,
    data: NewData,
    initialize: Callable[[Collection[str]], None],
) -> WarmStartReport:
    """Fill the new model and optimizer as `config` says. `folder` holds the steps of config.run.
    Collective. `initialize` is called with the names of the tables that the checkpoint does not
    fill completely. Raises CheckpointError if there is no such step, the step is damaged, or a
    policy refuses its content.
    """
    ranks = Ranks(context)
    path = _choose(config, folder, model, context)
    source = ranks.read(lambda: _open(path), storage.is_local(path))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    wanted = merge(ranks.gather(inventory_of_state(flat := flatten(state))))
    decisions = ranks.read(lambda: decide(source.stored, wanted, source.manifest, data, config), source.is_local)
    if context.is_main:
        _hint_at_renames(decisions, source.stored, wanted)
    initialize({decision.name for decision in decisions.tables if not decision.is_whole})
    loaded = ranks.gather(ranks.read(lambda: _fill(flat, wanted, source, decisions), source.is_local))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return _report(path, decisions, loaded)


def _choose(config: WarmStartConfig, folder: str | None, model: nn.Module, context: DistributedContext) -> str:
    """Return the folder of the step to start from. Collective."""
    if config.checkpoint is not None:
        if not STEP_FOLDER.fullmatch(config.checkpoint.rstrip("/").rpartition("/")[2]):
            steps = list_steps(config.checkpoint)
            newest_step = step_path(config.checkpoint.rstrip("/"), steps[-1] if steps else 300)
            has = f"it holds {len(steps)} steps: give the newest," if steps else "such a folder is"
            raise CheckpointError(
                f"warm_start.checkpoint={config.checkpoint} is not the folder of a step; {has} {newest_step}"
            )
        return config.checkpoint.rstrip("/")
    assert folder is not None
    if config.step is not None:
        return step_path(folder, config.step)
    newest = Checkpointer(folder, model, None, context).newest()
    if newest is None:
        raise CheckpointError(f"warm_start.run={config.run} holds no checkpoint in {folder}; train it first")
    return step_path(folder, newest["step"])


def _open(path: str) -> _Source:
    manifest = read_manifest(path)
    tensors = open_tensors(path, manifest)
    return _Source(tensors, inventory_of_step(tensors), manifest, storage.is_local(path))


def _hint_at_renames(decisions: Decisions, stored: Inventory, wanted: Inventory) -> None:
    for new in (decision.name for decision in decisions.tables if decision.reason == "new"):
        table = wanted.tables[new]
        alike = [old for old in decisions.dropped if stored.tables[old].dim == table.dim]
        if alike:
            logger.warning(
                "table %r is new and %r is dropped: if it was renamed, say warm_start.renames={%s: %s}",
                new,
                alike[0],
                alike[0],
                new,
            )


@torch.no_grad()
def _fill(
    flat: Mapping[str, Any], wanted: Inventory, source: _Source, decisions: Decisions
) -> dict[str, dict[tuple[int, int], int]]:
    """Fill this rank's parts of the tables. Return table -> (first row, rows) of a part -> number
    of loaded rows. Local.
    """
    # includes the maps of managed collision, which are on several ranks
    for key in decisions.layers:
        for part, offsets in local_chunks(flat[key]):
            part.copy_(source.tensors.read(key, offsets, part.shape))
    loaded: dict[str, dict[tuple[int, int], int]] = {}
    for decision in decisions.tables:
        if decision.source is not None:
            loaded[decision.name] = _fill_table(flat, wanted.tables[decision.name], source.tensors, decision)
    return loaded


def _fill_table(
    flat: Mapping[str, Any], table: StoredTable, tensors: StepTensors, decision: TableDecision
) -> dict[tuple[int, int], int]:
    stored = decision.source
    assert stored is not None
    pairs: dict[tuple[int, int], Pairs] = {}

    def fill(part: torch.Tensor, row: int, column: int, num_columns: int, state: str | None) -> None:
        span = (row, len(part))
        if span not in pairs:
            pairs[span] = decision.row_map.pairs(row, len(part), stored.rows)
        _fill_part(part, row, (column, num_columns), tensors, stored, state, pairs[span])

    for part, (row, column) in local_chunks(flat[table.key]):
        if part.numel():
            fill(part, row, column, part.shape[1], None)
    for name, state in table.states.items() if decision.with_state else ():
        pieces = {piece.state_offset: piece for piece in table.pieces}
        for part, offsets in local_chunks(flat[state.key]) if state.key in flat else ():
            if part.numel() and table.is_row_wise(name):
                piece = pieces[offsets[0]]
                fill(part, piece.row, piece.column, piece.num_columns, name)
            elif part.numel():
                fill(part, offsets[0], offsets[1], part.shape[1], name)
    return {span: len(old) for span, (old, _) in pairs.items()}


def _fill_part(
    part: torch.Tensor,
    first_row: int,
    columns: tuple[int, int],
    tensors: StepTensors,
    stored: StoredTable,
    state: str | None,
    pairs: Pairs,
) -> None:
    """Copy the old rows of `pairs` to their places in `part`. The first row of `part` is the new
    table's row `first_row`.
    """
    old, new = pairs
    if not len(old):
        return
    column, width = columns
    rows_at_once = max(1, BLOCK_BYTES // (4 * width))
    for first in range(int(old[0]), int(old[-1]) + 1, rows_at_once):
        begin, end = np.searchsorted(old, [first, first + rows_at_once])
        if begin == end:
            continue
        low, count = int(old[begin]), int(old[end - 1]) - int(old[begin]) + 1
        if state is None:
            values = tensors.read(stored.key, [low, column], [count, width])
        elif stored.is_row_wise(state):
            values = read_row_state(tensors, stored, state, low, count, (column, column + width))
        else:
            values = tensors.read(stored.states[state].key, [low, column], [count, width])
        targets = torch.from_numpy(new[begin:end].astype(np.int64) - first_row)
        chosen = values[torch.from_numpy(old[begin:end].astype(np.int64) - low)]
        part.index_copy_(0, targets.to(part.device), chosen.to(part.device, part.dtype))


def _report(path: str, decisions: Decisions, loaded: list[dict[str, dict[tuple[int, int], int]]]) -> WarmStartReport:
    tables = []
    for decision in decisions.tables:
        # column shards and replicas hold the same rows, which are counted once
        spans: dict[tuple[int, int], int] = {}
        for part in loaded:
            spans.update(part.get(decision.name, {}))
        changes = list(decision.changes) or ([decision.reason] if decision.reason else [])
        source = decision.source.name if decision.source else None
        tables.append(
            TableReport(decision.name, source, decision.rows, sum(spans.values()), decision.with_state, changes)
        )
    layers = [key.removeprefix("model.") for key in decisions.layers if key.startswith("model.")]
    return WarmStartReport(path, tables, decisions.dropped, layers, decisions.fresh_layers)


def report_json(report: WarmStartReport) -> dict[str, Any]:
    return asdict(report)
