"""`head_rows: auto` becomes a number once, and the bytes that it was chosen for are those that a step sends."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.frequency_split import Workload, build, counted_bytes, draw, expected_bytes, stepper
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import job_from_yaml, job_to_yaml, load_saved_job
from pipeline.data.dataset import Dataset, load_dataset
from pipeline.devices.process_group import init_distributed
from pipeline.embeddings.table import Table
from pipeline.embeddings.tables import resolve_tables
from pipeline.extras.checkpoints.cli.checkpoints import export_checkpoint
from pipeline.extras.checkpoints.config import CheckpointsJob
from pipeline.extras.frequency_split.head_rows import choose_heads, has_auto
from pipeline.planner.resolved_job import resolve_job
from pipeline.runtime.errors import ConfigError
from pipeline.training.train import train
from tests.support.ranks import RankPool

SMALL = Workload(1.2, 1024, num_rows=2000, num_tables=2, dim=16)
CASES = [
    (SMALL, "whole"),
    (SMALL, "auto"),
    (replace(SMALL, sharding="row_wise"), "whole"),
    (replace(SMALL, sharding="row_wise"), "auto"),
    (replace(SMALL, sharding="column_wise"), "150"),
    (replace(SMALL, bag=3, skew=1.5), "auto"),
]


def sent_and_expected(rank: int, cases: list[tuple[Workload, str]]) -> list[tuple[str, float, float]]:
    """Collective."""
    context, found = init_distributed(), []
    for load, head in cases:
        job, dataset, assembly = build(context, load, head)
        run = stepper(assembly, job, draw(load, assembly, context))
        counted = counted_bytes(assembly, run, context, 4)
        expected = expected_bytes(job, dataset, assembly, context.world_size)
        found.append((f"{load.sharding} {load.bag} {head}", counted, expected))
    return found


@pytest.mark.parametrize("cases", [CASES[1:2], pytest.param(CASES, marks=pytest.mark.campaign)], ids=["one", "all"])
def test_a_step_sends_the_bytes_that_are_expected_of_its_head(
    ranks: RankPool, cases: list[tuple[Workload, str]]
) -> None:
    for name, counted, expected in ranks.run(2, sent_and_expected, cases)[0]:
        print(f"{name:<24}{counted:>12,.0f}{expected:>12,.0f}{counted / expected:>8.3f}")
        assert counted == pytest.approx(expected, rel=0.05), name


def job_for(data: str, *words: str, world_size: int = 2) -> TrainJob:
    return load_config(
        TrainJob, ["experiment=quickstart", "hardware=cpu", f"data.path={data}", f"world_size={world_size}", *words]
    )


ALL_LARGE = "tables.default.compression={kind: frequency_split, min_rows: 300}"


def test_tables_of_many_rows_get_a_number_each_and_the_others_stay_whole(prepared_clicks: str) -> None:
    job, dataset = job_for(prepared_clicks, ALL_LARGE), load_dataset(prepared_clicks)
    assert has_auto(job.tables)
    resolved = resolve_job(job, dataset, 2)
    assert has_auto(job.tables), "the job itself stays as it was"
    assert not has_auto(resolved.job.tables)
    for table in resolved.tables:
        assert (table.compression is not None) == (table.num_embeddings >= 300), table.name
    assert resolved.head_reports
    for report in resolved.head_reports:
        assert 0 < report.head_rows < report.num_embeddings
        assert report.chosen.total < min(report.none.total, report.all.total)
    notes = {part.name: part.note for part in resolved.plain_tables}
    assert "rows, " in notes["cat_25__hot"] and "without a head" in notes["cat_25__cold"] and not notes["cat_0"]


def test_a_table_of_its_own_overrides_the_default(prepared_clicks: str) -> None:
    job, dataset = job_for(prepared_clicks, ALL_LARGE), load_dataset(prepared_clicks)
    job = job_for(
        prepared_clicks,
        ALL_LARGE,
        "tables.cat_25.compression={kind: frequency_split, head_rows: 77}",
        "tables.cat_24.compression={kind: none}",
        "tables.cat_23.compression={kind: frequency_split, tail: {kind: hash, ratio: 4}}",
    )
    parts = {part.name: part.num_embeddings for part in resolve_job(job, dataset, 2).plain_tables}
    assert parts["cat_25__hot"] == 77 and "cat_24" in parts
    assert parts["cat_23__cold__hash"] == (dataset.sparse_feature("cat_23").cardinality - parts["cat_23__hot"]) // 4


def test_a_run_that_goes_on_keeps_its_numbers_and_memory_limits_new_ones(prepared_clicks: str) -> None:
    job, dataset = job_for(prepared_clicks, ALL_LARGE), load_dataset(prepared_clicks)
    first = chosen(job, dataset, 2)
    larger = job_for(prepared_clicks, ALL_LARGE, "trainer.global_batch_size=16384")
    assert chosen(larger, dataset, 4) != first
    assert chosen(larger, dataset, 4, earlier=first) == first
    assert head_rows(chosen(job, dataset, 2, room_bytes=0.0)) < head_rows(first)


def chosen(
    job: TrainJob,
    dataset: Dataset,
    world_size: int,
    room_bytes: float = math.inf,
    earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The tables of the resolved job."""

    def choose(tables: list[Table], auto: list[Table]) -> dict[str, int]:
        return choose_heads(job, tables, auto, dataset, world_size, room_bytes, earlier)

    return resolve_job(job, dataset, world_size, choose).job.tables


