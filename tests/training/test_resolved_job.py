"""A run resolves its tables once, and leaves the job as it was given."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.command_line import load_config
from pipeline.cli.plan import plan
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.config.saved_jobs import job_to_yaml, save_job
from pipeline.embeddings import tables
from pipeline.training.evaluate import evaluate
from pipeline.training.sharded_model import _plan_of_run
from pipeline.training.train import train
from tests.support.ranks import RankPool


def _counting(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that gains an entry at each call of resolve_tables, from whatever module."""
    calls: list[int] = []
    original = tables.resolve_tables

    def resolve_tables(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        return original(*arguments, **keywords)

    for module in list(sys.modules.values()):
        if getattr(module, "resolve_tables", None) is original:
            patch.setattr(module, "resolve_tables", resolve_tables)
    return calls


def _words(data: str, folder: Path) -> list[str]:
    return [
        "experiment=quickstart",
        "hardware=cpu",
        f"data.path={data}",
        "world_size=1",
        f"run_dir={folder}",
        "trainer.global_batch_size=512",
        "trainer.evaluate_batch_size=512",
        "trainer.evaluate_max_batches=1",
        "tables.default.compression={kind: frequency_split, min_rows: 300}",
    ]


def _train_and_evaluate(rank: int, words: list[str], folder: str) -> tuple[int, bool, int]:
    job = load_config(TrainJob, [*words, "trainer.max_steps=2"])
    before = job_to_yaml(job)
    with pytest.MonkeyPatch.context() as patch:
        calls = _counting(patch)
        train(job)
        trained = len(calls)
        evaluate(load_config(EvaluateJob, [f"run={folder}", "world_size=1", "split=validation", "max_batches=1"]))
    return trained, job_to_yaml(job) == before, len(calls) - trained


@pytest.mark.long
def test_a_training_resolves_its_tables_once_and_does_not_change_its_job(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    """`head_rows: auto` included: its number is in the config that the run saves."""
    words = _words(prepared_clicks, tmp_path / "run")
    assert ranks.run(1, _train_and_evaluate, words, str(tmp_path / "run")) == [(1, True, 1)]
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert "head_rows: auto" not in saved and "head_rows: " in saved


def test_a_plan_resolves_its_tables_once_and_does_not_change_its_job(
    prepared_clicks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_config(PlanJob, [*_words(prepared_clicks, tmp_path), f"planner.plan_file={tmp_path}/plan.json"])
    before, calls = job_to_yaml(job), _counting(monkeypatch)
    plan(job)
    assert (len(calls), job_to_yaml(job)) == (1, before)
    assert "head_rows: auto" in before


@pytest.mark.long
def test_a_run_that_goes_on_takes_up_its_plan_unless_the_planners_settings_changed(tmp_path: Path) -> None:
    words = ["experiment=quickstart", "hardware=cpu", f"run_dir={tmp_path}"]
    job = load_config(TrainJob, [*words, "planner=torchrec"])
    assert _plan_of_run(job) is None
    save_job(job, str(tmp_path / "config.yaml"))
    (tmp_path / "plan.json").write_text("{}")
    assert _plan_of_run(job) == str(tmp_path / "plan.json")
    assert _plan_of_run(load_config(TrainJob, [*words, "planner=torchrec", "planner.plan_file=x.json"])) is not None
    for other in ("planner=search", "planner.reserved_memory_fraction=0.3", "checkpoint.resume=false"):
        assert _plan_of_run(load_config(TrainJob, [*words, "planner=torchrec", other])) is None
    save_job(load_config(TrainJob, [*words, "planner=file", "planner.plan_file=x.json"]), str(tmp_path / "config.yaml"))
    assert _plan_of_run(load_config(TrainJob, [*words, "planner=search"])) == str(tmp_path / "plan.json")
