"""Batch and its KeyedJaggedTensor: sizes known without a look at the values, padding that adds nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.extras.frequency_split.variable_batches import leave_out_empty_bags

KEYS = ["a", "b"]
VALUES = torch.tensor([5, 6, 7, 1, 2], dtype=torch.int32)
LENGTHS = torch.tensor([1, 2, 0, 0, 1, 1])


def make_batch() -> Batch:
    sparse = keyed_jagged_tensor(KEYS, VALUES, LENGTHS, 3, [3, 2])
    return Batch(torch.ones(3, 4), sparse, torch.zeros(3), torch.ones(3))


def test_the_keyed_jagged_tensor_equals_torchrecs_own() -> None:
    ours = make_batch().sparse_features
    theirs = KeyedJaggedTensor.from_lengths_sync(KEYS, VALUES, LENGTHS)
    assert ours.length_per_key() == theirs.length_per_key()
    assert ours.offset_per_key() == theirs.offset_per_key()
    assert ours.stride() == theirs.stride() == 3
    for key in KEYS:
        assert torch.equal(ours[key].values(), theirs[key].values())
        assert torch.equal(ours[key].offsets(), theirs[key].offsets())


def test_every_rank_gets_int64_ids_and_int32_lengths() -> None:
    sparse = make_batch().sparse_features
    assert (sparse.values().dtype, sparse.lengths().dtype) == (torch.int64, torch.int32)


def test_sizes_are_known_on_a_device_that_cannot_be_asked() -> None:
    moved = make_batch().to(torch.device("meta"), non_blocking=True)
    assert moved.sparse_features.length_per_key_or_none() == [3, 2]
    assert moved.sparse_features.offset_per_key_or_none() == [0, 3, 5]
    assert moved.sparse_features.stride() == 3
    parts = (moved.dense_features, moved.sparse_features.values(), moved.labels, moved.sample_weights)
    assert {part.device.type for part in parts} == {"meta"}
    assert moved.batch_size == 3


def test_every_tensor_that_moves_tells_the_allocator_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor))
    weighted = keyed_jagged_tensor(KEYS, VALUES, LENGTHS, 3, [3, 2], weights=torch.ones(5))
    batch = Batch(torch.ones(3, 4), leave_out_empty_bags(weighted, KEYS), torch.zeros(3), torch.ones(3))
    moved = replace(batch, present=torch.ones(3, dtype=torch.bool)).to(torch.device("meta"))
    moved.record_stream(torch.Stream("cpu"))
    parts = tree_leaves([vars(moved), moved.sparse_features])
    expected = {id(part) for part in parts if isinstance(part, torch.Tensor) and part.device.type == "meta"}
    assert {id(tensor) for tensor in recorded} == expected and len(expected) == 8


def test_padding_rows_pool_to_zero_and_leave_tables_alone() -> None:
    tables = [EmbeddingBagConfig(name=key, embedding_dim=4, num_embeddings=10, feature_names=[key]) for key in KEYS]
    collection = EmbeddingBagCollection(tables=tables)
    nothing = keyed_jagged_tensor(KEYS, torch.empty(0), torch.zeros(6), 3, [0, 0])
    pooled = collection(nothing).values()
    assert torch.equal(pooled, torch.zeros(3, 8))
    pooled.sum().backward()
    assert all(not parameter.grad.any() for parameter in collection.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory and streams need a GPU")
def test_a_pinned_batch_moves_without_blocking() -> None:
    batch = make_batch().pin_memory()
    assert batch.sparse_features.values().is_pinned()
    assert batch.dense_features.is_pinned()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        moved = batch.to(torch.device("cuda"), non_blocking=True)
    moved.record_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert torch.equal(moved.sparse_features.values().cpu(), VALUES.long())
