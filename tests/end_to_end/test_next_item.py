"""SASRec from a raw file of sequences to the items that a server returns: inspect, prepare, train, evaluate, export."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest

from pipeline.cli.command_line import load_config
from pipeline.cli.inspect import inspect
from pipeline.config.jobs.prepare import InspectJob, PrepareJob
from pipeline.data.prepare.run import prepare
from pipeline.training.summary import TrainSummary
from tests.serving.exports import run_export
from tests.serving.servers import running
from tests.support.jobs import evaluate_on_rank, train_on_rank
from tests.support.ranks import RankPool
from tests.support.stored_tensors import stored_tensors

NUM_ITEMS, NUM_USERS = 40, 600
ASKED = 5


def _sequences() -> list[list[str]]:
    """A user takes every third item, in a circle, and one item in ten is any item."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(NUM_USERS):
        items = [int(random.integers(NUM_ITEMS))]
        for _ in range(random.integers(4, 12)):
            items.append(int(random.integers(NUM_ITEMS)) if random.random() < 0.1 else (items[-1] + 3) % NUM_ITEMS)
        found.append([f"item{item}" for item in items])
    return found


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words of a job on the prepared file, whose config `inspect` wrote."""
    folder = tmp_path_factory.mktemp("next_item")
    raw, proposed = folder / "taken.txt", folder / "conf" / "data" / "taken.yaml"
    raw.write_text("".join(f"user{user} {' '.join(items)}\n" for user, items in enumerate(_sequences())))
    proposed.parent.mkdir(parents=True)
    inspect(load_config(InspectJob, [f"source={raw}", f"output={proposed}"]))
    named = ["--config-dir", str(folder / "conf"), "data=taken", f"data.path={folder / 'prepared'}"]
    prepare(load_config(PrepareJob, [*named, f"source={raw}", "data.columns.sequence.history.max_length=8"]))
    return [
        *named,
        "model=sasrec",
        "optimizer=adam",
        "hardware=cpu",
        "optimizer.sparse.lr=0.02",
        "optimizer.dense.lr=0.02",
        "tables.default.embedding_dim=16",
        "model.recall_at=[1,10]",
        "model.dropout=0",
        "model.negatives.kind=mixed",
        "model.negatives.count=20",
        "trainer.global_batch_size=128",
        "trainer.epochs=10",
        "checkpoint.save_every_steps=20",
    ]


@pytest.fixture(scope="module")
def trained(ranks: RankPool, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> TrainSummary:
    """Trained on two ranks, which stopped and resumed."""
    run = f"run_dir={tmp_path_factory.mktemp('trained') / 'run'}"
    ranks.run(2, train_on_rank, [*words, run, "trainer.max_steps=20"])
    summary: TrainSummary = ranks.run(2, train_on_rank, [*words, run])[0]
    return summary


@pytest.mark.long
def test_the_planted_next_item_is_found_and_a_resumed_run_is_the_uninterrupted_one(
    ranks: RankPool, words: list[str], trained: TrainSummary, tmp_path: Path
) -> None:
    assert trained.validation["recall_at_1"] > 0.8 and trained.validation["ndcg_at_10"] > 0.85
    assert trained.validation["catalogue_items"] == NUM_ITEMS
    whole = ranks.run(2, train_on_rank, [*words, f"run_dir={tmp_path / 'whole'}"])[0]
    assert stored_tensors(whole.checkpoint) == stored_tensors(trained.checkpoint)


@pytest.mark.long
def test_one_rank_trains_and_evaluates_as_two(
    ranks: RankPool, words: list[str], trained: TrainSummary, tmp_path: Path
) -> None:
    few = [*words, "trainer.max_steps=10"]
    one, two = (
        ranks.run(count, train_on_rank, [*few, f"run_dir={tmp_path / str(count)}", f"world_size={count}"])[0]
        for count in (1, 2)
    )
    assert one.validation == pytest.approx(two.validation, abs=5e-3)
    found = ranks.run(1, evaluate_on_rank, [f"run={trained.run_dir}", "split=validation", "world_size=1"])[0]
    assert found.metrics == pytest.approx(trained.validation, abs=2e-3)


@pytest.mark.long
def test_a_server_returns_the_items_that_an_evaluation_ranks_first(trained: TrainSummary, tmp_path: Path) -> None:
    artifact = run_export(trained.run_dir, tmp_path / "artifact", "precision=fp32", "parity.splits=[validation]")
    about = artifact.certificate["splits"]["validation"]
    assert about["max_vector_difference"] < 1e-5
    hits = 0
    with running("pipeline serve", f"artifact={artifact.artifact}", "server.port=0") as server:
        for items in (asked := _sequences()[:100]):
            history = items[:-2]
            body = {"rows": [{"history": history}], "k": ASKED, "excluded": history[-8:]}
            answer = httpx.post(f"{server.url}/retrieve", json=body).json()
            (found,) = answer["items"]
            assert len(found) == ASKED and not set(found) & set(history[-8:])
            hits += items[-2] == found[0]
    assert hits / len(asked) == pytest.approx(trained.validation["recall_at_1"], abs=0.1)
