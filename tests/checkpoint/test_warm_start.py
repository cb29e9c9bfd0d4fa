"""A new run starts from another's tables: row by row by value, under any plan, by a policy for what differs."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.checkpoint.chains import open_step
from pipeline.checkpoint.steps import list_steps
from pipeline.checkpoint.tables import inventory_of_step, local_chunks
from pipeline.checkpoint.vocabularies import IdSpace
from pipeline.checkpoint.warm_start_policy import RowMap, match_ids
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.config.training import WarmStartConfig
from pipeline.data.dataset import load_dataset
from pipeline.devices.process_group import init_distributed
from pipeline.runtime.errors import ConfigError
from pipeline.sharding.torchrec.table_init import initialize_tables
from pipeline.training.optimizer import build_optimizer
from pipeline.training.run_state import start_warm
from pipeline.training.sharded_model import build_sharded_model, resolve
from tests.checkpoint.resharding import whole
from tests.support.messages import names
from tests.support.ranks import RankPool

SMALL = [
    "experiment=quickstart",
    "hardware=cpu",
    "trainer.global_batch_size=256",
    "trainer.evaluate_batch_size=512",
    "trainer.max_steps=5",
    "trainer.evaluate_max_batches=1",
]
Values = dict[str, torch.Tensor]


def job_words(data: str, run_dir: Path, source: Path, *more: str) -> list[str]:
    return [*SMALL, f"data.path={data}", f"run_dir={run_dir}", f"warm_start.run={source}", *more]


def fresh_and_warm(rank: int, words: list[str]) -> tuple[Values, Values, dict[str, Any]]:
    """Collective: all values as drawn, all values after the warm start, and its report."""
    job = load_config(TrainJob, words)
    context, dataset = init_distributed(), load_dataset(job.data.path)
    assembly = build_sharded_model(resolve(job, dataset, context), context, initialize=False)
    optimizer = build_optimizer(assembly.model, job.optimizer)
    initialize_tables(assembly.model, job.trainer.seed)
    fresh = whole(assembly.model, optimizer)
    for key, value in assembly.model.state_dict().items():
        for part, _ in local_chunks(value) if ".embedding_bags." in key else ():
            part.detach().fill_(float("nan"))  # the warm start fills all of it
    assert job.warm_start is not None
    start_warm(job, job.warm_start, assembly, optimizer, context, dataset)
    report = json.loads(Path(job.run_dir, "warm_start.json").read_text()) if context.is_main else {}
    return fresh, whole(assembly.model, optimizer), report


def refused(rank: int, words: list[str]) -> str:
    try:
        fresh_and_warm(rank, words)
    except ValueError as error:
        return str(error)
    return "it was loaded"


def stored(run: Path, table: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and row-wise state of a table in the run's newest step."""
    _, _, tensors = open_step(str(run / "checkpoints"), None)
    found = inventory_of_step(tensors).tables[table]
    state = tensors.read(found.states["momentum1"].key, [0], [found.rows])
    return tensors.read(found.key, [0, 0], [found.rows, found.dim]), state


def of(values: Values, table: str) -> tuple[torch.Tensor, torch.Tensor]:
    weight = next(key for key in values if key.startswith("model.") and key.endswith(f".{table}.weight"))
    return values[weight], values[next(key for key in values if key.endswith(f".{table}.momentum1"))]


def row_of(report: dict[str, Any], table: str) -> dict[str, Any]:
    return next(one for one in report["tables"] if one["table"] == table)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, pytest.param(4, marks=pytest.mark.campaign)])
