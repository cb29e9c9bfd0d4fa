"""A model of compressed tables, sharded in every way, trains as its arithmetic on plain tensors does; and resumes exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.config.tables import CompressionConfig
from pipeline.devices.process_group import init_distributed
from pipeline.embeddings.table import Table
from tests.embeddings import references
from tests.embeddings.compressed import (
    DIM,
    NUM_IDS,
    NUM_STEPS,
    OPTIMIZERS,
    build_sharded,
    sample_bags,
    steep_loss,
    table_of,
    train,
)
from tests.support.ranks import RankPool
from tests.training.tiny import full_weights

SHARDING_TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel")
GROUPS = [[id_ % 5 for id_ in range(NUM_IDS)], [id_ // 5 for id_ in range(NUM_IDS)]]


def quotient_remainder(**settings: Any) -> CompressionConfig:
    return CompressionConfig("quotient_remainder", **settings)


# Table -> its compression, and what a row of it is.
KINDS: dict[str, tuple[CompressionConfig, references.RowOf]] = {
    "hash": (CompressionConfig("hash", num_rows=17, seed=4), references.hashed("hash", 17, 4)),
    "naive": (quotient_remainder(scheme="naive"), references.added(("naive__naive", lambda id_: id_))),
    "add": (
        quotient_remainder(bases=[10]),
        references.added(("add__remainder", lambda id_: id_ % 10), ("add__quotient", lambda id_: id_ // 10)),
    ),
    "multiply": (
        quotient_remainder(bases=[10], operation="multiply"),
        references.multiplied(
            ("multiply__remainder", lambda id_: id_ % 10), ("multiply__quotient", lambda id_: id_ // 10)
        ),
    ),
    "concatenate": (
        quotient_remainder(bases=[8, 7], operation="concatenate", dims=[12, 4]),
        references.concatenated(
            ("concatenate__remainder", lambda id_: id_ % 8), ("concatenate__quotient", lambda id_: id_ // 8)
        ),
    ),
    "generalised": (
        quotient_remainder(scheme="generalised", bases=[4, 4, 4], operation="multiply"),
        references.multiplied(
            ("generalised__digit_0", lambda id_: id_ % 4),
            ("generalised__digit_1", lambda id_: id_ // 4 % 4),
            ("generalised__digit_2", lambda id_: id_ // 16),
        ),
    ),
    "chinese": (
        quotient_remainder(scheme="chinese_remainder", bases=[7, 8]),
        references.added(("chinese__mod_7", lambda id_: id_ % 7), ("chinese__mod_8", lambda id_: id_ % 8)),
    ),
    "given": (
        quotient_remainder(scheme="given", assignments=GROUPS, operation="concatenate"),
        references.concatenated(
            ("given__group_0", lambda id_: GROUPS[0][id_]), ("given__group_1", lambda id_: GROUPS[1][id_])
        ),
    ),
    "path": (CompressionConfig("path_based", num_rows=12, hidden_size=3), references.path_based("path", 12)),
    "mixed": (
        CompressionConfig("mixed_dimension", dims=[16, 8, 4]),
        references.mixed_dimension("mixed", [1, 6, NUM_IDS]),
    ),
    "train": (
        CompressionConfig("tensor_train", rank=3, row_factors=[3, 4, 5], dim_factors=[2, 2, 4]),
        references.tensor_train("train", (3, 4, 5)),
    ),
}


def make_tables() -> list[Table]:
    """One of each kind, one plain, and a mean of what is composed id by id."""
    tables = [table_of(name, config) for name, (config, _) in KINDS.items()]
    return [table_of("plain", None), *tables, *mean_tables()]


def mean_tables() -> list[Table]:
    return [table_of(f"{name}_mean", KINDS[name][0], "mean") for name in ("add", "multiply", "path", "mixed", "train")]


def row_of(table: Table) -> references.RowOf:
    if table.compression is None:
        return lambda weights, id_: weights[table.name][id_]
    name = table.name.removesuffix("_mean")

    def row(weights: references.Weights, id_: int) -> torch.Tensor:
        own = {key.replace(table.name, name, 1): value for key, value in weights.items() if key.startswith(table.name)}
        return KINDS[name][1](own, id_)

    return row


def train_sharded(rank: int, tables: list[Table], kinds: tuple[str, ...]) -> list[tuple[Any, Any, list[float]]]:
    """Collective: by sharding type, weights before and after, and losses."""
    found = []
    for kind in kinds:
        model, optimizer = build_sharded(tables, kind)
        before = full_weights(model)
        losses = train(model, optimizer, tables, range(NUM_STEPS))
        found.append((before, full_weights(model), losses))
    return found


def train_reference(tables: list[Table], start: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Plain tensors under torch's own optimizers, from the same first weights."""
    weights = {name: value.clone().requires_grad_() for name, value in start.items()}
    is_table = {name: "embedding_bags" in name for name in weights}
    sparse = torch.optim.Adagrad(
        [weights[name] for name in weights if is_table[name]], lr=OPTIMIZERS.sparse.lr, eps=OPTIMIZERS.sparse.eps
    )
    dense = torch.optim.Adam(
        [weights[name] for name in weights if not is_table[name]], lr=OPTIMIZERS.dense.lr, eps=OPTIMIZERS.dense.eps
    )
    own = {short_name(name): value for name, value in weights.items()}
    losses = []
    for step in range(NUM_STEPS):
        bags, labels = sample_bags(tables, step)
        columns = [
            references.pool(row_of(table), own, bags[feature], table.pooling, DIM)
            for table in tables
            for feature in table.feature_names
        ]
        logits = torch.cat(columns, dim=1) @ own["over.weight"].T + own["over.bias"]
        loss, _ = steep_loss(logits.squeeze(1), labels)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        losses.append(loss.item())
    return {name: value.detach() for name, value in weights.items()}, losses


