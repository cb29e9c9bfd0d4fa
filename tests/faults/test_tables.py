"""Fault 13: tables that the checkpoint lacks, or has too many of, or in another form: on resume, and on a warm start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torchrec.modules.embedding_configs import DataType

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.warm_start import warm_start
from pipeline.checkpoint.warm_start_policy import NewData
from pipeline.config.training import WarmStartConfig
from pipeline.runtime.errors import CheckpointError
from tests.checkpoint.resharding import Values, largest_difference, optimizers, whole
from tests.faults.conftest import FaultRecorder
from tests.support.datasets import described_dataset
from tests.support.ranks import RankPool
from tests.training.tiny import TinyTable, batches, build, context

OLD = [
    TinyTable("a", "row_wise", embedding_dim=16),
    TinyTable("b", "column_wise", embedding_dim=16),
    TinyTable("c", "data_parallel", embedding_dim=16),
]
A, B, C = OLD
DATASET = described_dataset({"f_a": 53})  # the same before and after: rows are matched by id
# fault -> tables of the job, words that the error of a resume must hold
FAULTS: dict[str, tuple[list[TinyTable], list[str]]] = {
    "missing": (
        [*OLD, TinyTable("d", embedding_dim=8)],
        ["table 'd': the checkpoint has none", "the job has 53 rows x 8"],
    ),
    "extra": ([A, B], ["table 'c': the checkpoint has 53 rows x 16 fp32, the job has none"]),
    "renamed": (
        [A, B, replace(C, name="z", features=("f_c",))],
        ["table 'z': the checkpoint has none", "table 'c'", "warm_start.renames={c: z}"],
    ),
    "grown": (
        [replace(A, num_embeddings=80), B, C],
        ["table 'a': the checkpoint has 53 rows x 16 fp32, the job has 80 rows"],
    ),
    "shrunk": ([A, replace(B, num_embeddings=40), C], ["table 'b': the checkpoint has 53 rows", "the job has 40 rows"]),
    "retyped": ([replace(A, data_type=DataType.FP16), B, C], ["table 'a'", "16 fp32, the job has 53 rows x 16 fp16"]),
    "reshaped": ([A, B, replace(C, embedding_dim=8)], ["table 'c': the checkpoint has 53 rows x 16", "53 rows x 8"]),
}


def _save(rank: int, folder: str, size: int) -> Values:
    model, training = build(rank, OLD, optimizers("adagrad"), None, size, 5)
    for features, labels in batches(OLD, 3, rank, size):
        training.zero_grad()
        model(features, labels)[0].backward()
        training.step()
    about = {"data_order": {"dataset": DATASET.fingerprint()}, "config": {"data": {"path": "nowhere"}}}
    Checkpointer(folder, model, training, context(rank), about=about).save(1)
    return whole(model, training)


def _resume(rank: int, folder: str, tables: list[TinyTable], size: int) -> str:
    """What the error says; nothing may have changed."""
    model, training = build(rank, tables, optimizers("adagrad"), None, size, 77)
    before = whole(model, training)
    try:
        Checkpointer(folder, model, training, context(rank)).restore_latest()
    except CheckpointError as error:
        assert largest_difference(whole(model, training), before) == 0.0
        return str(error)
    return "it was restored"


def _warm(
    rank: int, folder: str, tables: list[TinyTable], size: int, config: WarmStartConfig
) -> tuple[Values, Values, dict[str, int]]:
    """All values as drawn, after the warm start, and table -> rows loaded (a refusal: -1)."""
    model, training = build(rank, tables, optimizers("adagrad"), None, size, 77)
    fresh = whole(model, training)
    data = NewData(DATASET, "nowhere", {table.name: list(table.feature_names) for table in tables})
    try:
        report = warm_start(config, folder, model, training, context(rank), data, lambda tables: None)
    except CheckpointError:
        return fresh, whole(model, training), {"refused": -1}
    return fresh, whole(model, training), {one.table: one.rows_loaded for one in report.tables}


@pytest.mark.long
def test_on_resume_each_is_an_error_that_names_the_table_both_sides_and_the_way_out(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder
) -> None:
    ranks.run(2, _save, str(tmp_path / "checkpoints"), 2)
    for name, (tables, words) in FAULTS.items():
        for message in ranks.run(2, _resume, str(tmp_path / "checkpoints"), tables, 2):
            for word in [*words, f"warm_start.run={tmp_path}", "does not fit this model"]:
                assert word in message, f"{name}: {message}"
    fault(13, f"resume: {', '.join(FAULTS)}: an error with table, both shapes and the way out", count=len(FAULTS))


def _weight(table: str) -> str:
    return f"model.embedding_bag_collection.embedding_bags.{table}.weight"


def _state(table: str) -> str:
    return f"optimizer.state.embedding_bag_collection.embedding_bags.{table}.weight.{table}.momentum1"


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.campaign), 2])
@pytest.mark.campaign
def test_on_a_warm_start_each_follows_its_policy_row_by_row(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder, size: int
) -> None:
    saved = ranks.run(2, _save, str(tmp_path / "checkpoints"), 2)[0]
    for name, (tables, _) in FAULTS.items():
        config = WarmStartConfig(
            run=str(tmp_path),
            dense="matching",
            renames={"c": "z"} if name == "renamed" else {},
            reshaped_tables="fresh",
        )
        fresh, warm, loaded = ranks.run(size, _warm, str(tmp_path / "checkpoints"), tables, size, config)[0]
        for table in tables:
            old = next((one for one in OLD if one.name == {"z": "c"}.get(table.name, table.name)), None)
            kept = (
                min(old.num_embeddings, table.num_embeddings) if old and old.embedding_dim == table.embedding_dim else 0
            )
            assert loaded[table.name] == kept, name
            for key_of in (_weight, _state):
                now, drawn = warm[key_of(table.name)], fresh[key_of(table.name)]
                if kept and old:
                    then = saved[key_of(old.name)]
                    is_half = table.data_type == DataType.FP16 and key_of is _weight
                    assert torch.equal(now[:kept], then[:kept].half().float() if is_half else then[:kept]), name
                assert torch.equal(now[kept:], drawn[kept:]), name
            assert not warm[_state(table.name)][kept:].any()
    fault(
        13,
        f"warm start of a 2-rank step on {size} rank(s): {', '.join(FAULTS)}: the stated policy, row by row",
        count=len(FAULTS),
    )


@pytest.mark.campaign
def test_a_policy_of_refusal_changes_nothing(ranks: RankPool, tmp_path: Path, fault: FaultRecorder) -> None:
    ranks.run(2, _save, str(tmp_path / "checkpoints"), 2)
    refusing = {
        "missing": "new",
        "extra": "dropped",
        "grown": "grown",
        "shrunk": "shrunk",
        "retyped": "retyped",
        "reshaped": "reshaped",
    }
    for name, policy in refusing.items():
        config = WarmStartConfig(run=str(tmp_path), dense="matching", **{f"{policy}_tables": "refuse"})
        for fresh, after, loaded in ranks.run(2, _warm, str(tmp_path / "checkpoints"), FAULTS[name][0], 2, config):
            assert loaded == {"refused": -1} and largest_difference(fresh, after) == 0.0, name
    fault(13, "warm start, every policy set to refuse: refused, nothing loaded", count=len(refusing))