def test_the_same_tables_and_data_are_taken_over_whole_at_any_world_size(
    ranks: RankPool, small_run: Path, prepared_clicks: str, tmp_path: Path, world_size: int
) -> None:
    words = job_words(prepared_clicks, tmp_path / "new", small_run, "trainer.seed=9")
    fresh, warm, report = ranks.run(world_size, fresh_and_warm, words)[0]
    for table in ("cat_0", "cat_24", "cat_25"):
        weights, state = stored(small_run, table)
        assert torch.equal(of(warm, table)[0], weights) and torch.equal(of(warm, table)[1], state)
        assert not torch.equal(of(fresh, table)[0], weights) and state.any()
    assert len(report["tables"]) == 26 and report["dropped"] == [] and report["layers_fresh"] == []
    one = row_of(report, "cat_25")
    assert one["rows_loaded"] == one["rows"] and one["optimizer_state"] and one["changes"] == []
    _, _, tensors = open_step(str(small_run / "checkpoints"), None)
    layers = [key for key in warm if ".embedding_bags." not in key]
    assert layers and all(
        torch.equal(warm[key], tensors.read(key, [0] * warm[key].dim(), warm[key].shape)) for key in layers
    )


@pytest.mark.long
def test_grown_shrunk_and_retyped_tables_keep_their_rows_and_the_rest_is_as_from_scratch(
    ranks: RankPool, small_run: Path, prepared_clicks: str, tmp_path: Path
) -> None:
    grown, _ = stored(small_run, "cat_25")
    rows = len(grown)
    words = job_words(
        prepared_clicks,
        tmp_path / "new",
        small_run,
        f"tables.cat_25.num_embeddings={rows + 100}",
        "tables.cat_25.sharding.sharding_types=[row_wise]",
        "tables.cat_24.data_type=fp16",
        "tables.cat_24.sharding.sharding_types=[table_wise]",
    )
    fresh, warm, report = ranks.run(2, fresh_and_warm, words)[0]
    weights, state = of(warm, "cat_25")
    before, before_state = stored(small_run, "cat_25")
    assert torch.equal(weights[:rows], before) and torch.equal(state[:rows], before_state)
    assert torch.equal(weights[rows:], of(fresh, "cat_25")[0][rows:]) and not state[rows:].any()
    assert len(weights) == rows + 100 and weights[rows:].abs().min() > 0
    assert torch.equal(of(warm, "cat_24")[0], stored(small_run, "cat_24")[0].half().float())
    assert row_of(report, "cat_25")["changes"] == [f"grown from {rows:,} to {rows + 100:,} rows"]
    assert row_of(report, "cat_24")["changes"] == ["fp32 -> fp16"]


