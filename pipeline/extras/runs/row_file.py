"""Write a Parquet file with one row for each row that an evaluation measures: `evaluate predictions=FILE`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from pipeline.data.prepare.write_shards import PARQUET_OPTIONS
from pipeline.data.read.batch import Batch
from pipeline.data.read.reader import ShardReader
from pipeline.models.tasks.click_metrics import gather_to_main
from pipeline.models.tasks.labels import LabelsTask
from pipeline.models.tasks.task import task_in
from pipeline.runtime.errors import TrainingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.runtime.storage import atomic, storage
from pipeline.runtime.storage.arrow_files import open_input
from pipeline.runtime.storage.private import temporary_folder
from pipeline.serving.artifact.task_quality import ServedTask, scores_of
from pipeline.serving.scoring.scorer import SCORE, score_columns
from pipeline.training.readers import on_all_ranks

ROWS_PER_ROW_GROUP = 1 << 17  # ranks hold so many rows together
ABOUT = b"evaluation"  # the key of the file's metadata that says which evaluation wrote it
logger = get_logger("pipeline.training.evaluate")


@contextmanager
def row_file(
    path: str,
    about: dict[str, str],
    model: nn.Module,
    reader: ShardReader,
    context: DistributedContext,
    has_weights: bool,
) -> Iterator[RowFile]:
    """Yield a collector that publishes `path` in compute(). If compute() is not reached, no file is
    left. Collective.

    about: which evaluation this is. Raises TrainingError if `path` exists, unless the same
    evaluation has written it.
    """
    names = json.dumps(about)
    with ExitStack() as stack:

        def begin() -> str:
            if not context.is_main:
                return ""
            _check_replaceable(path, names)
            parent = storage.dirname(path) if storage.is_local(path) else temporary_folder()
            return os.path.join(stack.enter_context(atomic.locked_attempt(parent, ".rows-")), "rows")

        staged = on_all_ranks(begin, context)
        rows = RowFile((staged, path), names, model, reader, context, has_weights)
        stack.callback(rows.close)
        yield rows


def _check_replaceable(path: str, about: str) -> None:
    if not storage.exists(path):
        return
    found = None
    if storage.is_file(path):
        with suppress(pa.ArrowInvalid), open_input(path) as file:
            found = (pq.read_schema(file).metadata or {}).get(ABOUT)
    if found != about.encode():
        raise TrainingError(
            f"predictions={path} exists and was not written by this evaluation, {about}: remove it, or choose "
            "another file"
        )


class RowFile:
    """The rows of one evaluation. Rank 0 gets the rows of all ranks for each row group, sorts them
    by their position in the split, and writes them. So any number of ranks gives the same rows in
    the same order.
    """

    def __init__(
        self,
        paths: tuple[str, str],
        about: str,
        model: nn.Module,
        reader: ShardReader,
        context: DistributedContext,
        has_weights: bool,
    ) -> None:
        """paths: where rank 0 writes the file, and where it is published."""
        (self._staged, self._path), self._context = paths, context
        task = task_in(model)
        targets = task.targets if isinstance(task, LabelsTask) else []
        # one binary label has no name in the columns of predict either
        is_plain = len(targets) == 1 and targets[0].kind == "binary"
        self._tasks = [] if is_plain else [ServedTask(each.name, each.kind, each.width) for each in targets]
        scores = score_columns(self._tasks)
        self._floats = [*(name.replace(SCORE, "label", 1) for name in scores), *scores, "weight"]
        self._schema = pa.schema(
            [
                ("row", pa.int64()),
                *((name, pa.float32()) for name in (self._floats if has_weights else self._floats[:-1])),
                *([("group", pa.int64())] if reader.has_groups else []),
            ],
            {ABOUT: about},
        )
        self._positions = reader.positions(epoch=0)
        self._batches_at_once = max(1, ROWS_PER_ROW_GROUP // reader.global_batch_size)
        self._batches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_rows = 0
        self._writer: pq.ParquetWriter | None = None

    def update(self, clicks: dict[str, Any], batch: Batch, prediction: Any) -> None:
        """Add a batch. Collective: now and then rank 0 writes a row group."""
        if not self._tasks and not clicks:
            raise TrainingError("predictions: this model gives no score for a row of the split; leave the key out")
        outputs = prediction.outputs if hasattr(prediction, "outputs") else prediction.logits
        present, num_rows = batch.is_present.cpu(), batch.batch_size
        weights = batch.sample_weights.cpu().reshape(num_rows, -1)
        labels = batch.labels.cpu().reshape(num_rows, -1).masked_fill(weights == 0, torch.nan)
        scores = scores_of(self._tasks, outputs.float().cpu()).reshape(num_rows, -1)
        groups = torch.zeros(num_rows, dtype=torch.int64) if batch.groups is None else batch.groups
        numbers = torch.stack([torch.from_numpy(next(self._positions)), groups], dim=1)
        floats = torch.cat([labels, scores, weights.amax(dim=1, keepdim=True)], dim=1)
        self._batches.append((numbers[present], floats[present]))
        if len(self._batches) == self._batches_at_once:
            self._write()

    def compute(self, split: str, step: int, metrics: dict[str, float]) -> None:
        """Publish the file. Collective."""
        if self._batches:
            self._write()
        on_all_ranks(self._publish, self._context)

    def close(self) -> None:
        if self._writer:
            self._writer.close()
            self._writer = None

    def _write(self) -> None:
        """Write the batches of all ranks as a row group. Collective."""
        parts = (torch.cat(list(part)).flatten() for part in zip(*self._batches, strict=True))
        numbers, floats = (gather_to_main(part, self._context).numpy() for part in parts)
        self._batches = []
        on_all_ranks(lambda: self._write_group(numbers.reshape(-1, 2), floats), self._context)

    def _write_group(self, numbers: np.ndarray, floats: np.ndarray) -> None:
        if not self._context.is_main:
            return
        order = np.argsort(numbers[:, 0])
        columns = dict(zip(self._floats, floats.reshape(len(numbers), -1)[order].T, strict=True))
        columns |= {"row": numbers[order, 0], "group": numbers[order, 1]}
        # a label that does not count in a row is NaN here and null in the file
        arrays = [pa.array(columns[name], from_pandas=name.startswith("label")) for name in self._schema.names]
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._staged, self._schema, **PARQUET_OPTIONS)
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._num_rows += len(order)

    def _publish(self) -> None:
        self.close()
        if self._context.is_main:
            atomic.publish_file(self._staged, self._path)
            logger.info("%s rows with their scores written to %s", f"{self._num_rows:,}", self._path)
