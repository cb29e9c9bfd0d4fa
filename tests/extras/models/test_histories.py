"""Models over a behaviour sequence: padding is in no sum, shards train as the whole, and the planted teacher is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.distributed import sharding_plan
from torchrec.distributed.types import ShardingPlan

from pipeline.config.model import LayerSettings, ModelConfig, SequenceInput
from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.tables import CompressionConfig, TableConfig
from pipeline.config.training import CommsConfig
from pipeline.data.read.batch import Batch
from pipeline.devices.process_group import init_distributed
from pipeline.embeddings.compression.kind import Bags
from pipeline.embeddings.id_splitter import IdSplitter, matching, newest
from pipeline.embeddings.physical import physical_tables
from pipeline.embeddings.table import Table
from pipeline.embeddings.tables import resolve_tables
from pipeline.extras.generate.kinds import HistoriesConfig
from pipeline.extras.models.bst import BSTConfig
from pipeline.extras.models.din import DINConfig
from pipeline.extras.models.histories import SelfAttentionConfig
from pipeline.extras.models.hstu import HSTUConfig
from pipeline.extras.models.layers.history import HistoryInputs
from pipeline.extras.models.layers.target_attention import TargetAttention
from pipeline.models.build import build_model
from pipeline.models.deepfm import DeepFMConfig
from pipeline.models.layers.mlp import Dice
from pipeline.models.tasks.task import TaskModel, make_task
from pipeline.runtime.errors import ConfigError
from pipeline.sharding.torchrec.sharding import make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.training.optimizer import build_optimizer
from tests.extras.models.histories import READ, Histories, build_task, generate, share_of_lift, tables_of
from tests.support.examples import examples
from tests.support.messages import names
from tests.support.ranks import RankPool
from tests.training.tiny import full_weights

SMALL = HistoriesConfig(num_rows=128, num_items=60, num_categories=7, max_length=5, num_dwells=3)
DIN = DINConfig(**READ, hidden_layer_sizes=[16], attention_layer_sizes=[8])
PATH = "model.embedding_bag_collection.embedding_bag_collection"
OPTIMIZERS = OptimizerConfig(SparseOptimizerConfig("adagrad", lr=0.05), DenseOptimizerConfig("sgd", lr=0.1))
KINDS = ("table_wise", "row_wise", "column_wise")
NUM_STEPS, GLOBAL_BATCH = 4, 32


def _lists(draw: st.DataObject, most: int) -> list[list[int]]:
    return draw.draw(st.lists(st.lists(st.integers(0, 4), max_size=most), min_size=1, max_size=6))


def _bags(rows: list[list[int]]) -> Bags:
    ids = np.array([each for row in rows for each in row], np.int64)
    return Bags(ids, np.array([len(row) for row in rows], np.int32))


@examples(100)
@given(st.data(), st.integers(1, 7))
def test_positions_hold_the_newest_ids_oldest_first(draw: st.DataObject, count: int) -> None:
    rows = _lists(draw, 9)
    found: list[list[int]] = [[] for _ in rows]
    for part in newest(_bags(rows), count):
        ids = iter(part.ids.tolist())
        for row, length in zip(found, part.lengths.tolist(), strict=True):
            row += [next(ids) for _ in range(length)]
    assert found == [row[-count:] for row in rows]


@examples(100)
@given(st.data())
def test_a_search_keeps_the_positions_of_the_targets_category(draw: st.DataObject) -> None:
    rows = _lists(draw, 6)
    targets = draw.draw(st.lists(st.lists(st.integers(0, 4), max_size=1), min_size=len(rows), max_size=len(rows)))
    items = [[10 + number for number in range(len(row))] for row in rows]
    found = matching(_bags(items), _bags(rows), _bags(targets))
    wanted = [
        [item for item, each in zip(own, row, strict=True) if target == [each] and each]
        for own, row, target in zip(items, rows, targets, strict=True)
    ]
    assert found.lengths.tolist() == [len(row) for row in wanted]
    assert found.ids.tolist() == [each for row in wanted for each in row]


def _attention(softmax: bool = False, activation: str = "relu") -> TargetAttention:
    torch.manual_seed(0)
    return TargetAttention(4, 6, [8, 5], LayerSettings(activation), softmax)


def test_the_attention_unit_is_the_papers_and_sees_no_padding() -> None:
    unit, lengths = _attention(), torch.tensor([0, 3, 5, 1])
    target, rows = torch.randn(4, 4), torch.randn(4, 5, 6)
    mask = torch.arange(5) < lengths[:, None]
    own, side = rows[..., :4], rows[..., 4:]
    q = target.unsqueeze(1).expand_as(own)
    plain = unit.layers(torch.relu(unit.first(torch.cat([q, own, q - own, side, q * own], dim=2)))).squeeze(2)
    wanted = ((plain * mask).unsqueeze(2) * rows).sum(dim=1)
    garbage = torch.where(mask.unsqueeze(2), rows, torch.full_like(rows, 1e4))
    for training in (True, False):
        unit.train(training)
        found = unit(target, rows, mask)
        assert torch.allclose(found, wanted, atol=1e-5)
        rows_there = garbage.clone().requires_grad_(True)
        own_weights = unit._jagged(target, rows_there, mask) if training else unit._padded(target, rows_there) * mask
        own_weights.sum().backward()
        assert rows_there.grad is not None and not rows_there.grad[~mask].any()
        unit.zero_grad()
    assert not found[0].any()  # an empty history says nothing


def test_softmax_weights_are_of_the_ids_alone() -> None:
    unit, mask = _attention(softmax=True).eval(), torch.arange(5) < torch.tensor([0, 2, 5])[:, None]
    rows, target = torch.randn(3, 5, 6), torch.randn(3, 4)
    shorter = unit(target[1:2], rows[1:2, :2], mask[1:2, :2])
    assert torch.allclose(unit(target, rows, mask)[1:2], shorter, atol=1e-6) and not unit(target, rows, mask)[0].any()


def test_dice_bends_at_the_mean_of_its_rows_and_keeps_it() -> None:
    dice, rows = Dice(3), torch.randn(40, 3) * 2 + 5
    dice.alpha.data = torch.tensor([0.0, 0.3, 1.0])
    p = torch.sigmoid((rows - rows.mean(0)) / (rows.var(0, unbiased=False) + 1e-8).sqrt())
    assert torch.allclose(dice(rows), p * rows + (1 - p) * dice.alpha * rows, atol=1e-5)
    assert {"norm.running_mean", "norm.running_var", "alpha"} == set(dice.state_dict())
    before = dice.norm.running_mean.clone()
    dice(rows[:1]), dice(rows[:0])  # too few rows for a variance change nothing
    assert torch.equal(dice.norm.running_mean, before)


def test_the_gradients_of_dice_are_those_of_its_formula() -> None:
    torch.manual_seed(0)
    rows = torch.randn(257, 19) * torch.linspace(0.5, 30, 19) + torch.linspace(-5, 9, 19)
    dice, weights, own = Dice(19), torch.randn(257, 19), rows.clone().requires_grad_()
    dice.alpha.data = torch.linspace(-0.5, 1, 19)
    exact_rows, exact_alpha = (each.detach().double().requires_grad_() for each in (rows, dice.alpha))
    normalized = (exact_rows - exact_rows.mean(0)) / (exact_rows.var(0, unbiased=False) + 1e-8).sqrt()
    p = torch.sigmoid(normalized)
    exact = p * exact_rows + (1 - p) * exact_alpha * exact_rows
    wanted = torch.autograd.grad((exact * weights).sum(), [exact_rows, exact_alpha])
    found = torch.autograd.grad((dice(own) * weights).sum(), [own, dice.alpha])
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def _dice_on_ranks(rank: int, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    init_distributed()
    rows = torch.randn(sum(counts), 3, generator=torch.Generator().manual_seed(0)) + 2
    first = sum(counts[:rank]) if dist.get_world_size() > 1 else 0
    own = rows[first : first + counts[rank]] if dist.get_world_size() > 1 else rows
    own = own.clone().requires_grad_(True)
    dice = Dice(3)
    out = dice(own)
    (out**2).sum().backward()
    assert own.grad is not None
    return out.detach(), own.grad, dice.norm.running_var


@pytest.mark.long
def test_dice_is_over_the_ids_of_all_ranks_even_where_one_has_none(ranks: RankPool) -> None:
    for counts in ([5, 9], [14, 0], [1, 0]):
        parts = ranks.run(2, _dice_on_ranks, counts)
        whole = ranks.run(1, _dice_on_ranks, counts)[0]
        if sum(counts) == 1:
            assert torch.equal(parts[0][2], torch.ones(3))
            continue
        for part in range(2):
            assert torch.allclose(torch.cat([each[part] for each in parts]), whole[part], atol=1e-5)
        assert torch.allclose(parts[0][2], whole[2], atol=1e-6)


@pytest.mark.parametrize("config", [BSTConfig(), HSTUConfig(num_blocks=2)], ids=["bst", "hstu"])
def test_blocks_see_no_padding_and_tell_the_newest_id(config: SelfAttentionConfig) -> None:
    torch.manual_seed(0)
    inputs = HistoryInputs(["history"], ["item_id"], ["item_id"], {"history": 4, "item_id": 4})
    encoder, width = config.build_encoder(inputs, 5)
    mask = torch.arange(5) < torch.tensor([0, 3, 5, 1])[:, None]
    target, rows = torch.randn(4, 4), torch.randn(4, 5, 4)
    found = encoder(target, rows, mask)
    garbage = torch.where(mask.unsqueeze(2), rows, torch.full_like(rows, 1e3)).requires_grad_(True)
    again = encoder(target, garbage, mask)
    assert again.shape == (4, width) and torch.allclose(again, found, atol=1e-5)
    (again * torch.randn(4, width)).sum().backward()  # a norm's columns add up to nothing
    assert garbage.grad is not None and not garbage.grad[~mask].any() and garbage.grad[mask].any()
    other = encoder(target, rows[:, [1, 0, 2, 3, 4]], mask)  # the order counts, and the newest is the same
    assert not torch.allclose(other[1], found[1], atol=1e-6) and torch.allclose(other[0], found[0])


def _shared(found: Histories, config: ModelConfig = DIN) -> list[Table]:
    return tables_of(config, found.dataset())


def test_a_target_and_its_sequence_are_looked_up_in_one_table() -> None:
    tables = _shared(generate(SMALL))
    assert [(table.name, table.feature_names) for table in tables] == [
        ("item_id", ["item_id", "history"]),
        ("category", ["category", "history_category"]),
        ("history_dwell", ["history_dwell"]),
    ]
    plain = physical_tables(tables)
    assert [len(table.feature_names) for table in plain] == [6, 6, 5]
    assert plain[0].num_embeddings == 61 and plain[0].pooling_factors == [1.0] + [0.5] * 5
    pooled = physical_tables(_shared(generate(SMALL), DeepFMConfig()))
    assert pooled[0].feature_names == ["item_id", "history"]


def test_more_positions_than_any_row_has_change_nothing() -> None:
    found = generate(SMALL)
    longest = int(found.rows.lengths.max())
    wide = generate(SMALL).dataset()
    wide = replace(
        wide,
        sparse_features=[
            replace(each, sequence=replace(each.sequence, max_length=longest + 4)) if each.sequence else each
            for each in wide.sparse_features
        ],
    )
    logits = []
    for dataset in (found.dataset(), wide):
        tables = tables_of(DIN, dataset)
        task, batch = build_task(DIN, tables), found.batch(slice(0, 64))
        batch.sparse_features = IdSplitter(tables)(batch.sparse_features)
        own = []
        for training in (True, False):
            task.train(training)
            own.append(task(batch)[1].logits.detach())
        logits.append(own)
    for narrow, broad in zip(*logits, strict=True):
        assert torch.allclose(narrow, broad, atol=1e-6)


def _steps(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, tables: list[Table]) -> None:
    found, split, world = generate(SMALL), IdSplitter(tables), dist.get_world_size()
    share = GLOBAL_BATCH // world
    model.train()
    for number in range(NUM_STEPS):
        first = number * GLOBAL_BATCH + rank * share
        batch = found.batch(slice(first, first + share))
        batch.sparse_features = split(batch.sparse_features)
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()


def _sharded(rank: int, config: ModelConfig, kinds: list[str]) -> list[dict[str, torch.Tensor]]:
    context, weights = init_distributed(), []
    tables = _shared(generate(SMALL), config)
    last = context.world_size - 1
    makers = {
        "table_wise": lambda: sharding_plan.table_wise(rank=last),
        "row_wise": sharding_plan.row_wise,
        "column_wise": lambda: sharding_plan.column_wise(ranks=[last, 0]),
        "data_parallel": sharding_plan.data_parallel,
    }
    for kind in kinds:
        task = make_task(config, build_model(config, tables, 0), tables)
        apply_sparse_optimizer(task, OPTIMIZERS.sparse)
        plan = sharding_plan.construct_module_sharding_plan(
            task.get_submodule(PATH),
            {table.name: makers[kind]() for table in tables},
            sharder=make_sharders(CommsConfig())[0],
            local_size=context.world_size,
            world_size=context.world_size,
            device_type="cpu",
        )
        model = shard_model(task, ShardingPlan({PATH: plan}), CommsConfig(), context)
        _steps(rank, model, build_optimizer(model, OPTIMIZERS), tables)
        weights.append(full_weights(model))
    return weights


def _whole(rank: int, config: ModelConfig) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(first, last) weights of plain torch in one process."""
    init_distributed()
    tables = _shared(generate(SMALL), config)
    task: TaskModel = build_task(config, tables)
    first = {name: value.clone() for name, value in task.state_dict().items()}
    rows = [value for name, value in task.named_parameters() if "embedding_bags" in name]
    layers = [value for name, value in task.named_parameters() if "embedding_bags" not in name]
    optimizer = _Both(torch.optim.Adagrad(rows, lr=0.05, eps=1e-8), torch.optim.SGD(layers, lr=0.1))
    _steps(rank, task, optimizer, tables)
    return first, {name: value.detach().clone() for name, value in task.state_dict().items()}


