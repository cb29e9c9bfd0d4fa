"""What the tests of trainings that follow a stream share: rows of batches, a job, its newest step and tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.chains import open_tensors
from pipeline.checkpoint.steps import list_steps, step_path
from pipeline.config.data import DataConfig
from pipeline.config.retraining import StreamConfig
from pipeline.data.read.batch import Batch
from pipeline.data.read.endless import EndOfInputError
from tests.support.forks import WarmCommand

FAST = StreamConfig(poll_s=0.001, idle_s=0.01)
CRITEO = DataConfig(name="clicks", format="criteo_tsv")


def rows_of(batch: Batch) -> list[bytes]:
    """Each row's bytes: dense, label and ids, of features of one id each."""
    ids = batch.sparse_features.values().view(-1, batch.batch_size).numpy()
    dense, labels = batch.dense_features.numpy(), batch.labels.numpy()
    return [dense[i].tobytes() + labels[i].tobytes() + ids[:, i].tobytes() for i in range(batch.batch_size)]


def until_the_end(batches: Iterator[Batch], end: type[EndOfInputError] = EndOfInputError) -> list[list[bytes]]:
    found = []
    with pytest.raises(end):
        while True:
            found.append(rows_of(next(batches)))
    return found


def follow_words(prepared: str, source: Path, run: Path, *more: str) -> list[str]:
    return [
        "experiment=quickstart", "hardware=cpu", "follow=true", f"source={source}", f"data.path={prepared}", f"run_dir={run}",
        f"registry.path={run}/registry", "trainer.global_batch_size=100", "checkpoint.save_every_minutes=null",
        "checkpoint.save_every_steps=7", "checkpoint.differential=true", "stream.poll_s=0.05", "trainer.log_every_steps=5",
        "tables.default.embedding_dim=4", "model.dense_arch_layer_sizes=[16,4]", "model.over_arch_layer_sizes=[16,1]",
        "trainer.evaluate_max_batches=1", "data.reader.num_streams=20", *more,
    ]  # fmt: skip


def newest_step(run: Path) -> int:
    folder = run / "follow" / "checkpoints"
    return max(list_steps(str(folder)), default=-1) if folder.is_dir() else -1


def values_of(run: Path, step: int) -> Any:
    """Of the step: its tensors, whole, whatever chain it is of."""
    tensors = open_tensors(step_path(str(run / "follow" / "checkpoints"), step))
    return {key: tensors.read(key, [0] * len(tensors.shape(key)), tensors.shape(key)) for key in tensors.entries}


def wait_until(done: Callable[[], bool], process: WarmCommand, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)


def start_retrain(words: list[str], num_ranks: int = 1, max_restarts: int = 0) -> WarmCommand:
    """`pipeline retrain` on so many ranks, whose output is the test's own."""
    if num_ranks == 1:
        return WarmCommand("pipeline retrain", words, output=(1, 2))
    agent = ["--nproc-per-node", str(num_ranks), "--max-restarts", str(max_restarts), "-m", "pipeline", "retrain"]
    return WarmCommand("pipeline agent", [*agent, *words], output=(1, 2))


def copy_journal(run: Path, into: Path) -> str:
    """A training in `into` then reads the batches that the one in `run` has read; the journal's text."""
    journal = (run / "follow/stream/journal.jsonl").read_text()
    (into / "follow/stream").mkdir(parents=True)
    (into / "follow/stream/journal.jsonl").write_text(journal)
    return journal
