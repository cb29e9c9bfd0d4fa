"""Compute the vectors of all items every few steps. The retrieval task finds hard negatives in them
(model.negatives.hard).

A row's hard negatives are the items with the highest scores for its user. The scores are exact, by
vectors of an earlier step, so hard negatives give a gradient to users only. Each rank has the
vectors of all items.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.data.dataset import load_dataset
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.extras.models.negatives import NegativesConfig, corpus_of, corpus_size
from pipeline.extras.models.tasks.item_rows import NO_ITEM, ItemBags
from pipeline.extras.models.tasks.negatives import append_rows
from pipeline.extras.models.tasks.retrieval import RetrievalTask, gather_rows
from pipeline.extras.models.user_item import TwoTowerConfig
from pipeline.models.tasks.task import task_in
from pipeline.planner.resolved_job import ResolvedJob, resolve_job
from pipeline.runtime.errors import DamagedError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process import watchdog
from pipeline.serving.artifact.deltas import tensors_from_bytes, tensors_to_bytes
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState

FILE = "item_index.bin"
logger = get_logger("pipeline.training")


class ItemBatches:
    """Batches with one row for each item and no user, in the form of the training batches."""

    def __init__(self, resolved: ResolvedJob, item_features: list[str], num_rows: int) -> None:
        """num_rows: rows of a batch."""
        job, data = resolved.job, resolved.dataset
        self._keys, self._num_dense, self._num_rows = data.sparse_feature_names, len(data.dense_features), num_rows
        self._weights = torch.zeros(0) if data.weighted_features else None
        self._bags = ItemBags(data, job.data.path, item_features, job.data.synthetic_multi_hot)
        self._split = IdSplitter(resolved.all_tables, skip_empty_bags=resolved.world_size > 1)
        self.num_items = corpus_size(corpus_of(item_features[0], resolved.tables, "model.negatives.hard.count"))

    def batch(self, first: int) -> Batch:
        """Return the batch of items first, first + 1, ... Rows after the last item have no ids."""
        ids = first + np.arange(self._num_rows)
        nothing = keyed_jagged_tensor(
            self._keys, torch.zeros(0), torch.zeros(0), 0, [0] * len(self._keys), self._weights
        )
        rows = append_rows(nothing, self._num_rows, self._bags(np.where(ids <= self.num_items, ids, NO_ITEM)))
        zeros = torch.zeros(self._num_rows)
        return Batch(torch.zeros(self._num_rows, self._num_dense), self._split(rows), zeros, zeros)


@register("hook", "item_index")
class ItemIndex(Hook):
    """Gives the retrieval task the vectors of all items, if model.negatives.hard.count is set.

    A checkpoint has the vectors in a file, so that a resumed run has the same hard negatives.
    """

    runs_after = "record"  # the vectors of a step are complete before the step is saved

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        negatives = getattr(job.model, "negatives", None)
        self._config = negatives.hard if isinstance(negatives, NegativesConfig) and negatives.hard.count else None

    @property
    def _task(self) -> RetrievalTask:
        task = task_in(self.parts.task)
        assert isinstance(task, RetrievalTask)
        return task

    @cached_property
    def _batches(self) -> ItemBatches:
        job, context = self.job, self.parts.context
        resolved = resolve_job(job, load_dataset(job.data.path), context.world_size)
        return ItemBatches(resolved, cast(TwoTowerConfig, job.model).item_features, self.parts.reader.batch_size)

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        if self._config is None:
            return
        step = int(manifest["step"])
        content = self.parts.checkpointer.read_file(step, FILE)
        if content is None:  # the run had no hard negatives until now
            self._task.item_index = None
            return
        found = tensors_from_bytes(content)
        if len(found) != 1 or found[0].dim() != 2:
            raise DamagedError(f"{FILE} of step {step} does not hold the vectors of all items")
        self._task.item_index = found[0].to(self.parts.context.device)

    def on_step_start(self, state: TrainingState) -> None:
        if self._config is not None and self._task.item_index is None:
            self._build(state)

    def on_step_end(self, state: TrainingState) -> None:
        if self._config is not None and state.is_due(self._config.every_steps):
            self._build(state)

    def saved_files(self, state: TrainingState) -> dict[str, bytes]:
        index = None if self._config is None else self._task.item_index
        if index is None or not self.parts.context.is_main:
            return {}
        return {FILE: tensors_to_bytes([index.cpu()])}

    @torch.no_grad()
    def _build(self, state: TrainingState) -> None:
        """Compute the vectors of all items by the current tables and layers. Collective."""
        parts, batches = self.parts, self._batches
        context, num_rows = parts.context, parts.reader.batch_size
        state.detach()
        was_training, found = parts.model.training, []
        parts.model.eval()
        with watchdog.stage("computing the vectors of items"):
            for first in range(1, batches.num_items + 1, num_rows * context.world_size):
                batch = batches.batch(first + context.rank * num_rows)
                _, prediction = parts.model(batch.to(context.device))
                found.append(gather_rows(prediction.items))
        parts.model.train(was_training)
        self._task.item_index = torch.cat(found)[: batches.num_items]
        logger.info("step %d  vectors of %s items computed for hard negatives", state.step, f"{batches.num_items:,}")
