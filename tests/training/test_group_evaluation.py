"""data.group_column from raw rows to early stop: carried by the data set, read by evaluations alone, exact on any ranks."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import GROUP_COLUMN, check_group, load_dataset
from pipeline.data.prepare.run import prepare
from pipeline.data.quality import binary_entropy
from pipeline.extras.runs import row_file
from pipeline.extras.runs.report_features import value_names
from pipeline.extras.runs.slices import MAX_VALUES, read_slices
from pipeline.runtime.errors import ConfigError, DataError, UserError
from pipeline.training import summary as train_summary
from pipeline.training.summary import EvaluateSummary, TrainSummary
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


def evaluate_in_small_row_groups(rank: int, words: list[str]) -> EvaluateSummary:
    with patch.object(row_file, "ROWS_PER_ROW_GROUP", 64):
        return evaluate_on_rank(rank, words)


def error_of_evaluation(rank: int, words: list[str], interrupted: bool) -> str:
    with patch.object(row_file.atomic, "publish_file", side_effect=KeyboardInterrupt) if interrupted else nullcontext():
        try:
            evaluate_on_rank(rank, words)
        except (UserError, KeyboardInterrupt) as error:
            return f"{type(error).__name__} {error}"
    return ""


@pytest.mark.long
def test_evaluate_gives_equal_group_metrics_and_rows_on_one_and_two_ranks(
    ranks: RankPool, trained: TrainSummary, folder: Path, tmp_path: Path
) -> None:
    words = [f"run={trained.run_dir}", "split=test", "metrics=[gauc:kind,segmented_ne:kind,recalibrated_ne,xauc]"]
    one, two = (
        ranks.run(
            size,
            evaluate_in_small_row_groups,
            [*words, f"predictions={tmp_path}/{size}.parquet", "slices=[kind,kind*item]"],
        )[0]
        for size in (1, 2)
    )
    assert one.metrics == pytest.approx(two.metrics, abs=1e-6)
    assert one.metrics["xauc"] == pytest.approx(one.metrics["auc"]) and 0.5 < one.metrics["gauc:kind"] <= 1.0
    assert one.metrics["recalibrated_ne"] < one.metrics["ne"] < one.metrics["segmented_ne:kind"]
    assert mentions(train_summary.describe_evaluation(one), "gauc ndcg_at_2 hit_rate_at_5 num_one_class_groups")

    rows, same = (pq.read_table(tmp_path / f"{size}.parquet") for size in (1, 2))
    assert rows.column_names == ["row", "label", "score", "group"]
    assert rows.drop_columns("score") == same.drop_columns("score")
    labels, scores = (rows[name].to_numpy().astype(np.float64) for name in ("label", "score"))
    np.testing.assert_allclose(scores, same["score"].to_numpy(), atol=1e-6)
    assert pq.ParquetFile(tmp_path / "1.parquet").num_row_groups == -(-len(rows) // 64) > 1
    dataset = load_dataset(f"{folder}/ds")
    shards = pa.concat_tables(pq.read_table(folder / "ds" / file.path) for file in dataset.splits["test"].files)
    at = rows["row"].to_numpy()
    assert sorted(at) == list(range(len(shards)))
    np.testing.assert_array_equal(shards["click"].to_numpy()[at], labels)
    np.testing.assert_array_equal(shards[GROUP_COLUMN].to_numpy()[at], rows["group"].to_numpy())
    above = scores[labels == 1][:, None] - scores[labels == 0]
    assert ((above > 0) + (above == 0) / 2).mean() == pytest.approx(one.metrics["auc"], abs=1e-6)
    logloss = -(labels * np.log(scores) + (1 - labels) * np.log1p(-scores)).mean()
    assert logloss == pytest.approx(one.metrics["logloss"], abs=1e-6)

    found = read_slices(f"{trained.run_dir}/evaluation.test.step_{one.step}.slices.json")
    assert found is not None and one.details and one.details == two.details
    every, *by = found.slices
    assert (every.value, every.rows, every.auc[0]) == ("all rows", len(rows), pytest.approx(one.metrics["auc"]))
    items, kinds = (shards[name].to_numpy()[at] for name in ("item", "kind"))
    for name, groups in (("kind", kinds), ("kind*item", list(zip(kinds, items, strict=True)))):
        sizes = sorted(Counter(map(str, groups)).values(), reverse=True)
        sliced = [each for each in by if each.by == name]
        assert sliced[-1].value.endswith("other values") == (len(sizes) > MAX_VALUES)
        assert [each.rows for each in sliced[:MAX_VALUES]] == sizes[:MAX_VALUES]
        assert sum(each.rows for each in sliced) == len(rows) and sum(each.share for each in sliced) == pytest.approx(1)
    first = next(each for each in by if each.by == "kind" and each.ne[0] is not None)
    names_of = value_names(f"{folder}/ds", dataset, "kind", range(40))
    (id,) = (id for id, value in names_of.items() if value == first.value)
    mine, its = labels[kinds == id], scores[kinds == id]
    losses = -(mine * np.log(its) + (1 - mine) * np.log1p(-its))
    assert first.ne[0] == pytest.approx(losses.mean() / binary_entropy(mine.mean()), abs=1e-5)
    assert first.calibration[0] == pytest.approx(its.sum() / mine.sum(), abs=1e-5)


@pytest.mark.parametrize("word", ["slices=[itm]", "slices=[user]", "slices=[item*itm]", "metrics=[gauc:itm]"])
def test_an_unknown_feature_is_refused(ranks: RankPool, trained: TrainSummary, word: str) -> None:
    (error,) = ranks.run(1, error_of_evaluation, [f"run={trained.run_dir}", word], False)
    key, _, rest = word.partition("=")
    assert mentions(error, f"{key} {rest.strip('[]').replace(':', '*').rpartition('*')[2]} item kind")


@pytest.mark.long
def test_a_file_of_rows_appears_complete_and_replaces_only_its_own(
    ranks: RankPool, trained: TrainSummary, tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"
    words = [f"run={trained.run_dir}", "split=test", "max_batches=1", f"predictions={path}"]
    assert ranks.run(1, error_of_evaluation, words, True) == ["KeyboardInterrupt "]
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        assert ranks.run(1, error_of_evaluation, words, False) == [""]
    assert len(pq.read_table(path)) == 64 and list(tmp_path.iterdir()) == [path]
    for other in ("split=validation", "max_batches=2"):
        for error in ranks.run(2, error_of_evaluation, [*words, other], False):
            assert mentions(error, f"predictions={path} remove")
    path.write_text("notes")
    (error,) = ranks.run(1, error_of_evaluation, words, False)
    assert "was not written by this evaluation" in error and path.read_text() == "notes"
    with pytest.raises(ConfigError, match=names("predictions=rows.csv .parquet")):
        load_config(EvaluateJob, [*words, "predictions=rows.csv"])


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