def _changed_data(data: str, folder: Path, feature: str, keep: slice, new_values: list[str]) -> tuple[str, list[str]]:
    """A copy of a data set in which `feature` has another vocabulary: reversed, cut, and with new values among it."""
    shutil.copytree(data, folder)
    path = folder / "vocabulary" / f"{feature}.parquet"
    table = pq.read_table(path)
    values = [*new_values, *reversed(table["value"].to_pylist()[keep])]
    ids = pa.array(range(1, len(values) + 1), pa.int32())
    pq.write_table(pa.table([values, [1] * len(values), ids], schema=table.schema), path)
    content = json.loads((folder / "dataset.json").read_text())
    for entry in content["sparse_features"]:
        if entry["name"] == feature:
            entry["cardinality"] = len(values) + 1
            entry["vocabulary_bytes"] = path.stat().st_size
            entry["vocabulary_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
            entry["frequency_curve"] = {"ranks": [len(values) + 1], "shares": [1.0]}
    (folder / "dataset.json").write_text(json.dumps(content))
    return str(folder), values


@pytest.mark.long
def test_rows_follow_their_values_into_another_vocabulary(
    ranks: RankPool, small_run: Path, prepared_clicks: str, tmp_path: Path
) -> None:
    data, values = _changed_data(prepared_clicks, tmp_path / "data", "cat_25", slice(0, 500), ["new_a", "new_b"])
    old = ["", *pq.read_table(f"{prepared_clicks}/vocabulary/cat_25.parquet")["value"].to_pylist()]
    words = job_words(data, tmp_path / "new", small_run, "tables.cat_25.sharding.sharding_types=[row_wise]")
    fresh, warm, report = ranks.run(2, fresh_and_warm, words)[0]
    weights, state = of(warm, "cat_25")
    before, before_state = stored(small_run, "cat_25")
    assert torch.equal(weights[0], before[0]), "the unknown row stays"
    for row, value in enumerate(values, start=1):
        if value.startswith("new_"):
            assert torch.equal(weights[row], of(fresh, "cat_25")[0][row]) and state[row] == 0
        else:
            assert torch.equal(weights[row], before[old.index(value)]) and state[row] == before_state[old.index(value)]
    one = row_of(report, "cat_25")
    assert one["rows_loaded"] == len(values) + 1 - 2 and "rows matched by value" in one["changes"]


@pytest.mark.long
def test_layers_are_matched_by_the_names_of_the_features_that_they_read(
    ranks: RankPool, small_run: Path, prepared_clicks: str, tmp_path: Path
) -> None:
    """Equal shapes are not enough: the weights of one feature would be applied to another."""
    data = shutil.copytree(prepared_clicks, tmp_path / "data")
    content = json.loads((data / "dataset.json").read_text())
    content["dense_features"][:2] = reversed(content["dense_features"][:2])
    (data / "dataset.json").write_text(json.dumps(content))
    words = job_words(str(data), tmp_path / "new", small_run)
    (message,) = ranks.run(1, refused, words)
    assert "int_0 is now int_1" in message and "warm_start.dense=matching" in message
    fresh, warm, report = ranks.run(1, fresh_and_warm, [*words, "warm_start.dense=matching"])[0]
    (first,) = [key for key in report["layers_fresh"] if "dense_arch" in key]
    assert torch.equal(warm[first], fresh[first]) and any("dense_arch" in key for key in report["layers_loaded"])


def test_a_folder_of_steps_is_not_a_step_and_the_message_names_the_newest(
    ranks: RankPool, small_run: Path, prepared_clicks: str, tmp_path: Path
) -> None:
    words = [*job_words(prepared_clicks, tmp_path / "new", small_run), "warm_start.run=null"]
    (message,) = ranks.run(1, refused, [*words, f"warm_start.checkpoint={small_run / 'checkpoints'}"])
    assert str(small_run / "checkpoints" / "step_0000") in message


@pytest.mark.campaign
def test_ids_that_cannot_be_matched_are_refused_unless_told_to_keep_them(
    ranks: RankPool, small_run: Path, prepared_clicks: str, tmp_path: Path
) -> None:
    data, _ = _changed_data(prepared_clicks, tmp_path / "data", "cat_25", slice(0, None), ["new_a"])
    words = job_words(data, tmp_path / "new", small_run, f"warm_start.data_path={tmp_path / 'gone'}")
    for message in ranks.run(2, refused, words):
        assert "rows cannot be matched by value" in message and "is not at" in message
        assert "warm_start.data_path=" in message and "warm_start.ids=keep" in message
    _, warm, _ = ranks.run(2, fresh_and_warm, [*words, "warm_start.ids=keep"])[0]
    before, _ = stored(small_run, "cat_25")
    assert torch.equal(of(warm, "cat_25")[0][: len(before)], before)


@pytest.mark.long
def test_optimizer_state_can_be_reset_and_layers_left_fresh(
    ranks: RankPool, small_run: Path, prepared_clicks: str, tmp_path: Path
) -> None:
    more = ("trainer.seed=9", "warm_start.optimizer=reset", "warm_start.dense=fresh", "warm_start.step=10")
    fresh, warm, report = ranks.run(2, fresh_and_warm, job_words(prepared_clicks, tmp_path / "new", small_run, *more))[
        0
    ]
    assert report["checkpoint"].endswith("step_00000010") and report["layers_loaded"] == []
    for key, value in warm.items():
        if ".embedding_bags." not in key or "momentum1" in key:
            assert torch.equal(value, fresh[key]), key
        else:
            assert not torch.equal(value, fresh[key]), key


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["tables.cat_25.num_embeddings=9999", "warm_start.grown_tables=refuse"],
            "'cat_25'.*9,999",
        ),
        (["warm_start.renames={cat_99: cat_25}"], "'cat_99'.*'cat_9'"),
        (["warm_start.renames={cat_25: nothing}"], "'nothing'"),
        (["optimizer=adagrad"], "momentum1.*momentum1.*warm_start.optimizer=reset"),
        (["tables.default.embedding_dim=32", "model.dense_arch_layer_sizes=[64,32,32]"], "embedding_dim 16 -> 32"),
        (["model.over_arch_layer_sizes=[32,1]"], "layer .*warm_start.dense=matching"),
        (["warm_start.step=11"], "step_00000011"),
    ],
)
def test_what_a_policy_refuses_is_named_with_the_way_out(
    ranks: RankPool, small_run: Path, prepared_clicks: str, tmp_path: Path, more: list[str], message: str
) -> None:
    import re

    (found,) = ranks.run(1, refused, job_words(prepared_clicks, tmp_path / "new", small_run, *more))
    assert re.search(message, found), found


