"""Tables that grow are joined to the rows of a stream: a training has the bits of one on rows that were joined beforehand."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from pipeline.cli.command_line import load_config
from pipeline.config.data import DataConfig
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.retraining import StreamConfig
from pipeline.data.dataset import load_dataset
from pipeline.data.prepare.run import prepare
from pipeline.data.targets import Target
from pipeline.extras.stream.encode import LineEncoder
from pipeline.extras.stream.source import TableRows
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.runtime.process.exit_codes import REQUEUE
from tests.extras.joins.tables import join_beforehand, write_tables
from tests.extras.joins.test_joins import ITEMS, USERS, assert_says, job_of
from tests.extras.stream.following import newest_step, start_retrain, values_of, wait_until

FIRST = 1500  # rows of the stream before the tables grow


def write_whole(table: pa.Table, path: Path) -> None:
    """Write a file that is complete when its name appears."""
    pq.write_table(table, path.with_name(f".{path.name}"))
    os.rename(path.with_name(f".{path.name}"), path)


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, DataConfig, pa.Table, pa.Table]:
    """A data set of the first rows and of what the tables had until then; the rows of the stream, narrow and joined beforehand.

    items/ and users/ have the versions up to the last of the first rows. late/ has the remaining versions.
    """
    write_tables(tmp_path)
    joined = pq.read_table(join_beforehand(tmp_path))
    rows = pq.read_table(tmp_path / "rows.parquet")
    now = rows["ts"][FIRST - 1].as_py()
    (tmp_path / "late").mkdir()
    for name, column in (("items", "written_at"), ("users", "seen_from")):
        table = pq.read_table(tmp_path / f"{name}.parquet")
        is_early = np.asarray(table[column]) <= now
        (tmp_path / name).mkdir()
        pq.write_table(table.filter(pa.array(is_early)), tmp_path / name / "0.parquet")
        pq.write_table(table.filter(pa.array(~is_early)), tmp_path / "late" / f"{name}.parquet")
        assert 0 < is_early.sum() < len(table)
    pq.write_table(rows.slice(0, FIRST), tmp_path / "first.parquet")
    job = job_of(tmp_path, "prepared", "first.parquet", (ITEMS | {"table": "items"}, USERS | {"table": "users"}))
    prepare(job)
    return tmp_path, job.data, rows, joined


def grow(folder: Path) -> None:
    for name in ("items", "users"):
        write_whole(pq.read_table(folder / "late" / f"{name}.parquet"), folder / name / "1.parquet")


def words_of(data: DataConfig, source: Path, run: Path, *more: str) -> list[str]:
    conf = run.parent / "conf" / "data"
    conf.mkdir(parents=True, exist_ok=True)
    (conf / "shop.yaml").write_text(yaml.safe_dump(asdict(data)))
    return [
        f"--config-dir={conf.parent}", "data=shop", "hardware=cpu", "follow=true", f"source={source}", f"run_dir={run}",
        f"registry.path={run}/registry", "trainer.global_batch_size=100", "checkpoint.save_every_minutes=null",
        "checkpoint.save_every_steps=7", "stream.poll_s=0.05", "tables.default.embedding_dim=4", "model.dense_arch_layer_sizes=[16,4]",
        "model.over_arch_layer_sizes=[16,1]", "trainer.evaluate_max_batches=1", "data.reader.num_streams=20", *more,
    ]  # fmt: skip


def encoder_of(data: DataConfig, join: bool) -> LineEncoder:
    stream = StreamConfig(join=join)
    return LineEncoder(data, load_dataset(data.path), stream, [Target("click")], lambda ids: ids)


@pytest.mark.long
def test_rows_of_a_stream_see_what_a_table_had_by_their_time(folder: Any) -> None:
    path, data, rows, joined = folder
    joining, given = encoder_of(data, True), encoder_of(data, False)
    for begin in range(0, len(rows), 500):
        if begin == FIRST:
            grow(path)
        found = joining.encode([TableRows("a", begin, rows.slice(begin, 500))]).batch
        wanted = given.encode([TableRows("a", begin, joined.slice(begin, 500))]).batch
        for one, other in (
            (found.dense_features, wanted.dense_features), (found.labels, wanted.labels),
            (found.sparse_features.values(), wanted.sparse_features.values()),
            (found.sparse_features.weights(), wanted.sparse_features.weights()),
            (found.sparse_features.lengths(), wanted.sparse_features.lengths()),
        ):  # fmt: skip
            assert torch.equal(one, other)
    zoned = rows.set_column(3, "ts", rows["ts"].cast(pa.timestamp("s")))
    with pytest.raises(DataError) as raised:
        joining.encode([TableRows("a", 0, zoned)])
    assert_says(raised, "microseconds", "items", "in one unit")
    with pytest.raises(ConfigError) as refused:
        load_config(RetrainJob, ["experiment=quickstart", f"source={path}", "follow=true", "stream.join=true"])
    assert_says(refused, "stream.join=true", "data.joins is empty")


@pytest.mark.campaign
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_followed_stream_is_trained_to_the_bits_of_rows_joined_beforehand(folder: Any, num_ranks: int) -> None:
    path, data, rows, joined = folder
    runs = {}
    for name, table in (("narrow", rows), ("wide", joined)):
        source, run = path / f"stream-{name}", path / f"run-{name}"
        source.mkdir()
        write_whole(table.slice(0, FIRST), source / "0.parquet")
        words = words_of(data, source, run, f"stream.join={str(name == 'narrow').lower()}")
        process = start_retrain([*words, "stream.idle_s=300"], num_ranks)
        try:
            wait_until(lambda run=run: newest_step(run) >= 7, process)
            if name == "narrow":
                grow(path)
            write_whole(table.slice(FIRST), source / "1.parquet")
            wait_until(lambda run=run: newest_step(run) >= 28, process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == REQUEUE
        finally:
            process.kill()
        assert start_retrain([*words, "stream.idle_s=1"], num_ranks).wait(120) == 0
        assert newest_step(run) == len(rows) // 100
        runs[name] = values_of(run, len(rows) // 100)
    assert runs["narrow"].keys() == runs["wide"].keys()
    assert all(torch.equal(runs["narrow"][key], runs["wide"][key]) for key in runs["wide"])
