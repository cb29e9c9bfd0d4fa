"""On one rank nothing is sent, cast or copied that need not be, and no number changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec.distributed.dist_data import KJTAllToAll

from pipeline import devices
from pipeline.config.tables import TableConfig
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.models.layers.dlrm import join_lookups_to_products
from pipeline.models.layers.interaction import DotInteraction
from pipeline.sharding.torchrec.sharder import ShardedTables
from tests.support.ranks import RankPool
from tests.support.sharded_models import CARDINALITIES, build_sharded, draw_batches, full_state, train_steps

TABLE_WISE = dict.fromkeys("abcd", "table_wise")
NUM_STEPS = 5


def _tables(model: nn.Module) -> ShardedTables:
    return next(module for module in model.modules() if isinstance(module, ShardedTables))


def _twice(rank: int, precision: str) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Losses and state of TorchRec's way from ids to products, then of ours."""
    found = []
    for is_ours in (False, True):
        task, model, optimizer, _ = build_sharded(TABLE_WISE)
        task._bf16 = precision == "bf16"
        tables = _tables(model)
        if is_ours:
            assert join_lookups_to_products(model) == 1
            assert tables.fused_lookup is not None and tables.fused_lookup.reserved_columns == 8
        else:
            tables.fused_lookup = None
        losses = train_steps(model, optimizer, draw_batches(0, 1, NUM_STEPS))
        found.append((losses, full_state(model)))
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_and_weights_are_those_of_torchrecs_way_bit_for_bit(ranks: RankPool, precision: str) -> None:
    (losses, expected), (ours, found) = ranks.run(1, _twice, precision)[0]
    assert ours == losses and len(set(ours)) == NUM_STEPS
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def _exchanges(rank: int) -> list[bool]:
    """Whether ids stay the same tensor, for each sharding type's way of dealing them."""
    _, model, optimizer, _ = build_sharded(
        {"a": "table_wise", "b": "row_wise", "c": "column_wise", "d": "data_parallel"}
    )
    train_steps(model, optimizer, draw_batches(0, 1, 1))
    exchanges = [one for part in _tables(model)._input_dists for one in part.modules() if isinstance(one, KJTAllToAll)]
    features = next(draw_batches(0, 1, 1)).sparse_features
    return [one(features).wait().wait() is features for one in exchanges]


def test_ids_stay_where_they_are(ranks: RankPool) -> None:
    stay = ranks.run(1, _exchanges)[0]
    assert len(stay) >= 2 and all(stay)


def _mixed(rank: int) -> tuple[bool, int, list[float]]:
    _, model, optimizer, _ = build_sharded(
        {"a": "table_wise", "b": "row_wise", "c": "table_wise", "d": "data_parallel"}
    )
    joined = join_lookups_to_products(model)
    return _tables(model).fused_lookup is None, joined, train_steps(model, optimizer, draw_batches(0, 1, NUM_STEPS))


def test_tables_that_do_not_lie_in_one_block_train_as_before(ranks: RankPool) -> None:
    is_none, joined, losses = ranks.run(1, _mixed)[0]
    plain = ranks.run(1, _twice, "fp32")[0][0][0]
    assert is_none and joined == 0
    assert losses == pytest.approx(plain, abs=1e-6)


# Three of TorchRec's groups, and neither the features' order nor one after the other.
GROUPS = {"b": TableConfig(embedding_dim=8, pooling="mean"), "c": TableConfig(embedding_dim=8, data_type="fp16")}


def _bags(number: int) -> Batch:
    """Of 0 to 3 ids, under keys in another order and one more of them; batch 2 has an id that b's table lacks."""
    batch = next(draw_batches(0, 1, 1, start=number))
    generator = torch.Generator().manual_seed(number)
    bags = {
        name: [torch.randint(0, CARDINALITIES.get(name, 9), (count,), generator=generator) for count in counts]
        for name in ("unread", "d", "c", "a", "b")
        if (counts := torch.randint(0, 4, (batch.batch_size,), generator=generator).tolist())
    }
    lengths = torch.tensor([len(bag) for of_one in bags.values() for bag in of_one])
    values = torch.cat([bag for of_one in bags.values() for bag in of_one])
    sizes = lengths.view(len(bags), -1).sum(dim=1).tolist()
    if number == 2:
        values[-1] = CARDINALITIES["b"]  # FBGEMM takes row 0
    features = keyed_jagged_tensor(list(bags), values, lengths, batch.batch_size, sizes)
    return Batch(batch.dense_features, features, batch.labels, batch.sample_weights)