class _Both:
    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def zero_grad(self) -> None:
        for each in self._optimizers:
            each.zero_grad()

    def step(self) -> None:
        for each in self._optimizers:
            each.step()


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [
        (2, list(KINDS)),
        pytest.param(1, [*KINDS, "data_parallel"], marks=pytest.mark.campaign),
        pytest.param(4, [*KINDS, "data_parallel"], marks=pytest.mark.campaign),
    ],
)
def test_sharded_steps_equal_unsharded_steps(ranks: RankPool, world_size: int, kinds: list[str]) -> None:
    sharded, (first, last) = ranks.run(world_size, _sharded, DIN, kinds)[0], ranks.run(1, _whole, DIN)[0]
    moved = max(float((last[name] - first[name]).abs().max()) for name in last)
    for kind, own in zip(kinds, sharded, strict=True):
        assert own.keys() == last.keys()
        difference = max(float((own[name] - last[name]).abs().max()) for name in last)
        print(f"{kind} on {world_size}: moved by {moved:.2f}, differs by {difference:.1e}")
        assert moved > 0.05 and difference < 1e-6


def _resolve(table: TableConfig, sequences: list[SequenceInput]) -> list[Table]:
    return resolve_tables(
        {"default": TableConfig(embedding_dim=8), "item_id": table}, generate(SMALL).dataset(), sequences=sequences
    )


