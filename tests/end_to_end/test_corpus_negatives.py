"""A two-tower with negatives from the corpus, from its data to a resumed run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import load_dataset
from pipeline.extras.models.tasks.item_index import ItemIndex
from pipeline.planner.resolved_job import resolve_job
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training.hooks.base import TrainingState
from pipeline.training.readers import open_reader
from tests.end_to_end.user_items import job_words, train_on_rank
from tests.support.ranks import RankPool
from tests.support.stored_tensors import stored_tensors

MIXED = [
    "model.negatives.kind=mixed",
    "model.negatives.count=31",
    "model.negatives.power=0.75",
    "trainer.max_steps=8",
    "model.negatives.hard.count=3",
    "model.negatives.hard.every_steps=3",
    "checkpoint.save_every_steps=4",
    "trainer.log_every_steps=2",
]


def _losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.long
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped_and_one_rank_the_losses_of_two(
    ranks: RankPool, user_item_data: str, tmp_path: Path
) -> None:
    whole = ranks.run(2, train_on_rank, job_words(user_item_data, tmp_path / "whole", *MIXED))[0]
    ranks.run(2, train_on_rank, job_words(user_item_data, tmp_path / "cut", *MIXED, "trainer.max_steps=5"))
    cut = ranks.run(2, train_on_rank, job_words(user_item_data, tmp_path / "cut", *MIXED))[0]
    assert stored_tensors(cut.checkpoint) == stored_tensors(whole.checkpoint)
    alone = ranks.run(1, train_on_rank, job_words(user_item_data, tmp_path / "alone", *MIXED, "world_size=1"))[0]
    assert _losses(tmp_path / "alone") == pytest.approx(_losses(tmp_path / "whole"), rel=1e-5)
    assert alone.validation == pytest.approx(whole.validation, abs=1e-2)


def test_a_training_batch_has_sampled_items_with_their_features_and_an_evaluation_has_none(
    user_item_data: str, tmp_path: Path
) -> None:
    context = DistributedContext(0, 1, 0, 1, torch.device("cpu"), "gloo")
    job = load_config(TrainJob, job_words(user_item_data, tmp_path, *MIXED, "world_size=1"))
    resolved = resolve_job(job, load_dataset(user_item_data), 1)
    reader = open_reader(resolved, "train", context)
    batch = next(reader.batches(0))
    assert len(batch.labels) == len(batch.dense_features) == 512
    items, genres, users = (batch.sparse_features[name] for name in ("item_id", "item_genre", "user_id"))
    rows = list(zip(items.values().tolist(), genres.values().tolist(), strict=True))
    known, sampled = dict(rows[:512]), rows[512:]  # an item has one genre
    assert len(sampled) == 31 and len(set(sampled)) > 10
    assert all(known.get(item, genre) == genre != 0 for item, genre in sampled)
    assert users.lengths()[512:].sum() == 0 and items.lengths().tolist() == [1] * 543
    assert reader.empty_batch().sparse_features.stride() == 543
    for split, every_row in (("validation", False), ("train", True)):
        read = next(open_reader(resolved, split, context, every_row=every_row).batches(0))
        assert read.sparse_features.stride() == len(read.labels)


def test_the_index_of_hard_negatives_has_the_items_of_the_current_tables(
    user_item_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    indexes: list[torch.Tensor] = []
    build = ItemIndex._build

    def checked(self: ItemIndex, state: TrainingState) -> None:
        build(self, state)
        index, batch = self._task.item_index, next(self.parts.validation_reader.batches(0))
        with torch.no_grad():
            _, prediction = self.parts.model.eval()(batch)
        self.parts.model.train()
        known = prediction.item_ids > 0
        torch.testing.assert_close(index[prediction.item_ids[known] - 1], prediction.items[known])
        built.append(state.step)
        indexes.append(index)

    monkeypatch.setattr(ItemIndex, "_build", checked)
    train_on_rank(0, job_words(user_item_data, tmp_path, *MIXED, "world_size=1"))
    assert built == [0, 3, 6]
    assert all(not torch.allclose(one, two, atol=1e-3) for one, two in itertools.pairwise(indexes))
