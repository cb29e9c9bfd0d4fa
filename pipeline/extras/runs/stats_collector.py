"""Collect statistics of an evaluation over all ranks (pipeline.extras.runs.evaluation_stats)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pipeline.data.quality import log_losses, probabilities
from pipeline.data.read.batch import Batch, first_ids
from pipeline.data.read.reader import ShardReader
from pipeline.extras.runs.evaluation_stats import MAX_BLOCKS, Bin, Blocks, EvaluationStats, Slice, summarize_rows
from pipeline.models.tasks.click_metrics import EXACT_ROWS, gather_to_main
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.distributed import DistributedContext

logger = get_logger(__name__)
HEAD_IDS = (
    # per feature; ids are sorted by frequency, so these are the slices with most rows, and 0 is the
    # unknown id
    64
)


class StatsCollector:
    """Collects statistics of each binary label. Every rank has one collector for each evaluation."""

    def __init__(self, reader: ShardReader, context: DistributedContext, max_rows: int = EXACT_ROWS) -> None:
        self._make = lambda: LabelRows(reader, context, max_rows)
        self._labels: dict[str, LabelRows] = {}  # by the prefix of the label's metrics
        self._dataset, self._positions = reader.dataset_fingerprint, reader.positions(epoch=0)

    def update(self, clicks: dict[str, Any], batch: Batch, prediction: Any) -> None:
        """Local: add a batch, in the reader's order. clicks: prefix -> a prediction with logits,
        labels and sample_weights [batch].
        """
        positions = next(self._positions)
        for prefix, prediction in clicks.items():
            if prefix not in self._labels:
                self._labels[prefix] = self._make()
            self._labels[prefix].update(prediction, batch, positions)

    def compute(self, split: str, step: int, metrics: dict[str, float]) -> EvaluationStats | None:
        """Collective: return the statistics on rank 0, of the first label, and of other
        labels in `others`. None if no label has any, and on other ranks. All ranks have seen
        batches of the same labels.
        """
        found = []
        for prefix, rows in self._labels.items():
            if sums := rows.compute(f"{split} {prefix.removesuffix('/')}".rstrip()):
                found.append(EvaluationStats(split, step, self._dataset, metrics, *sums, prefix.removesuffix("/")))
        return replace(found[0], others=tuple(found[1:])) if found else None


class LabelRows:
    """Collects statistics of one label on one rank. It keeps 13 bytes per row; rank 0 gets the rows
    of all ranks at the end. If all ranks have more than `max_rows` rows together, nothing is kept.
    Slices are computed for features that use the data set's ids.
    """

    def __init__(self, reader: ShardReader, context: DistributedContext, max_rows: int) -> None:
        self._max_rows, self._num_kept, self._is_too_long = max_rows, 0, False
        self._features, self._context, self._num_rows = reader.plain_features, context, reader.num_rows
        self._num_blocks = min(MAX_BLOCKS, reader.num_rows)
        # rows, weights, squared weights, and weighted labels, predictions, losses
        self._sums = np.zeros((6, len(self._features) * HEAD_IDS))
        self._rows: list[tuple[torch.Tensor, ...]] = []

    def update(self, prediction: Any, batch: Batch, positions: NDArray[np.integer]) -> None:
        """Local: add a batch, whose rows are at `positions` of the split."""
        if self._is_too_long:
            return
        real = (prediction.sample_weights > 0).cpu().numpy()
        logits, labels, weights = (
            getattr(prediction, name).float().cpu().numpy()[real] for name in ("logits", "labels", "sample_weights")
        )
        blocks = (positions[real] * self._num_blocks // self._num_rows).astype(np.int32)
        parts = (blocks, logits, labels.astype(np.uint8), weights)
        self._rows.append(tuple(torch.from_numpy(part) for part in parts))
        self._num_kept += len(labels)
        if self._num_kept > self._max_rows:  # already on this rank alone
            self._rows, self._is_too_long = [], True
            return
        predictions = probabilities(logits)
        summed = (labels, predictions, log_losses(logits, labels))
        self._add_slices(batch, real, [None, weights, weights**2, *(weights * values for values in summed)])

    def _add_slices(self, batch: Batch, real: NDArray[np.bool_], values: list[NDArray[np.floating] | None]) -> None:
        for index, feature in enumerate(self._features):
            ids = first_ids(batch.sparse_features[feature])[real]
            head = ids < HEAD_IDS
            at = slice(index * HEAD_IDS, (index + 1) * HEAD_IDS)
            for sums, value in zip(self._sums, values, strict=True):
                sums[at] += np.bincount(ids[head], None if value is None else value[head], HEAD_IDS)

    def compute(self, name: str) -> tuple[Blocks, list[Bin], list[Slice]] | None:
        """Collective: return the sums on rank 0, or None if there are no rows or too many; None on
        other ranks.
        """
        num_rows = torch.tensor(
            self._num_kept, device=self._context.device
        )  # a rank that stopped reports more than max_rows
        dist.all_reduce(num_rows)
        if int(num_rows) > self._max_rows:
            logger.info(
                "%s  no statistics of blocks, slices and reliability: the evaluation has more than %s "
                "rows, and rank 0 would hold all of them",
                name,
                f"{self._max_rows:,}",
            )
            return None
        kinds = (torch.int32, torch.float32, torch.uint8, torch.float32)
        local = [
            torch.cat([rows[index] for rows in self._rows]) if self._rows else torch.empty(0, dtype=kind)
            for index, kind in enumerate(kinds)
        ]
        blocks, logits, labels, weights = (gather_to_main(values, self._context).numpy() for values in local)
        sums = torch.from_numpy(self._sums).to(self._context.device)
        dist.reduce(sums, dst=0)
        if not self._context.is_main or not len(logits):
            return None
        sums_of_blocks, reliability = summarize_rows(blocks, logits, labels, self._num_blocks, weights)
        return sums_of_blocks, reliability, self._slices(sums.cpu().numpy())

    def _slices(self, sums: NDArray[np.float64]) -> list[Slice]:
        found = [
            Slice(feature, id, int(rows), *sums_of_id)
            for index, feature in enumerate(self._features)
            for id, (rows, *sums_of_id) in enumerate(sums[:, index * HEAD_IDS : (index + 1) * HEAD_IDS].T.tolist())
        ]
        return [each for each in found if each.rows]