def test_a_compressed_table_composes_each_position(ranks: RankPool) -> None:
    found = generate(SMALL)
    kinds = [
        CompressionConfig("hash", ratio=3.0),
        CompressionConfig("quotient_remainder", num_partitions=2, operation="multiply"),
    ]
    for compression in kinds:
        tables = _resolve(TableConfig(embedding_dim=8, compression=compression), DIN.sequence_inputs)
        task, batch = build_task(DIN, tables), found.batch(slice(0, 16))
        batch.sparse_features = IdSplitter(tables)(batch.sparse_features)
        loss, _ = task(batch)
        loss.backward()
        collection = task.model.embedding_bag_collection
        columns = collection(batch.sparse_features)["history"]
        assert columns.shape == (16, 5 * 8 + 2)
        assert columns[:, -1].tolist() == found.rows.lengths[:16].tolist()
        rows, mask = columns[:, :-2].unflatten(1, (5, 8)), torch.from_numpy(found.rows.present[:16])
        assert rows[mask].abs().sum(dim=1).min() > 0 and not rows[~mask].any()
        items = torch.from_numpy(found.rows.items[:16])
        targets = collection(batch.sparse_features)["item_id"]
        same = (items == torch.from_numpy(found.rows.targets[:16])[:, None]) & mask
        assert torch.equal(rows[same], targets.unsqueeze(1).expand_as(rows)[same])


