"""data.group_column from raw rows to early stop: carried by the data set, read by evaluations alone, exact on any ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import GROUP_COLUMN, check_group, load_dataset
from pipeline.data.prepare.run import prepare
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.training import summary as train_summary
from pipeline.training.summary import TrainSummary
from tests.support.jobs import evaluate_on_rank, train_on_rank
from tests.support.messages import mentions, names
from tests.support.ranks import RankPool

COLUMNS = ["data.format=csv", "data.columns.label=click", "data.columns.sparse=[item,kind]", "data.group_column=user"]
NUM_ROWS = 1200


def write_rows(path: Path) -> list[str]:
    """The user of each row, empty where it is missing; users are no feature."""
    draw = np.random.default_rng(0)
    users = ["" if u == 0 else f"u{u}" for u in draw.integers(0, 25, NUM_ROWS)]
    rows = [
        f"{int(item % 3 == 0)},{user},i{item},k{item % 4}"
        for user, item in zip(users, draw.integers(0, 30, NUM_ROWS), strict=True)
    ]
    path.write_text("\n".join(["click,user,item,kind", *rows]) + "\n")
    return users


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("groups")
    write_rows(made / "rows.csv")
    prepare(load_config(PrepareJob, [*COLUMNS, "data.name=g", f"data.path={made}/ds", f"source={made}/rows.csv",
                                     "data.split.validation_fraction=0.3"]))  # fmt: skip
    return made


@pytest.fixture(scope="module")
def trained(ranks: RankPool, folder: Path) -> TrainSummary:
    overrides = [
        *COLUMNS, "data.name=g", f"data.path={folder}/ds", f"run_dir={folder}/run", "model=fm", "hardware=cpu",
        "trainer.global_batch_size=64", "trainer.group_metrics_at=[2,5]", "early_stop=auc", "trainer.epochs=2",
        "trainer.early_stop.metric=gauc", "checkpoint.best_metric=ndcg_at_2", "schedule.plateau.metric=hit_rate_at_5",
        "logger.tensorboard=false", "tables.default.embedding_dim=4",
    ]  # fmt: skip
    return ranks.run(1, train_on_rank, overrides)[0]


def test_the_data_set_carries_the_group_of_each_row(folder: Path) -> None:
    dataset = load_dataset(f"{folder}/ds")
    assert dataset.group_column == "user"
    assert dataset.sparse_feature_names == ["item", "kind"]
    users = write_rows(folder / "again.csv")
    tables = [
        pq.read_table(folder / "ds" / file.path)
        for split in ("train", "validation", "test")
        for file in dataset.splits[split].files
    ]
    ids = np.concatenate([table[GROUP_COLUMN].to_numpy() for table in tables])
    assert len(ids) == NUM_ROWS and len(set(zip(ids.tolist(), users, strict=True))) == len(set(users)) == len(set(ids))
    assert {user for group, user in zip(ids, users, strict=True) if group == 0} == {""}


def test_training_stops_and_keeps_the_best_by_group_metrics(trained: TrainSummary, folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line for line in lines if line["kind"] == "validation"}
    assert len(measured) == 2
    best = max(measured, key=lambda step: (measured[step]["ndcg_at_2"], step))
    assert (trained.best_step, trained.best_metric) == (best, "ndcg_at_2")
    assert {"gauc", "ndcg_at_2", "ndcg_at_5", "hit_rate_at_2", "hit_rate_at_5"} <= measured[best].keys()
    assert measured[best]["num_groups"] == 24
    assert not any("gauc" in line for line in lines if line["kind"] == "train")


def test_evaluate_prints_group_metrics_equal_on_one_and_two_ranks(ranks: RankPool, trained: TrainSummary) -> None:
    words = [f"run={trained.run_dir}", "split=test"]
    one, two = (ranks.run(world_size, evaluate_on_rank, words)[0] for world_size in (1, 2))
    assert one.metrics == pytest.approx(two.metrics, abs=1e-6)
    assert mentions(train_summary.describe_evaluation(one), "gauc ndcg_at_2 hit_rate_at_5 num_one_class_groups")


def test_a_group_that_is_not_there_is_refused(folder: Path, tmp_path: Path) -> None:
    lists = DataConfig(
        "g", str(tmp_path / "ds"), "csv", ColumnsConfig("click", multi_hot=["item"]), group_column="item"
    )
    with pytest.raises(DataError, match=names("data.group_column='item'")):
        prepare(PrepareJob(data=lists, source=f"{folder}/rows.csv"))
    with pytest.raises(ConfigError, match=names("trainer.early_stop.metric 'gauc'")):
        load_config(TrainJob, ["data=quickstart", "trainer.early_stop.metric=gauc"])
    with pytest.raises(DataError, match=names("data.group_column='kind' 'user'")):
        check_group(load_dataset(f"{folder}/ds"), "kind")
