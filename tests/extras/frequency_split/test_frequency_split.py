"""A table split into a hot head and a cold tail is, to model, training and checkpoints, the table it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.config.tables import CompressionConfig, ConstraintConfig, InitConfig
from pipeline.devices.process_group import init_distributed
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.embeddings.physical import physical_tables
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.extras.frequency_split.kind import FrequencySplit
from pipeline.runtime.errors import ConfigError
from pipeline.sharding.torchrec.table_init import initialize_tables
from tests.embeddings.compressed import NUM_IDS, NUM_STEPS, PooledModel, as_features, sample_bags, table_of
from tests.embeddings.split_tables import (
    HEAD,
    SEED,
    build,
    make_tables,
    optimizers,
    split,
    train,
    train_unsplit,
    whole_rows,
)
from tests.support.messages import names
from tests.support.ranks import RankPool
from tests.training.tiny import full_weights

# Row-wise Adagrad on column shards is another optimizer (embeddings/limits.py).
OPTIMIZER_OF = {
    "table_wise": "rowwise_adagrad",
    "row_wise": "rowwise_adagrad",
    "column_wise": "adagrad",
    "data_parallel": "rowwise_adagrad",
}


def train_split(rank: int) -> dict[str, Any]:
    """Collective: by the tails' sharding type, weights before and after, and losses."""
    tables, found = make_tables(), {}
    for kind, optimizer_name in OPTIMIZER_OF.items():
        model, optimizer = build(tables, kind, optimizers(optimizer_name))
        before = full_weights(model)
        losses = train(model, optimizer, tables, range(NUM_STEPS))
        found[kind] = before, full_weights(model), losses
    return found


@pytest.fixture(scope="module")
def trained(ranks: RankPool) -> dict[str, Any]:
    return ranks.run(2, train_split)[0]


@pytest.mark.parametrize("kind", OPTIMIZER_OF)
def test_split_tables_train_as_whole_ones_do(kind: str, trained: dict[str, Any]) -> None:
    tables = make_tables()
    before, after, losses = trained[kind]
    over = {name: value for name, value in before.items() if name.startswith("over")}
    first, last = whole_rows(tables, before), whole_rows(tables, after)
    expected, expected_losses = train_unsplit(tables, first, over, optimizers(OPTIMIZER_OF[kind]))
    assert losses == pytest.approx(expected_losses, abs=1e-6)
    for name, rows in expected.items():
        assert (last[name] - first[name]).abs().max() > 1e-3, f"{name} has not trained"
        torch.testing.assert_close(last[name], rows, atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_the_rows_are_drawn_as_those_of_the_whole_table(trained: dict[str, Any]) -> None:
    tables = make_tables()
    unsplit = PooledModel([table_of(table.name, None) for table in tables], torch.device("cpu"))
    initialize_tables(unsplit, SEED)
    whole = {name.split(".")[-2]: value for name, value in unsplit.state_dict().items() if "embedding_bags" in name}
    for kind in OPTIMIZER_OF:
        rows = whole_rows(tables, trained[kind][0])
        for table in tables:
            assert torch.equal(rows[table.name], whole[table.name][: len(rows[table.name])]), table.name


def test_a_part_has_the_scale_of_the_whole_table() -> None:
    table = table_of("t", split(HEAD))
    table = replace(table, init=InitConfig("uniform"))
    assert [part.init.scale for part in physical_tables([table])] == [NUM_IDS**-0.5] * 2


def save_and_resume(rank: int, folder: str) -> tuple[list[float], list[float], bool]:
    """Collective: losses of steps 3 and 4 without and with a stop between, and whether all weights are the same bits."""
    context, tables, config = init_distributed(), make_tables(), optimizers("rowwise_adagrad")
    model, optimizer = build(tables, "row_wise", config)
    train(model, optimizer, tables, range(3))
    Checkpointer(folder, model, optimizer, context).save(3, {})
    losses = train(model, optimizer, tables, range(3, 5))
    other, other_optimizer = build(tables, "row_wise", config)
    Checkpointer(folder, other, other_optimizer, context).restore_latest()
    resumed = train(other, other_optimizer, tables, range(3, 5))
    left, right = full_weights(model), full_weights(other)
    return losses, resumed, all(torch.equal(left[name], right[name]) for name in left)


def test_a_resumed_run_goes_on_bit_by_bit(ranks: RankPool, tmp_path: Path) -> None:
    losses, resumed, same = ranks.run(2, save_and_resume, str(tmp_path / "steps"))[0]
    assert losses == resumed
    assert same


def test_ids_below_the_head_go_to_it_and_others_to_the_tail() -> None:
    tables = [table_of("t", split(HEAD), num_ids=NUM_IDS)]
    bags = {"t_one": [[3], [], [40], [20]], "t_many": [[1, 30, 2], [52], [0], []]}
    features = IdSplitter(tables)(as_features(bags, slice(0, 4)))
    assert features.keys() == ["t_one__hot", "t_one__cold", "t_many__hot", "t_many__cold"]
    by_key = {key: [part.tolist() for part in features[key].to_dense()] for key in list(features.keys())}
    assert by_key == {
        "t_one__hot": [[3], [], [], []],
        "t_one__cold": [[], [], [20], [0]],
        "t_many__hot": [[1, 2], [], [0], []],
        "t_many__cold": [[10], [32], [], []],
    }


def test_bags_without_a_cold_id_are_not_there() -> None:
    tables = [table_of("t", split(HEAD)), table_of("u", split(HEAD, skip_empty_bags=False))]
    bags, _ = sample_bags(tables, 0)
    features = IdSplitter(tables, skip_empty_bags=True)(as_features(bags, slice(0, 32)))
    counts = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    cold = sum(any(id_ >= HEAD for id_ in bag) for bag in bags["t_many"])
    assert counts["t_many__cold"] == -(-(cold + 1) // 8) * 8
    assert counts["t_many__hot"] == counts["u_many__cold"] == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_rows": "lots"}, "head_rows=lots"),
        ({"head_rows": "auto", "head_sharding_types": ["table_wise"]}, "head_rows=<rows>"),
        ({"head_rows": "3", "tail": CompressionConfig("frequency_split", head_rows="9")}, "tail"),
        ({"head_rows": "3", "ratio": 4.0}, "compression.ratio=4.0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        CompressionConfig("frequency_split", **settings)


def test_hashed_ids_have_no_head() -> None:
    table = table_of("t", split(HEAD))
    hashed = replace(table, frequencies=RowFrequencies([0, NUM_IDS], [0.0, 1.0], by_row=False))
    with pytest.raises(ConfigError):
        physical_tables([hashed])


def test_a_tail_is_sharded_as_its_table_may_be() -> None:
    table = replace(table_of("t", split(HEAD)), sharding=ConstraintConfig(["grid_shard", "table_row_wise"]))
    assert FrequencySplit(table).parts()[1].sharding.sharding_types == ["grid_shard", "table_row_wise"]
