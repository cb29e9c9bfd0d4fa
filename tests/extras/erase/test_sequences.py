"""An item, or a user, of a model of sequences is erased: from lines of raw rows, histories, steps, and the catalogue."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import load_dataset
from pipeline.data.prepare.run import prepare
from pipeline.extras.erase.config import EraseJob
from pipeline.extras.erase.datasets import id_of
from pipeline.extras.erase.run import describe, erase
from pipeline.extras.retrieval.queries import Wish
from pipeline.extras.retrieval.retriever import Retriever
from pipeline.training.train import train
from tests.extras.erase.test_erase import holding
from tests.extras.erase.test_retrievers import agree, rows_of, vectors_of_items
from tests.serving.exports import run_export

ITEM, USER, NUM_ITEMS = "7", "11", 40  # numbers, as in public data sets: an item and a user may be equal


def lines_of(num_users: int) -> list[list[str]]:
    """A user takes every third item, in a circle."""
    draw = np.random.default_rng(0)
    first, counts = draw.integers(0, NUM_ITEMS, num_users), draw.integers(5, 12, num_users)
    return [
        [str(user), *(str((begin + 3 * place) % NUM_ITEMS) for place in range(count))]
        for user, (begin, count) in enumerate(zip(first.tolist(), counts.tolist(), strict=True))
    ]


def prepared(folder: Path, name: str) -> Path:
    words = ["data=user_sequences", f"source={folder}/raw.txt", f"data.path={folder}/{name}", "threads=1"]
    prepare(load_config(PrepareJob, [*words, "data.columns.sequence.history.max_length=8"]))
    return folder / name


def train_to(folder: Path, steps: int) -> None:
    words = [
        "experiment=user_sequences_sasrec", f"data.path={folder}/data", f"run_dir={folder}/run", "hardware=cpu", f"trainer.max_steps={steps}",
        "data.columns.sequence.history.max_length=8", "tables.default.embedding_dim=16", "model.negatives.count=20", "trainer.global_batch_size=64",
        "checkpoint.save_every_steps=5", "checkpoint.keep_last_n=9", "logger.tensorboard=false",
    ]  # fmt: skip
    train(load_config(TrainJob, words))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sequences")
    (folder / "raw.txt").write_text("".join(" ".join(line) + "\n" for line in lines_of(400)))
    prepared(folder, "data")
    train_to(folder, 10)
    run_export(folder / "run", folder / "artifact", "precision=fp32", "parity.splits=[validation]")
    shutil.copytree(folder, folder.parent / "sequences_copy")
    return folder


@pytest.fixture
def world(trained: Path) -> Path:
    """The folder as it was; its config names its path."""
    shutil.rmtree(trained)
    shutil.copytree(trained.parent / "sequences_copy", trained)
    return trained


def answers(artifact: Path, histories: list[list[str]], without: str) -> list[tuple[list[str], np.ndarray]]:
    retriever = Retriever.load(str(artifact))
    found = retriever.retrieve(
        pa.table({"history": histories}), [(1, Wish(20, excluded=(without,))) for _ in histories]
    )
    assert all(each is not None for each in found.scores)
    return [(retriever.items.values_at(each.positions).to_pylist(), each.scores) for each in found.scores]


@pytest.mark.long
def test_item_of_a_sequence_model_is_erased(world: Path) -> None:
    histories = [line[1:9] for line in lines_of(60)]
    own = np.array([ITEM in each for each in histories])
    before, vectors = answers(world / "artifact", histories, ITEM), vectors_of_items(world / "artifact")
    patterns = rows_of(world, "item_id", ITEM, "run") | {vectors[ITEM]}
    assert len(holding(world, patterns)) >= 3 and own.any() and not own.all()
    row = id_of(str(world / "data"), load_dataset(str(world / "data")).sparse_feature("item_id"), ITEM)
    job = EraseJob(feature="item_id", value=ITEM, folders=[str(world)])
    result = erase(job)
    assert result.left == {} and holding(world, patterns) == []
    wanted = [[line[0], *(each for each in line[1:] if each != ITEM)] for line in lines_of(400)]
    assert [line.split() for line in (world / "raw.txt").read_text().splitlines()] == wanted
    for path in (world / "data").glob("*/*.parquet"):
        table = pq.read_table(path)
        if "history" in table.column_names:
            assert row not in table["history"].combine_chunks().flatten().to_pylist() + table["item_id"].to_pylist()

    kept = vectors_of_items(world / "artifact")
    assert kept == {item: vector for item, vector in vectors.items() if item != ITEM}
    after = answers(world / "artifact", histories, ITEM)
    unknown = answers(
        world / "artifact", [["no" if each == ITEM else each for each in line] for line in histories], ITEM
    )
    for number, is_own in enumerate(own):
        assert agree(after[number], unknown[number]) and (is_own or agree(after[number], before[number]))

    train_to(world, 15)  # its place is a negative now, but nothing brings the old row back
    run_export(world / "run", world / "newer", "precision=fp32", "parity.splits=[validation]")
    assert holding(world, patterns) == [] and vectors_of_items(world / "newer").keys() == kept.keys()
    again = prepared(world, "again")
    names = pq.read_table(again / str(load_dataset(str(again)).sparse_feature("item_id").vocabulary))[
        "value"
    ].to_pylist()
    assert ITEM not in names and len(names) == NUM_ITEMS - 1


@pytest.mark.long
def test_user_of_sequences_leaves_the_raw_rows_and_the_data_set_is_named(world: Path) -> None:
    job = EraseJob(feature="user_id", value=USER, folders=[str(world)])
    result = erase(job)
    assert result.left == {} and result.rewritten == [str(world / "raw.txt")]
    assert f"not erased  {world}/data: the data set has no feature 'user_id'" in "\n".join(describe(job, result))
    lines = [line.split() for line in (world / "raw.txt").read_text().splitlines()]
    assert lines == [line for line in lines_of(400) if line[0] != USER] and len(lines) == 399
    splits = load_dataset(str(prepared(world, "again"))).splits
    assert {name: each.num_rows for name, each in splits.items()} == dict.fromkeys(("train", "validation", "test"), 399)
