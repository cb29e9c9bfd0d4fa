"""Models of users and items, from a generated file to an evaluated run, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.cli.plan import plan
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.training import summary as train_summary
from pipeline.training.preflight import validate_job
from pipeline.training.summary import TrainSummary
from tests.end_to_end.user_items import job_words, train_on_rank
from tests.support.jobs import evaluate_on_rank
from tests.support.messages import names
from tests.support.ranks import RankPool
from tests.support.stored_tensors import stored_tensors


@pytest.fixture(scope="module")
def data(user_item_data: str) -> str:
    return user_item_data


@pytest.fixture(scope="module")
def retriever(user_item_run: TrainSummary) -> TrainSummary:
    return user_item_run


def test_a_retriever_is_measured_by_recall_and_nothing_speaks_of_auc(retriever: TrainSummary) -> None:
    metrics = retriever.validation
    assert metrics["recall_at_20"] > metrics["recall_at_5"] > 5 / 60 and metrics["num_samples"] == 2000
    assert retriever.bayes_auc is not None  # of the data, whose clicks could be predicted
    text = train_summary.describe(retriever)
    assert "recall_at_5" in text and "AUC" not in text and "NE" not in text
    lines = [json.loads(line) for line in Path(retriever.run_dir, "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_evaluate_finds_the_recall_of_the_training_on_any_number_of_ranks(
    ranks: RankPool, retriever: TrainSummary
) -> None:
    words = [f"run={retriever.run_dir}", "split=validation"]
    for world_size in (1, 2):
        summary = ranks.run(world_size, evaluate_on_rank, [*words, f"world_size={world_size}"])[0]
        assert summary.metrics == pytest.approx(retriever.validation, abs=2e-3)
        assert "AUC" not in train_summary.describe_evaluation(summary)


@pytest.mark.campaign
def test_a_retriever_goes_on_where_it_was_stopped_bit_for_bit(
    ranks: RankPool, data: str, retriever: TrainSummary, tmp_path: Path
) -> None:
    ranks.run(2, train_on_rank, job_words(data, tmp_path, "trainer.max_steps=13"))
    resumed = ranks.run(2, train_on_rank, job_words(data, tmp_path))[0]
    assert stored_tensors(resumed.checkpoint) == stored_tensors(retriever.checkpoint)


def test_retrieval_trains_alike_on_one_rank_and_two(
    ranks: RankPool, data: str, retriever: TrainSummary, tmp_path: Path
) -> None:
    alone = ranks.run(1, train_on_rank, job_words(data, tmp_path, "world_size=1"))[0]
    assert alone.validation == pytest.approx(retriever.validation, abs=1e-2)


@pytest.mark.long
@pytest.mark.parametrize("experiment", ["user_item_mf", "user_item_ncf", "user_item_fm", "user_item_two_tower"])
def test_every_model_plans_and_only_for_the_tables_that_it_reads(data: str, tmp_path: Path, experiment: str) -> None:
    words = [f"experiment={experiment}", "hardware=h100_80gb", "world_size=8", f"data.path={data}"]
    summary = plan(load_config(PlanJob, [*words, f"planner.plan_file={tmp_path}/plan.json"]))
    tables = {table["name"] for table in json.loads(Path(summary.plan_file).read_text())["tables"]}
    both = {"user_id", "item_id"}
    assert tables == (both if experiment in ("user_item_mf", "user_item_ncf") else both | {"user_group", "item_genre"})


def test_what_does_not_fit_is_told_before_torch(data: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=names("early_stop.metric model=two_tower mrr recall_at_20")):
        load_config(TrainJob, job_words(data, tmp_path, "trainer.early_stop.metric=ne"))
    for word, message in {
        "model.user_features=[user]": "model.user_features user_",
        "tables.item_id.compression.kind=hash": "tables.item_id",
    }.items():
        more = ["tables.item_id.compression.num_rows=20"] if "hash" in word else []
        with pytest.raises(ValueError, match=names(message)):
            validate_job(load_config(TrainJob, job_words(data, tmp_path, word, *more)), 1)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "experiment",
    ["user_item_mf", "user_item_ncf", "user_item_fm", "quickstart_lr", "quickstart_fm", "quickstart_wide_deep"],
)
def test_bf16_compile_and_resume_work_with_every_model(
    ranks: RankPool, data: str, prepared_clicks: str, tmp_path: Path, experiment: str
) -> None:
    path = data if experiment.startswith("user_item") else prepared_clicks
    words = [
        f"experiment={experiment}",
        "hardware=cpu",
        "trainer.global_batch_size=512",
        "trainer.max_steps=20",
        "trainer.precision=bf16",
        "trainer.compile=true",
        f"data.path={path}",
        "checkpoint.save_every_steps=10",
    ]
    whole = ranks.run(2, train_on_rank, [*words, f"run_dir={tmp_path}/whole"])[0]
    ranks.run(2, train_on_rank, [*words, f"run_dir={tmp_path}/cut", "trainer.max_steps=10"])
    cut = ranks.run(2, train_on_rank, [*words, f"run_dir={tmp_path}/cut"])[0]
    assert whole.validation["auc"] > 0.55
    assert stored_tensors(cut.checkpoint) == stored_tensors(whole.checkpoint)
