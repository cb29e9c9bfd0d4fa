"""Report for each table at the end of a training how many of its rows were updated, and
their norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.checkpoint.stored_rows import StoredRows
from pipeline.checkpoint.tables import MODEL, STATE, flatten, inventory_of_state, local_chunks
from pipeline.config.registry import register
from pipeline.runtime.logs import to_json
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.runtime.storage import storage
from pipeline.training.hooks.base import Hook, TrainingState

FILE = "tables.json"
ROWS_AT_ONCE = 1 << 20
# squares, updated rows, rows; each row counts by its share of the columns
Sums = tuple[float, float, float]


@register("hook", "table_stats")
class TableStats(Hook):
    """Write <run_dir>/tables.json: table -> rows, dim, updated (None if its optimizer has no
    state), norm.

    norm: root mean square of the rows' L2 norms, only over updated rows if it is known which rows
    were updated. The function reads the tables once.
    """

    runs_after = "rollback"

    def on_fit_end(self, state: TrainingState) -> None:
        if state.preempted or self.parts.plan is None:
            return
        stats = table_stats(self.parts.model.state_dict(), self.parts.optimizer.state_dict(), self.parts.context)
        if self.parts.writer is not None:
            storage.publish_text(f"{self.job.run_dir}/{FILE}", to_json({"step": state.step, "tables": stats}, indent=1))


def table_stats(
    model: dict[str, Any], optimizer: dict[str, Any], context: DistributedContext
) -> dict[str, dict[str, float | None]]:
    """Collective: return the statistics from the sharded state of a model and its optimizer, without
    tables on SSDs.
    """
    flat = flatten({MODEL.rstrip("."): model, "optimizer": optimizer})
    tables = inventory_of_state({key: value for key, value in flat.items() if hasattr(value, "size")}).tables
    names = sorted(tables)
    sums = torch.zeros((len(names), 4), dtype=torch.float64)
    for index, name in enumerate(names):
        weights = sorted(local_chunks(flat[tables[name].key]), key=lambda chunk: chunk[1][::-1])
        if not all(isinstance(tensor, torch.Tensor) for tensor, _ in weights):
            continue
        state = _state_of(flat, tables[name].key, name)
        has_state = state is not None and [len(part) for part in state] == [len(tensor) for tensor, _ in weights]
        parts = [
            _sums(tensor, state[at] if has_state and state else None, tables[name].dim)
            for at, (tensor, _) in enumerate(weights)
        ]
        sums[index, :3] = torch.tensor(parts, dtype=torch.float64).sum(dim=0) if parts else 0.0
        sums[index, 3] = float(bool(parts) and not has_state)
    sums = sums.to(context.device)
    if context.world_size > 1:
        dist.all_reduce(sums)
    found: dict[str, dict[str, float | None]] = {}
    for name, (squares, updated, held, unknown) in zip(names, sums.cpu().tolist(), strict=True):
        # for a table with a copy on every rank
        copies = held / tables[name].rows if tables[name].rows else 0.0
        if copies:
            counted = held if unknown else updated
            found[name] = {
                "rows": tables[name].rows,
                "dim": tables[name].dim,
                "updated": None if unknown else round(updated / copies),
                "norm": (squares / counted) ** 0.5 if counted else 0.0,
            }
    return found


def _state_of(flat: dict[str, Any], weight: str, table: str) -> list[torch.Tensor] | None:
    """Return this rank's parts of an optimizer state that is 0 until a row is updated, in the order
    of the table's parts; None if there is no such state.
    """
    prefix = f"{STATE}{weight.removeprefix(MODEL)}.{table}."
    for name in ("momentum1", "sum", "exp_avg_sq", "momentum2"):
        value = flat.get(prefix + name)
        if value is not None:
            return [tensor for tensor, _ in sorted(local_chunks(value), key=lambda chunk: chunk[1][::-1])]
    return None


def _sums(weights: torch.Tensor, state: torch.Tensor | None, dim: int) -> Sums:
    """Return the sums over a part of a table [rows, columns]. Its state is [rows], or has the shape
    of the weights.
    """
    share, squares, updated = weights.shape[1] / dim, 0.0, 0.0
    for values, own_state in _blocks(weights, state):
        part = values.detach().float().square().sum(dim=1)
        if own_state is not None:
            mask = own_state.detach() != 0
            mask = mask.any(dim=1) if mask.dim() > 1 else mask
            updated += float(mask.sum()) * share
            part = part[mask.to(part.device)]
        squares += float(part.double().sum())
    return squares, updated, len(weights) * share


def _blocks(weights: torch.Tensor, state: torch.Tensor | None) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield blocks of rows. If weights and state are both in a row store, unchanged rows are
    skipped, because their state is 0.
    """
    if isinstance(weights, StoredRows) and isinstance(state, StoredRows):
        changed = np.flatnonzero(weights.changed_rows())
        for begin in range(0, len(changed), weights.rows_a_block):
            rows = changed[begin : begin + weights.rows_a_block]
            yield weights.read_rows(rows), state.read_rows(rows)
        return
    rows_at_once = weights.rows_a_block if isinstance(weights, StoredRows) else ROWS_AT_ONCE
    for begin in range(0, len(weights), rows_at_once):
        span = slice(begin, begin + rows_at_once)
        yield weights[span], None if state is None else state[span]
