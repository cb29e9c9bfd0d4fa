"""SASRec and HSTU predict the next item: what a position sees, the loss, and planted sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.config.tables import InitConfig, TableConfig
from pipeline.data.dataset import Dataset, FrequencyCurve, SequenceFeature, SparseFeature, Split
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.embeddings.table import Table
from pipeline.embeddings.tables import resolve_tables
from pipeline.extras.models.hstu_retrieval import HSTURetrievalConfig
from pipeline.extras.models.negatives import NegativesConfig
from pipeline.extras.models.next_items import NextItemConfig
from pipeline.extras.models.sasrec import SASRecConfig
from pipeline.models.build import build_model
from pipeline.models.tasks.task import TaskModel, make_task
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.sharding.torchrec.table_init import initialize_tables
from tests.support.messages import names

NUM_ITEMS, LENGTH, DIM = 30, 6, 16
MODELS = [SASRecConfig, HSTURetrievalConfig]


def _dataset(shares: str | None = "item_id") -> Dataset:
    curve = FrequencyCurve([1, 10, NUM_ITEMS + 1], [0.1, 0.5, 1.0])
    about = SequenceFeature(LENGTH, "last", None, shares)
    item = SparseFeature("item_id", NUM_ITEMS + 1, False, 1.0, curve)
    history = SparseFeature("history", NUM_ITEMS + 1, True, LENGTH / 2, curve, sequence=about)
    return Dataset("next", "label", [], [item, history], {"train": Split([], 100, 1)}, 100, 100, 0, "none")


def _tables(config: NextItemConfig, shares: str | None = "item_id") -> list[Table]:
    default = TableConfig(embedding_dim=DIM, init=InitConfig("normal", 0.3))
    return resolve_tables({"default": default}, _dataset(shares), sequences=config.sequence_inputs)


def make_next_item_task(config: NextItemConfig) -> tuple[TaskModel, IdSplitter]:
    tables = _tables(config)
    config.check_tables(tables, 0)
    task = make_task(config, build_model(config, tables, 0, seed=0), tables)
    for module in task.modules():
        if hasattr(module, "embedding_bags"):
            module.to_empty(device="cpu")
    initialize_tables(task, 0)
    return task, IdSplitter(tables)


def _batch(histories: list[list[int]], items: list[int], split: IdSplitter) -> Batch:
    values = torch.tensor([*items, *(item for history in histories for item in history)])
    lengths = torch.tensor([1] * len(items) + [len(history) for history in histories], dtype=torch.int32)
    counts = [len(items), len(values) - len(items)]
    sparse = keyed_jagged_tensor(["item_id", "history"], values, lengths, len(items), counts)
    return Batch(torch.empty(len(items), 0), split(sparse), torch.ones(len(items)), torch.ones(len(items)))


@pytest.mark.parametrize("model", MODELS)
def test_a_position_sees_no_later_item_and_the_newest_position_is_what_is_served(model: type[NextItemConfig]) -> None:
    task, split = make_next_item_task(model(dropout=0.0))
    one = _batch([[1, 2, 3, 4], [5]], [6, 7], split)
    other = _batch([[1, 2, 9, 8], [5]], [3, 2], split)
    users, _, _ = task.model(one.dense_features, one.sparse_features)
    changed, _, _ = task.model(other.dense_features, other.sparse_features)
    torch.testing.assert_close(users[0, :3], changed[0, :3])
    assert (users[0, 3:5] - changed[0, 3:5]).abs().max(dim=1).values.min() > 1e-3
    task.eval()
    served, _, _ = task.model(one.dense_features, one.sparse_features)
    torch.testing.assert_close(served, torch.stack([users[0, 4], users[1, 1]]))
    alone = _batch([[1, 2, 3, 4]], [6], split)  # its length decides nothing
    torch.testing.assert_close(task.model(alone.dense_features, alone.sparse_features)[0], served[:1])
    empty = _batch([[]], [6], split)
    assert task.model(empty.dense_features, empty.sparse_features)[0].isfinite().all()


@pytest.mark.parametrize("every_position", [True, False])
def test_the_loss_is_the_softmax_among_the_items_of_other_rows(every_position: bool) -> None:
    task, split = make_next_item_task(SASRecConfig(dropout=0.0, every_position=every_position, temperature=0.5))
    histories, items = [[1, 2], [], [2, 5, 7]], [3, 4, 1]
    batch = _batch(histories, items, split)
    batch.labels[1] = 0.0  # no positive, but its item is a negative
    with torch.no_grad():
        users, vectors, _ = task.model(batch.dense_features, batch.sparse_features)
        _, prediction = task(batch)
    rows = [[*history, item] for history, item in zip(histories, items, strict=True)]
    frequency = task.task._correction
    expected = torch.zeros(3)
    for row, at in [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2), (2, 3)]:
        if every_position or at == len(rows[row]) - 1:
            wanted = rows[row][at]
            others = [
                (other, place)
                for other in range(3)
                for place, item in enumerate(rows[other])
                if other != row and item != wanted and (every_position or place == len(rows[other]) - 1)
            ]
            places = [(row, at), *others]
            scores = torch.stack([users[row, at] @ vectors[place] / 0.5 for place in places])
            scores = scores - frequency(torch.tensor([rows[other][place] for other, place in places]))
            expected[row] += torch.logsumexp(scores, 0) - scores[0]
    torch.testing.assert_close(prediction.losses, expected)
    assert expected[0] > 0 and expected[2] > 0


def _planted(count: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Each item follows from the two items before it."""
    random = np.random.default_rng(seed)
    follows: NDArray[np.int64] = np.random.default_rng(0).integers(1, NUM_ITEMS + 1, (NUM_ITEMS + 1, 3))
    histories, items = [], []
    for _ in range(count):
        found = random.integers(1, NUM_ITEMS + 1, 2).tolist()
        while len(found) < random.integers(4, LENGTH + 2):
            found.append(int(follows[found[-1], found[-2] % 3]))
        histories.append(found[:-1])
        items.append(found[-1])
    return histories, items


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_items_that_follow_from_the_last_two_are_found(model: type[NextItemConfig]) -> None:
    config = model(dropout=0.0, recall_at=[1], exclude_history=False)
    task, split = make_next_item_task(config)
    optimizer = torch.optim.Adam(task.parameters(), lr=0.01)
    histories, items = _planted(2000, 1)
    for step in range(200):
        part = slice(step * 128 % 1920, step * 128 % 1920 + 128)
        optimizer.zero_grad()
        loss, _ = task(_batch(histories[part], items[part], split))
        loss.backward()
        optimizer.step()
    task.eval()
    measure = task.task.evaluation_measure(DistributedContext(0, 1, 0, 1, torch.device("cpu"), "gloo"), 500)
    with torch.no_grad():
        measure.update(task(_batch(*_planted(500, 2), split))[1])
    assert measure.compute()["recall_at_1"] > 0.8  # the last item alone gives a third


def test_a_history_with_another_table_is_refused() -> None:
    config = SASRecConfig()
    with pytest.raises(ConfigError, match=names("model.history history model.item_feature shares=item_id")):
        config.check_tables(_tables(config, shares=None), 0)


def test_more_negatives_than_items_are_refused() -> None:
    config = SASRecConfig(negatives=NegativesConfig("corpus", count=10**6))
    with pytest.raises(ConfigError, match=names("model.negatives.count=1000000 item_id")):
        config.check_tables(_tables(config), 0)