def short_name(name: str) -> str:
    """Of a table its own, of a table's dense parameter <table>.<parameter>."""
    if "embedding_bags" in name:
        return name.split(".")[-2]
    return name.rpartition("composition.composers.")[2].replace("__parts.", ".")


@pytest.fixture(scope="module")
def trained(ranks: RankPool) -> dict[str, tuple[Any, Any, list[float]]]:
    found = ranks.run(2, train_sharded, make_tables(), SHARDING_TYPES)[0]
    return dict(zip(SHARDING_TYPES, found, strict=True))


@pytest.fixture(scope="module")
def reference(trained: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    return train_reference(make_tables(), trained["table_wise"][0])


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
def test_sharded_kinds_train_as_their_arithmetic_on_plain_tensors(
    sharding_type: str, trained: dict[str, Any], reference: tuple[dict[str, torch.Tensor], list[float]]
) -> None:
    before, after, losses = trained[sharding_type]
    assert losses == pytest.approx(reference[1], abs=2e-6)
    assert after.keys() == reference[0].keys()
    for name, value in reference[0].items():
        if name.startswith("embeddings."):
            assert (after[name] - before[name]).abs().max() > 1e-3, f"{name} has not trained"
        torch.testing.assert_close(after[name], value, atol=2e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def save_and_resume(rank: int, tables: list[Table], folder: str) -> tuple[list[float], list[float], bool]:
    """Collective: the losses of steps 3 and 4 without and with a stop between, and whether all weights are the same bits."""
    context = init_distributed()
    model, optimizer = build_sharded(tables, "row_wise")
    train(model, optimizer, tables, range(3))
    Checkpointer(folder, model, optimizer, context).save(3, {})
    losses = train(model, optimizer, tables, range(3, 5))
    other, other_optimizer = build_sharded(tables, "row_wise")
    Checkpointer(folder, other, other_optimizer, context).restore_latest()
    resumed = train(other, other_optimizer, tables, range(3, 5))
    left, right = full_weights(model), full_weights(other)
    return losses, resumed, all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.long
def test_a_resumed_run_goes_on_bit_by_bit(ranks: RankPool, tmp_path: Path) -> None:
    losses, resumed, same = ranks.run(2, save_and_resume, make_tables(), str(tmp_path / "steps"))[0]
    assert losses == resumed
    assert same
