"""The best step is saved where it is measured, and training's last lines, evaluate and export take it by default."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pipeline.checkpoint.retention import best_step
from pipeline.checkpoint.steps import list_steps
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import EvaluateJob, ExportJob
from pipeline.retraining.promotion import finished_run
from pipeline.runtime.errors import ConfigError, TrainingError
from pipeline.serving.artifact.trained_step import open_trained_step
from pipeline.training import summary as train_summary
from pipeline.training.summary import TrainSummary
from tests.support.jobs import evaluate_on_rank, train_on_rank
from tests.support.messages import mentions, names
from tests.support.ranks import RankPool

PRESET = Path(__file__).parents[2] / "conf" / "hardware" / "h100_80gb.yaml"
OVERRIDES = [
    "experiment=quickstart",
    "early_stop=auc",
    "hardware=cpu",
    "trainer.global_batch_size=256",
    "logger.tensorboard=false",
    "trainer.evaluate_every_epochs=0",
    "trainer.evaluate_every_steps=4",
    "trainer.evaluate_max_batches=4",
    "trainer.early_stop.patience=2",
]


@pytest.fixture(scope="module")
def trained(ranks: RankPool, prepared_clicks: str, tmp_path_factory: pytest.TempPathFactory) -> TrainSummary:
    """It learns for 8 steps; resumed at a rate that is far too high, it stops at step 16."""
    run_dir = tmp_path_factory.mktemp("runs") / "best"
    overrides = [*OVERRIDES, f"data.path={prepared_clicks}", f"run_dir={run_dir}"]
    ranks.run(1, train_on_rank, [*overrides, "trainer.max_steps=8"])
    return ranks.run(1, train_on_rank, [*overrides, "optimizer.dense.lr=0.3"])[0]


def measured(run_dir: str) -> dict[int, float]:
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["auc"] for line in lines if line["kind"] == "validation"}


def test_the_best_step_is_saved_and_named_by_the_last_lines(trained: TrainSummary) -> None:
    values = measured(trained.run_dir)
    best = max(values, key=lambda step: values[step])
    assert (trained.best_step, trained.step, trained.stopped_early) == (best, 16, True)
    assert best == 8
    assert best in list_steps(f"{trained.run_dir}/checkpoints")
    assert trained.validation["auc"] == values[best]
    assert trained.checkpoint.endswith(f"step_{best:08d}")
    assert mentions(train_summary.describe(trained), f"{best} {trained.step} auc")


@pytest.mark.long
def test_evaluate_and_export_take_the_best_step_unless_they_are_told(ranks: RankPool, trained: TrainSummary) -> None:
    run = f"run={trained.run_dir}"
    words = [run, "split=validation", "max_batches=4"]
    best = ranks.run(1, evaluate_on_rank, words)[0]
    assert (best.step, best.best_by) == (trained.best_step, "auc")
    assert best.metrics["auc"] == pytest.approx(trained.validation["auc"], abs=1e-9)
    assert mentions(train_summary.describe_evaluation(best), f"{best.step} best auc")
    last = ranks.run(1, evaluate_on_rank, [*words, "which=last"])[0]
    assert (last.step, last.best_by) == (trained.step, "")
    assert last.metrics["auc"] == pytest.approx(measured(trained.run_dir)[trained.step], abs=1e-9)
    found = {which: open_trained_step(load_config(ExportJob, [run, f"which={which}"])) for which in ("auto", "last")}
    assert [(source.step, source.best_by) for source in found.values()] == [(best.step, "auc"), (last.step, "")]


@pytest.mark.long
def test_a_run_of_gpus_is_evaluated_on_a_host_without(ranks: RankPool, trained: TrainSummary, tmp_path: Path) -> None:
    run = shutil.copytree(trained.run_dir, tmp_path / "run")
    config = OmegaConf.load(run / "config.yaml")
    config.hardware = OmegaConf.merge(config.hardware, OmegaConf.load(PRESET))
    OmegaConf.save(config, run / "config.yaml")
    words = ["split=validation", "max_batches=4"]
    there, here = (ranks.run(1, evaluate_on_rank, [f"run={each}", *words])[0] for each in (trained.run_dir, run))
    assert here.metrics == there.metrics


def test_a_step_and_which_are_not_both_given_and_a_run_without_a_best_one_says_so(
    ranks: RankPool, trained: TrainSummary, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=names("step=4 which=last")):
        EvaluateJob(run=trained.run_dir, step=4, which="last")
    (tmp_path / "config.yaml").write_bytes(Path(trained.run_dir, "config.yaml").read_bytes())
    with pytest.raises(TrainingError, match=names(f"which=best {tmp_path}")):
        open_trained_step(ExportJob(run=str(tmp_path), which="best"))
    assert best_step(str(tmp_path / "checkpoints"), "auc") is None


def test_a_registry_takes_the_best_step_of_a_run_that_keeps_it(trained: TrainSummary) -> None:
    run = finished_run(trained.run_dir)
    assert run.manifest["step"] == trained.best_step
    assert run.checkpoint == trained.checkpoint