def _groups(rank: int, precision: str) -> list[tuple[list[float], dict[str, torch.Tensor], torch.Tensor]]:
    """Losses, state and an evaluation's logits of TorchRec's way, then of ours."""
    found = []
    for is_ours in (False, True):
        task, model, optimizer, _ = build_sharded(TABLE_WISE, settings=GROUPS)
        task._bf16 = precision == "bf16"
        tables = _tables(model)
        assert tables.fused_lookup is not None and len(tables.fused_lookup.lookups) == 3
        if not is_ours:
            tables.fused_lookup = None
        losses = train_steps(model, optimizer, map(_bags, range(NUM_STEPS)))
        with torch.no_grad():
            logits = model(_bags(NUM_STEPS))[1].logits
        found.append((losses, full_state(model), logits))
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_groups_of_tables_train_alike_bit_for_bit(ranks: RankPool, precision: str) -> None:
    (losses, expected, logits), (ours, found, own_logits) = ranks.run(1, _groups, precision)[0]
    assert ours == losses and len(set(ours)) == NUM_STEPS
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert torch.equal(own_logits, logits)


def _wrong(rank: int) -> str:
    _, model, optimizer, _ = build_sharded(TABLE_WISE)
    join_lookups_to_products(model)
    batch = next(draw_batches(0, 1, 1))
    train_steps(model, optimizer, iter([batch]))
    features = batch.sparse_features
    narrow = type(features)(features.keys(), features.values().int(), lengths=features.lengths())
    try:
        model(Batch(batch.dense_features, narrow, batch.labels, batch.sample_weights))
    except ValueError as error:
        return str(error)
    return ""


def test_ids_of_another_dtype_are_refused_there_too(ranks: RankPool) -> None:
    assert "torch.int32 ids" in ranks.run(1, _wrong)[0]


def _evaluated(rank: int) -> list[torch.Tensor]:
    """Logits with and without gradients, by our way."""
    _, model, _, _ = build_sharded(TABLE_WISE)
    join_lookups_to_products(model)
    batches = list(draw_batches(0, 1, 2))
    model.train()
    model(batches[0])
    model.eval()
    found = [model(batches[1])[1].logits.detach()]
    with torch.no_grad():
        found.append(model(batches[1])[1].logits)
    return found


def test_an_evaluation_scores_alike(ranks: RankPool) -> None:
    with_gradients, without = ranks.run(1, _evaluated)[0]
    torch.testing.assert_close(without, with_gradients, rtol=1e-6, atol=1e-6)


def test_the_pipeline_overlaps_where_there_is_something_to_overlap() -> None:
    cpu, cuda = devices.named("cpu"), devices.named("cuda")
    assert [cpu.pipeline("auto", 1), cpu.pipeline("auto", 2), cuda.pipeline("auto", 1)] == [
        "plain",
        "sparse_dist",
        "sparse_dist",
    ]
    assert cpu.pipeline("sparse_dist", 1) == cuda.pipeline("sparse_dist", 1) == "sparse_dist"
    assert (cpu.pipeline("base", 2), cuda.pipeline("base", 2)) == ("plain", "base")


def test_a_block_that_is_not_the_lookups_own_is_left_alone() -> None:
    """rows cut out of a larger tensor: what lies ahead of them is somebody's."""
    torch.manual_seed(0)
    whole = torch.randn(6, 4, 8)
    before, dense = whole.clone(), torch.randn(4, 8)
    interaction = DotInteraction(3)
    expected = interaction(dense, whole[1:5, 1:])
    interaction.rows_are_padded = True
    assert torch.equal(interaction(dense, whole[1:5, 1:]), expected)
    assert torch.equal(whole, before)