def test_tables_with_a_chosen_head_are_those_that_the_saved_job_resolves_to(prepared_clicks: str) -> None:
    """A run saves the numbers, and a resumed run, an evaluation and an export resolve the saved job."""
    own = "tables.cat_23.compression={kind: frequency_split, tail: {kind: hash, ratio: 4}}"
    job, dataset = job_for(prepared_clicks, ALL_LARGE, own), load_dataset(prepared_clicks)
    resolved = resolve_job(job, dataset, 2)
    again = resolve_job(job_from_yaml(TrainJob, job_to_yaml(resolved.job)), dataset, 2)
    assert again.all_tables == resolved.all_tables and again.tables == resolved.tables
    assert resolved.all_tables == resolve_tables(resolved.job.tables, dataset)


def head_rows(tables: dict[str, Any]) -> int:
    return sum(int(config.compression.head_rows) for config in tables.values() if config.compression is not None)


def test_hashed_ids_are_refused_before_anything_is_built(prepared_clicks: str) -> None:
    dataset = load_dataset(prepared_clicks)
    features = [replace(one, hash_size=one.cardinality) for one in dataset.sparse_features]
    with pytest.raises(ConfigError):
        resolve_job(job_for(prepared_clicks, ALL_LARGE), replace(dataset, sparse_features=features), 2)


def words_of(data: str, folder: str) -> list[str]:
    return [
        "experiment=quickstart",
        "hardware=cpu",
        f"data.path={data}",
        f"run_dir={folder}",
        "world_size=2",
        "trainer.global_batch_size=512",
        "trainer.evaluate_batch_size=512",
        "trainer.evaluate_max_batches=2",
        "tables.default.sharding.sharding_types=[table_wise]",
        "trainer.seed=3",
    ]


def trained(rank: int, words: list[str]) -> dict[str, float]:
    return train(load_config(TrainJob, words)).validation


@pytest.mark.campaign
def test_a_run_over_split_tables_learns_what_one_over_whole_tables_does(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    """Through the reader, TorchRec's train pipeline, a stop and a resume, evaluation and checkpoints."""
    whole = ranks.run(2, trained, [*words_of(prepared_clicks, str(tmp_path / "whole")), "trainer.max_steps=6"])[0]
    words = [*words_of(prepared_clicks, str(tmp_path / "split")), ALL_LARGE]
    ranks.run(2, trained, [*words, "trainer.max_steps=3"])
    saved = load_saved_job(TrainJob, str(tmp_path / "split" / "config.yaml"))
    assert not has_auto(saved.tables) and head_rows(saved.tables) > 0
    split = ranks.run(2, trained, [*words, "trainer.max_steps=6"])[0]
    assert split["ne"] == pytest.approx(whole["ne"], abs=1e-5)
    assert split["auc"] == pytest.approx(whole["auc"], abs=1e-4)
    for name in ("whole", "split"):
        words = [f"run={tmp_path / name}", "command=export", "table=cat_25", f"output={tmp_path / name}.parquet"]
        export_checkpoint(load_config(CheckpointsJob, [*words, "optimizer_state=true"]))
    one, other = (pq.read_table(f"{tmp_path / name}.parquet") for name in ("whole", "split"))
    assert one["row"] == other["row"] and one["value"] == other["value"] and one.schema == other.schema
    left, right = (np.stack(table["vector"].to_numpy()) for table in (one, other))
    np.testing.assert_allclose(right, left, atol=1e-4)
    plan = json.loads((tmp_path / "split" / "plan.json").read_text())
    reasons = {table["name"]: table["reason"] for table in plan["tables"]}
    assert "a step sends" in reasons["cat_25__hot"]


def test_one_rank_has_nothing_to_send_and_no_head(prepared_clicks: str) -> None:
    dataset: Dataset = load_dataset(prepared_clicks)
    alone = resolve_job(job_for(prepared_clicks, ALL_LARGE, world_size=1), dataset, 1)
    assert head_rows(alone.job.tables) == 0
