"""From a Criteo file to a trained, evaluated model, as a person runs it, on one data set that all tests share."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.checkpoint.steps import list_steps
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.devices.process_group import init_distributed
from pipeline.runtime.errors import TrainingError
from pipeline.runtime.process.distributed import take_run_folder
from pipeline.training import summary as train_summary
from pipeline.training import train
from pipeline.training.evaluate import evaluate
from pipeline.training.summary import TrainSummary
from tests.support.forks import WarmCommand, run_warm
from tests.support.jobs import evaluate_on_rank, train_on_rank
from tests.support.messages import mentions, names
from tests.support.ranks import RankPool
from tests.support.stored_tensors import stored_tensors

STEPS = 93  # of 256 rows: 24,000 training rows, the rest of an epoch is left out
SMALL = [
    "experiment=quickstart",
    "hardware=cpu",
    "trainer.global_batch_size=256",
    "trainer.log_every_steps=20",
    "trainer.evaluate_batch_size=512",
]


def _job(data: str, run_dir: Path | str, *overrides: str) -> list[str]:
    return [*SMALL, f"data.path={data}", f"run_dir={run_dir}", *overrides]


def _files(folder: str | Path) -> dict[str, int]:
    """Checksums of what a checkpoint holds of the model."""
    return {name: zlib.crc32(content) for name, content in stored_tensors(folder).items()}


@pytest.fixture(scope="module")
def trained(ranks: RankPool, prepared_clicks: str, tmp_path_factory: pytest.TempPathFactory) -> TrainSummary:
    """One run on two ranks, saved at step 40, 80 and at the end."""
    run_dir = tmp_path_factory.mktemp("runs") / "trained"
    overrides = _job(prepared_clicks, run_dir, "checkpoint.save_every_steps=40", "checkpoint.keep_last_n=9")
    return ranks.run(2, train_on_rank, overrides)[0]


@pytest.mark.long
def test_a_run_leaves_all_that_its_summary_names(trained: TrainSummary) -> None:
    assert (trained.step, trained.stopped_early) == (STEPS, False)
    run_dir = Path(trained.run_dir)
    assert list_steps(str(run_dir / "checkpoints")) == [40, 80, STEPS]
    assert (run_dir / "plan.json").is_file() and (run_dir / "config.yaml").is_file()
    assert list((run_dir / "tensorboard").iterdir())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [20, 40, 60, 80, STEPS]
    manifest = json.loads((run_dir / "checkpoints" / "step_00000040" / "manifest.json").read_text())
    assert manifest["config"]["trainer"]["global_batch_size"] == 256
    assert manifest["plan"] == json.loads((run_dir / "plan.json").read_text())
    assert manifest["reader"] == {"epoch": 0, "step": 40}
    needed = {"ne", "logloss", "calibration", "label_rate", "samples_per_s", "input_stall_percent", "comms_percent",
              "peak_memory_gb", "lr_sparse", "lr_dense"}  # fmt: skip
    assert all(needed <= line.keys() for line in lines if line["kind"] == "train")
    text = train_summary.describe(trained)
    for name in (trained.checkpoint, "plan.json", "metrics.jsonl", "tensorboard", "samples/s", "pipeline evaluate"):
        assert name in text


def test_the_model_learns_the_planted_teacher(trained: TrainSummary) -> None:
    assert trained.bayes_auc is not None
    assert 0.75 < trained.bayes_auc < 0.95
    # 24,000 rows are too few for more; `make train` shows what a full data set gives.
    assert trained.validation["auc"] > 0.5 + 0.5 * (trained.bayes_auc - 0.5)


@pytest.mark.campaign
def test_the_same_seed_gives_the_same_weights_bit_for_bit(
    ranks: RankPool, prepared_clicks: str, trained: TrainSummary, tmp_path: Path
) -> None:
    half = Path(trained.run_dir) / "checkpoints" / "step_00000040"
    short = ["trainer.max_steps=40", "trainer.evaluate_max_batches=1"]
    again = ranks.run(2, train_on_rank, _job(prepared_clicks, tmp_path / "again", *short))[0]
    assert _files(again.checkpoint) == _files(half)
    other = ranks.run(2, train_on_rank, _job(prepared_clicks, tmp_path / "other", *short, "trainer.seed=1"))[0]
    assert _files(other.checkpoint) != _files(half)


@pytest.mark.long
def test_a_stopped_run_goes_on_where_it_was_and_ends_the_same(
    ranks: RankPool, prepared_clicks: str, trained: TrainSummary, tmp_path: Path
) -> None:
    overrides = _job(prepared_clicks, tmp_path / "cut")
    ranks.run(2, train_on_rank, [*overrides, "trainer.max_steps=37", "trainer.evaluate_max_batches=1"])
    resumed = ranks.run(2, train_on_rank, overrides)[0]
    assert _files(resumed.checkpoint) == _files(trained.checkpoint)
    lines = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    partial = {line["step"]: line["window_steps"] for line in lines if "window_steps" in line}
    assert partial == {40: 3.0}  # the measures of this line lack the steps before the restart


def _train_after_draws(rank: int, overrides: list[str]) -> None:
    """As if libraries that start-up imports drew from each generator: before a step is restored, and after it."""

    def drawing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            random.random(), np.random.random(), torch.rand(())
            return function(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("plan_tables", "_open_writer"):
            patch.setattr(train, name, drawing(getattr(train, name)))
        train_on_rank(rank, overrides)


@pytest.mark.campaign
def test_what_libraries_draw_while_a_run_starts_is_not_in_its_random_state(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    """rich draws when it is imported, which a process does once and a run that is restarted does anew."""
    states = []
    runs = (("plain", train_on_rank, 1), ("disturbed", _train_after_draws, 1), ("disturbed", _train_after_draws, 2))
    for name, run, steps in runs:  # from the start, and resumed
        words = [f"trainer.max_steps={steps}", "trainer.evaluate_max_batches=1"]
        ranks.run(1, run, _job(prepared_clicks, tmp_path / name, *words))
        path = tmp_path / name / "checkpoints" / f"step_{steps:08d}" / "random_00000.json"
        states.append(
            {key: value for key, value in json.loads(path.read_text()).items() if key not in ("step", "save_id")}
        )
    assert all(state == states[0] for state in states)  # and training itself draws nothing


@pytest.mark.campaign
def test_dropout_and_batch_norm_are_resumed_bit_for_bit_and_evaluated_by_running_statistics(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    few = ["experiment=quickstart_deepfm", "model.hidden_layer_sizes=[16]", "trainer.evaluate_max_batches=2"]
    cut, whole = (_job(prepared_clicks, tmp_path / name, *few, "trainer.max_steps=8") for name in ("cut", "whole"))
    ranks.run(2, train_on_rank, [*cut[:-1], "trainer.max_steps=5"])
    resumed = ranks.run(2, train_on_rank, cut)
    uninterrupted = ranks.run(2, train_on_rank, whole)
    assert _files(resumed[0].checkpoint) == _files(uninterrupted[0].checkpoint)
    assert resumed[0].validation == uninterrupted[0].validation == resumed[1].validation
    alone = ranks.run(1, evaluate_on_rank, [f"run={tmp_path / 'whole'}", "split=validation", "max_batches=2"])[0]
    assert alone.metrics == pytest.approx(uninterrupted[0].validation, rel=1e-4)


@pytest.mark.campaign
def test_fp16_tables_learn_as_well_and_resume_bit_for_bit(
    ranks: RankPool, prepared_clicks: str, trained: TrainSummary, tmp_path: Path
) -> None:
    half = ["tables.default.data_type=fp16", "tables.default.sharding.sharding_types=[table_wise]"]
    cut, whole = (_job(prepared_clicks, tmp_path / name, *half) for name in ("cut", "whole"))
    ranks.run(1, train_on_rank, [*cut, "trainer.max_steps=37"])
    resumed = ranks.run(1, train_on_rank, cut)[0]
    uninterrupted = ranks.run(1, train_on_rank, whole)[0]
    assert _files(resumed.checkpoint) == _files(uninterrupted.checkpoint)
    assert uninterrupted.validation["auc"] == pytest.approx(trained.validation["auc"], abs=2e-3)
    size, full = (
        sum(file.stat().st_size for file in Path(each.checkpoint).glob("*.distcp")) for each in (uninterrupted, trained)
    )
    assert size < 0.75 * full  # half of the tables, all of the states and layers


@pytest.mark.parametrize("world_size", [1, pytest.param(4, marks=pytest.mark.campaign)])
def test_any_number_of_ranks_trains_the_same_model(
    ranks: RankPool, prepared_clicks: str, trained: TrainSummary, tmp_path: Path, world_size: int
) -> None:
    summary = ranks.run(world_size, train_on_rank, _job(prepared_clicks, tmp_path / "run"))[0]
    assert summary.validation == pytest.approx(trained.validation, abs=1e-3)


@pytest.mark.campaign
@pytest.mark.parametrize("model", ["dlrm_dcn", "deepfm"])
def test_the_other_models_learn_it_too(ranks: RankPool, prepared_clicks: str, tmp_path: Path, model: str) -> None:
    overrides = _job(prepared_clicks, tmp_path, f"experiment=quickstart_{model}")
    summary = ranks.run(2, train_on_rank, overrides)[0]
    assert summary.bayes_auc is not None
    assert summary.validation["auc"] > 0.5 + 0.5 * (summary.bayes_auc - 0.5)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.campaign)])
@pytest.mark.campaign
def test_the_settings_work_together(ranks: RankPool, prepared_clicks: str, tmp_path: Path, compiled: bool) -> None:
    overrides = _job(
        prepared_clicks, tmp_path, "comms=int8", "trainer.precision=bf16", f"trainer.compile={compiled}", "trainer.gradient_clip_norm=5.0",
        "trainer.gradient_accumulation_steps=2", "data.synthetic_multi_hot={cat_3: 4, cat_20: 7}",
        "tables.cat_20.pooling=mean", "tables.cat_20.sharding.sharding_types=[row_wise]",
        "tables.cat_21.sharding.sharding_types=[table_wise]", "tables.cat_22.data_type=fp16", "schedule.dense.kind=poly",
        "schedule.dense.decay_steps=200", "schedule.sparse.warmup_steps=10", "trainer.early_stop.patience=3",
        "trainer.evaluate_every_steps=30", "trainer.max_steps=32", "optimizer.dense.name=adamw", "optimizer.dense.weight_decay=0.01",
    )  # fmt: skip
    summary = ranks.run(2, train_on_rank, overrides)[0]
    assert summary.bayes_auc is not None
    assert summary.validation["auc"] > 0.5 + 0.4 * (summary.bayes_auc - 0.5)
    kinds = {
        table["name"]: table["sharding_type"] for table in json.loads((tmp_path / "plan.json").read_text())["tables"]
    }
    assert (kinds["cat_20"], kinds["cat_21"]) == ("row_wise", "table_wise")
    measured = ranks.run(1, evaluate_on_rank, [f"run={tmp_path}", "split=validation"])[0]
    assert measured.metrics == pytest.approx(summary.validation, rel=2e-2)  # the wire was int8 on two ranks


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.campaign)])
def test_evaluation_is_the_same_on_any_number_of_ranks(ranks: RankPool, trained: TrainSummary, world_size: int) -> None:
    summary = ranks.run(world_size, evaluate_on_rank, [f"run={trained.run_dir}", "split=validation"])[0]
    assert summary.metrics == pytest.approx(trained.validation, abs=1e-6)
    assert json.loads(Path(summary.path).read_text())["auc"] == summary.metrics["auc"]


@pytest.mark.campaign
def test_a_part_of_a_split_and_other_data_do_not_take_the_place_of_the_evaluation(
    ranks: RankPool, trained: TrainSummary, prepared_clicks: str, tmp_path: Path
) -> None:
    run = [f"run={trained.run_dir}", "split=test"]
    whole = ranks.run(1, evaluate_on_rank, run)[0]
    part = ranks.run(1, evaluate_on_rank, [*run, "max_batches=1"])[0]
    assert part.path != whole.path and part.metrics["num_samples"] < whole.metrics["num_samples"]
    other = shutil.copytree(prepared_clicks, tmp_path / "other")
    text = (other / "dataset.json").read_text()
    described = json.loads(text)
    described["name"] = "another"
    (other / "dataset.json").write_text(json.dumps(described))
    with pytest.raises(RuntimeError, match=names("other_data=true")):
        ranks.run(1, evaluate_on_rank, [*run, f"data_path={other}"])
    allowed = ranks.run(1, evaluate_on_rank, [*run, f"data_path={other}", "other_data=true"])[0]
    assert len({whole.path, part.path, allowed.path}) == 3
    assert allowed.metrics == whole.metrics


def test_features_in_another_order_give_the_same_metrics(
    ranks: RankPool, trained: TrainSummary, prepared_clicks: str, tmp_path: Path
) -> None:
    other = shutil.copytree(prepared_clicks, tmp_path / "other")
    described = json.loads((other / "dataset.json").read_text())
    for kind in ("dense_features", "sparse_features"):
        described[kind].reverse()
    (other / "dataset.json").write_text(json.dumps(described))
    words = [f"run={trained.run_dir}", "split=validation", "other_data=true", f"data_path={other}"]
    assert ranks.run(1, evaluate_on_rank, words)[0].metrics == pytest.approx(trained.validation, abs=1e-6)
    described["dense_features"].remove("int_3")
    (other / "dataset.json").write_text(json.dumps(described))
    with pytest.raises(RuntimeError, match=names("lacks 1 of the 39 features int_3")):
        ranks.run(1, evaluate_on_rank, words)


@pytest.mark.long
def test_any_step_and_split_can_be_evaluated(ranks: RankPool, trained: TrainSummary) -> None:
    early = ranks.run(2, evaluate_on_rank, [f"run={trained.run_dir}", "step=40", "split=test"])[0]
    late = ranks.run(2, evaluate_on_rank, [f"run={trained.run_dir}", "split=test"])[0]
    assert (early.step, late.step, late.metrics["num_samples"]) == (40, STEPS, 3000)
    assert late.metrics["ne"] < early.metrics["ne"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.global_batch_size=512"], "global_batch_size=256 512 run_dir"),
        (["trainer.seed=5"], "trainer.seed=0"),
        (["checkpoint.resume=false"], "93 run_dir"),
        (["tables.default.embedding_dim=32", "model.dense_arch_layer_sizes=[64,32,32]"], "CheckpointError"),
    ],
)
def test_a_run_folder_of_another_job_is_refused_and_kept(
    ranks: RankPool, prepared_clicks: str, trained: TrainSummary, overrides: list[str], message: str
) -> None:
    with pytest.raises(RuntimeError, match=names(message)):
        ranks.run(2, train_on_rank, _job(prepared_clicks, trained.run_dir, *overrides))
    assert list_steps(f"{trained.run_dir}/checkpoints") == [40, 80, STEPS]


@pytest.mark.long
def test_running_a_finished_run_again_tells_its_last_metrics(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    overrides = _job(
        prepared_clicks,
        tmp_path,
        "trainer.evaluate_every_steps=25",
        "trainer.max_steps=30",
        "checkpoint.save_every_steps=10",
        "trainer.evaluate_max_batches=1",
    )
    first, second = (ranks.run(2, train_on_rank, overrides)[0] for _ in range(2))
    assert (first.step, second.step) == (30, 30)
    assert second.validation == first.validation


def _train_twice_at_once(rank: int, overrides: list[str], run_dir: str) -> str:
    held = take_run_folder(run_dir, init_distributed())
    with pytest.raises(ValueError) as error:
        train_on_rank(rank, overrides)
    if held:
        held.release()
    return str(error.value)


def test_a_second_run_in_the_same_folder_is_refused(ranks: RankPool, prepared_clicks: str, tmp_path: Path) -> None:
    for message in ranks.run(2, _train_twice_at_once, _job(prepared_clicks, tmp_path), str(tmp_path)):
        assert mentions(message, f"run_dir={tmp_path} process UTC token 1")


def test_a_missing_shard_is_found_before_tables_are_planned(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    spoilt = shutil.copytree(prepared_clicks, tmp_path / "spoilt")
    next(spoilt.glob("validation/*.parquet")).unlink()
    with pytest.raises(RuntimeError, match=names("validation/")):
        ranks.run(2, train_on_rank, _job(str(spoilt), tmp_path / "run"))
    assert not (tmp_path / "run" / "plan.json").exists()


def test_evaluating_what_is_no_run_or_no_step_says_so(ranks: RankPool, trained: TrainSummary, tmp_path: Path) -> None:
    with pytest.raises(TrainingError):
        evaluate(load_config(EvaluateJob, [f"run={tmp_path}"]))
    with pytest.raises(RuntimeError, match=names("41 40 80 93")):
        ranks.run(1, evaluate_on_rank, [f"run={trained.run_dir}", "step=41"])


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_the_command_line_trains_on_ranks_without_noise(prepared_clicks: str, tmp_path: Path, num_ranks: int) -> None:
    overrides = _job(prepared_clicks, tmp_path / "run", "trainer.max_steps=10", "comms=fp16")
    launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}", "-m"] if num_ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launcher, "pipeline", "train", *overrides]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("trained to step 10\n")
    noise = [line for line in finished.stderr.splitlines() if "Warning" in line or "warn" in line]
    assert noise == []


def test_a_wrong_run_on_ranks_prints_one_error_and_no_traceback(prepared_clicks: str, tmp_path: Path) -> None:
    overrides = _job(prepared_clicks, tmp_path / "run", "data.path=nowhere")
    finished = run_warm("pipeline train", *overrides)
    assert finished.returncode == 2
    assert "nowhere" in finished.stderr and "pipeline prepare" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.long
def test_sigterm_saves_at_the_next_step_and_the_same_command_goes_on(
    prepared_clicks: str, trained: TrainSummary, ranks: RankPool, tmp_path: Path
) -> None:
    overrides = _job(prepared_clicks, tmp_path / "run", "checkpoint.keep_last_n=9", "trainer.log_every_steps=1")
    process = WarmCommand("pipeline train", overrides)
    for line in process.stderr:
        if f"step 12/{STEPS}" in line:
            break
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=300)
    assert process.returncode == 75
    assert "stopped by SIGTERM at step" in rest and "Traceback" not in rest
    (step,) = list_steps(str(tmp_path / "run" / "checkpoints"))
    assert 12 <= step < STEPS
    resumed = ranks.run(1, train_on_rank, overrides)[0]
    assert resumed.step == STEPS
    assert resumed.validation == pytest.approx(trained.validation, abs=1e-3)


@pytest.mark.campaign
def test_ctrl_c_ends_quietly_and_the_same_command_goes_on(prepared_clicks: str, tmp_path: Path) -> None:
    overrides = _job(prepared_clicks, tmp_path / "run", "trainer.epochs=30", "checkpoint.save_every_steps=5")
    process = WarmCommand("pipeline train", overrides)
    for line in process.stderr:
        if "saved" in line:
            break
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in rest and "same command" in rest
    steps = list_steps(str(tmp_path / "run" / "checkpoints"))
    assert steps and steps[-1] >= 5


def _warnings_of_a_shared_table(rank: int, overrides: list[str]) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("pipeline.training.sharded_model").addHandler(handler)
    try:
        train_on_rank(rank, overrides)
    finally:
        logging.getLogger("pipeline.training.sharded_model").removeHandler(handler)
    return messages


@pytest.mark.long
def test_features_with_vocabularies_of_their_own_in_one_table_are_warned_of(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    shared = "tables.shared.feature_names=[cat_0,cat_1]"
    messages = ranks.run(1, _warnings_of_a_shared_table, _job(prepared_clicks, tmp_path, shared, "trainer.max_steps=2"))
    assert len(messages[0]) == 1 and mentions(messages[0][0], "cat_0 cat_1 shared")