@pytest.mark.long
def test_layers_that_fit_are_loaded_and_the_others_are_fresh(
    ranks: RankPool, small_run: Path, prepared_clicks: str, tmp_path: Path
) -> None:
    words = job_words(
        prepared_clicks, tmp_path / "new", small_run, "model.over_arch_layer_sizes=[32,1]", "warm_start.dense=matching"
    )
    fresh, warm, report = ranks.run(2, fresh_and_warm, words)[0]
    assert any("dense_arch" in key for key in report["layers_loaded"]) and report["layers_fresh"]
    for key in report["layers_fresh"]:
        assert torch.equal(warm[key], fresh[key])


def _train(rank: int, words: list[str]) -> int:
    from pipeline.training.train import train

    return train(load_config(TrainJob, words)).step


@pytest.mark.campaign
def test_a_run_with_a_step_of_its_own_is_resumed_and_not_started_again(
    ranks: RankPool, small_run: Path, prepared_clicks: str, tmp_path: Path
) -> None:
    words = job_words(prepared_clicks, tmp_path / "new", small_run)
    assert ranks.run(2, _train, words) == [5, 5]
    assert (tmp_path / "new" / "warm_start.json").is_file()
    (tmp_path / "new" / "warm_start.json").unlink()
    assert ranks.run(1, _train, [*words, "trainer.max_steps=8"]) == [8]
    assert not (tmp_path / "new" / "warm_start.json").exists()
    assert list_steps(str(tmp_path / "new" / "checkpoints")) == [5, 8]


def test_row_0_stays_and_equal_hashes_are_kept(tmp_path: Path) -> None:
    assert [rows.tolist() for rows in RowMap().pairs(2, 5, 4)] == [[2, 3], [2, 3]]
    hashed = IdSpace(hashed=(100, 1))
    assert match_ids(hashed, hashed) == RowMap()
    assert "hashed to 100 rows with seed 1" in str(match_ids(hashed, IdSpace(hashed=(200, 1))))
    assert "by hash" in str(match_ids(hashed, IdSpace(vocabulary="x")))
    paths = []
    for name, values in {"old": ["a", "b", "c"], "new": ["c", "x", "a"]}.items():
        paths.append(str(tmp_path / f"{name}.parquet"))
        pq.write_table(
            pa.table({"value": values, "count": [3, 2, 1], "id": pa.array([1, 2, 3], pa.int32())}), paths[-1]
        )
    old, new = RowMap(*paths).pairs(0, 4, 4)
    np.testing.assert_array_equal([old, new], [[0, 1, 3], [0, 3, 1]])
    old, new = RowMap(*paths).pairs(1, 2, 4)
    np.testing.assert_array_equal([old, new], [[3], [1]])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "run checkpoint"),
        ({"run": "a", "checkpoint": "b"}, "run checkpoint"),
        ({"checkpoint": "b", "step": 3}, "step"),
        ({"run": "a", "grown_tables": "extnd"}, "extend"),
        ({"run": "a", "renames": {"a": "c", "b": "c"}}, "renames"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        WarmStartConfig(**values)