@pytest.mark.parametrize(
    ("compression", "said"),
    [
        (CompressionConfig("tensor_train", rank=4), "tensor_train history hash"),
        (CompressionConfig("managed_collision", num_rows=40), "managed_collision history"),
        (CompressionConfig("frequency_split", head_rows="5"), "frequency_split history"),
    ],
)
def test_compression_that_composes_bags_is_refused_for_sequences(compression: CompressionConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=names(said)):
        _resolve(TableConfig(embedding_dim=8, compression=compression), DIN.sequence_inputs)


@pytest.mark.parametrize(
    ("sequences", "said"),
    [
        ([SequenceInput("histroy")], "histroy history"),
        ([SequenceInput("item_id")], "item_id"),
        ([SequenceInput("history", 9)], "history 9 5"),
        ([SequenceInput("history", search_in="history_dwell", search_for="category")], "history_dwell category"),
        ([SequenceInput("history", search_in="history_category", search_for="item_id")], "history_category item_id"),
    ],
)
def test_what_is_no_sequence_is_refused(sequences: list[SequenceInput], said: str) -> None:
    with pytest.raises(ConfigError, match=names(said)):
        _resolve(TableConfig(), sequences)


def test_a_model_refuses_sequences_and_targets_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=names("model.targets")):
        DINConfig(sequences=["history"], targets=["item_id", "category"])
    with pytest.raises(ConfigError, match=names("model.search history_dwell")):
        DINConfig(**READ, search="history_dwell")
    with pytest.raises(ConfigError, match=names("history item_id embedding_dim")):
        tables = _resolve(TableConfig(embedding_dim=4), DIN.sequence_inputs)
        apart = resolve_tables(
            {"history": TableConfig(embedding_dim=4)}, generate(SMALL).dataset(), sequences=DIN.sequence_inputs
        )
        assert tables
        DIN.check_tables(apart, 0)


