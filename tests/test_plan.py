from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.data.config import DataConfig
from pipeline.jobs import PlanJob
from pipeline.models.config import DLRMConfig
from pipeline.plan import describe, plan, train_command
from pipeline.planner.config import PlannerConfig
from pipeline.planner.planfile import read_plan
from pipeline.training.config import TrainerConfig
from tests.datasets import described_dataset
from tests.planner.problems import KAGGLE_ROWS, preset


@pytest.fixture
def job(tmp_path: Path) -> PlanJob:
    """Criteo Kaggle's shape for 64 ranks of absent hardware, from dataset.json alone."""
    dataset = described_dataset(
        {f"cat_{index}": rows for index, rows in enumerate(KAGGLE_ROWS)}, num_dense=13, num_rows=100_000
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset.json").write_text(dataset.to_json())
    return PlanJob(
        name="kaggle",
        world_size=16,
        data=DataConfig(name="kaggle", path=str(tmp_path / "data")),
        model=DLRMConfig(),
        planner=PlannerConfig(plan_file=str(tmp_path / "plan.json")),
        hardware=preset("h100_80gb"),
        trainer=TrainerConfig(global_batch_size=65536),
    )


def test_a_laptop_plans_for_absent_gpus(job: PlanJob) -> None:
    summary = plan(job)
    record = read_plan(job.planner.plan_file)
    assert (summary.world_size, summary.local_world_size, len(record.ranks)) == (16, 8, 16)
    assert list(record.plan.plan) == ["model.sparse_arch.embedding_bag_collection"]  # as in training
    assert [choice.num_embeddings for choice in record.tables] == KAGGLE_ROWS
    assert record.fingerprint["batch_size"] == 4096
    assert record.usable_hbm_bytes < 0.85 * 79 * 2**30  # the dense part has its share
    text = describe(summary)
    assert all(f"cat_{index} " in text for index in range(26))
    assert f"plan        {job.planner.plan_file} (torchrec, 16 rank(s) of h100_80gb" in text


def test_planning_from_the_file_shows_it_again_and_refuses_another_job(job: PlanJob) -> None:
    shown = plan(job).explanation
    job.planner.kind = "file"
    assert plan(job).explanation == shown
    job.trainer.global_batch_size = 32768
    with pytest.raises(ValueError, match="batch_size: 4096 in the plan, 2048 in this job"):
        plan(job)


def test_a_batch_that_does_not_divide_is_refused(job: PlanJob) -> None:
    job.trainer.global_batch_size = 1000
    with pytest.raises(ValueError, match="1000"):
        plan(job)


def test_the_next_command_trains_with_the_plan(job: PlanJob) -> None:
    job.planner.timeout_s = 1.0
    summary = plan(job)
    overrides = ["experiment=kaggle", "hardware=h100_80gb", "world_size=16", "planner=torchrec", "run_dir=a b"]
    assert train_command(summary, overrides) == (
        "torchx run -s <scheduler> pipeline.train -j 2x8 -- "
        "experiment=kaggle hardware=h100_80gb world_size=16 'run_dir=a b' planner=file"
    )
    host = replace(summary, world_size=8)
    assert train_command(host, []) == "torchx run -s local_cwd pipeline.train -j 1x8 -- planner=file"
    one = replace(summary, world_size=1, local_world_size=1)
    assert train_command(one, ["experiment=kaggle"]) == "python -m pipeline.train experiment=kaggle planner=file"