def _lift(config: ModelConfig, num_rows: int, **settings: float) -> float:
    data = HistoriesConfig(num_rows=num_rows, num_items=200, num_categories=16, max_length=10)
    return share_of_lift(config, generate(data), **settings)


LAYERS: dict[str, list[int]] = {"hidden_layer_sizes": [64, 32], "attention_layer_sizes": [32]}


@pytest.mark.campaign
def test_din_finds_the_planted_teacher_and_a_pooled_bag_does_not() -> None:
    assert _lift(DINConfig(**READ, **LAYERS), 80_000, epochs=4) >= 0.97
    assert _lift(DeepFMConfig(hidden_layer_sizes=[64, 32]), 80_000, epochs=4) < 0.85


@pytest.mark.campaign
def test_blocks_know_which_of_several_matches_is_the_last_and_din_cannot() -> None:
    data = HistoriesConfig(num_rows=40_000, num_items=200, num_categories=16, max_length=10, repeats=0.5)
    found, layers = generate(data), {"hidden_layer_sizes": [64, 32]}
    assert share_of_lift(BSTConfig(**READ, **layers), found, epochs=5, lr=0.005) >= 0.97
    assert share_of_lift(DINConfig(**READ, **LAYERS), found, epochs=5, lr=0.005) < 0.85


@pytest.mark.campaign
def test_a_hard_search_by_category_finds_the_planted_teacher() -> None:
    searched = DINConfig(**READ, **LAYERS, search="history_category", num_positions=3)
    assert _lift(searched, 40_000, epochs=4) >= 0.97


def test_batches_of_a_search_have_few_positions() -> None:
    found = generate(SMALL)
    config = DINConfig(**READ, search="history_category", num_positions=2)
    tables = _shared(found, config)
    batch: Batch = found.batch(slice(0, 32))
    split = IdSplitter(tables)(batch.sparse_features)
    matches = found.rows.present & (found.categories[found.rows.items] == found.categories[found.rows.targets][:, None])
    keys = [f"history__{number}" for number in range(2)]
    lengths = torch.stack([split[key].lengths() for key in keys]).sum(dim=0)
    assert lengths.tolist() == np.minimum(matches[:32].sum(axis=1), 2).tolist()
