"""The trainer does what a plain loop does, and evaluating, saving and resuming leave no trace in the weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.steps import list_steps
from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.training import EarlyStopConfig, TrainerConfig
from pipeline.training.hooks.evaluation_hook import EarlyStop
from pipeline.training.optimizer import apply_schedule, clip_dense_gradients
from pipeline.training.step_sync import NonFiniteLossError
from tests.support.exchange_paths import PATHS, PathPool
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded, digest, draw_batches, full_state
from tests.support.trainers import make_trainer
from tests.training.tiny_training import CONFIG, KINDS, SCHEDULE, STEPS_PER_EPOCH, DrawnReader, fit_drawn


def _plain_loop(rank: int, world_size: int, clip: float | None) -> str:
    _, model, optimizer, _ = build_sharded(KINDS)
    model.train()
    for step, batch in enumerate(draw_batches(rank, world_size, 2 * STEPS_PER_EPOCH)):
        apply_schedule(optimizer, SCHEDULE, step)
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        if clip is not None:
            clip_dense_gradients(model, clip)
        optimizer.step()
    return digest(model)


@pytest.mark.parametrize(
    ("pipeline", "clip", "path"),
    [
        ("sparse_dist", None, "shared_memory"),
        pytest.param("sparse_dist", None, "gloo", marks=pytest.mark.campaign),
        ("sparse_dist", 0.05, "gloo"),
        pytest.param("base", None, "gloo", marks=pytest.mark.campaign),
        pytest.param("base", 0.05, "shared_memory", marks=pytest.mark.campaign),
    ],
)
def test_training_equals_a_plain_loop_bit_for_bit(
    ranks: RankPool, tmp_path: Path, pipeline: str, clip: float | None, path: str
) -> None:
    ranks = PathPool(ranks, PATHS[path])
    config = replace(CONFIG, pipeline=pipeline, gradient_clip_norm=clip)
    assert ranks.run(2, fit_drawn, 2, str(tmp_path), config)[0][0] == ranks.run(2, _plain_loop, 2, clip)[0]


@pytest.fixture(scope="module")
def plain(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the uninterrupted training that others are compared with."""
    return str(ranks.run(2, fit_drawn, 2, str(tmp_path_factory.mktemp("plain")))[0][0])


@pytest.mark.long
def test_profiled_steps_are_recorded_on_every_rank_and_change_no_weight(
    ranks: RankPool, plain: str, tmp_path: Path
) -> None:
    assert ranks.run(2, fit_drawn, 2, str(tmp_path / "run"), CONFIG, 0, None, (), (3, 4))[0][0] == plain
    for rank in range(2):
        table = (tmp_path / "run" / "profile" / f"rank{rank}.steps_3-4.txt").read_text()
        print(table)
        assert "collectives" in table and "tables backward" in table


def test_evaluating_and_saving_along_the_way_change_no_weight(ranks: RankPool, plain: str, tmp_path: Path) -> None:
    config = replace(CONFIG, evaluate_every_steps=3)
    busy, result = ranks.run(2, fit_drawn, 2, str(tmp_path / "busy"), config, 5)[0]
    assert busy == plain
    assert list_steps(str(tmp_path / "busy" / "checkpoints")) == [5, 10, 12]
    lines = [json.loads(line) for line in (tmp_path / "busy" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [3, 6, 9, 12]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [4, 8, 12]
    assert result.metrics["num_samples"] == STEPS_PER_EPOCH * 32


@pytest.mark.long
def test_a_run_cut_in_two_ends_where_the_uninterrupted_one_does(ranks: RankPool, plain: str, tmp_path: Path) -> None:
    for max_steps in (4, 8):  # within an epoch, and across its end
        ranks.run(2, fit_drawn, 2, str(tmp_path / "cut"), replace(CONFIG, max_steps=max_steps))
    cut, result = ranks.run(2, fit_drawn, 2, str(tmp_path / "cut"))[0]
    assert (cut, result.step) == (plain, 12)
    steps = [json.loads(line)["step"] for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    again, result = ranks.run(2, fit_drawn, 2, str(tmp_path / "cut"))[0]
    assert (again, result.step) == (plain, 12)  # a second run of a finished job trains nothing


@pytest.mark.campaign
def test_a_run_by_adam_that_is_cut_in_two_ends_bit_for_bit_alike(ranks: RankPool, tmp_path: Path) -> None:
    """With micro-batches: its bias correction goes by the step, which the checkpoint holds."""
    sparse = SparseOptimizerConfig("adam", lr=0.05, weight_decay=0.01, gradient_clip_value=0.1)
    optimizers = OptimizerConfig(sparse, DenseOptimizerConfig("adamw", lr=0.01, weight_decay=0.1))
    config = replace(CONFIG, gradient_accumulation_steps=2, max_steps=6)
    whole = ranks.run(2, fit_drawn, 2, str(tmp_path / "whole"), config, 0, optimizers)[0][0]
    ranks.run(2, fit_drawn, 2, str(tmp_path / "cut"), replace(config, max_steps=4), 0, optimizers)
    cut, result = ranks.run(2, fit_drawn, 2, str(tmp_path / "cut"), config, 0, optimizers)[0]
    assert (cut, result.step) == (whole, 6)


@pytest.mark.long
def test_accumulated_micro_batches_update_dense_layers_as_one_batch(ranks: RankPool, tmp_path: Path) -> None:
    """With SGD the tables agree too, up to the order of sums, as long as rates are small."""
    optimizers = OptimizerConfig(SparseOptimizerConfig("sgd", lr=1e-6), DenseOptimizerConfig("sgd", lr=0.1))
    config = replace(CONFIG, gradient_accumulation_steps=2, max_steps=6)

    states = ranks.run(2, _accumulated_and_reference, config, optimizers, str(tmp_path))[0]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-4, atol=1e-6, msg=name)


def _accumulated_and_reference(
    rank: int, config: TrainerConfig, optimizers: OptimizerConfig, folder: str
) -> list[dict[str, torch.Tensor]]:
    task, model, optimizer, context = build_sharded(KINDS, optimizers=optimizers)
    checkpointer = Checkpointer(f"{folder}/checkpoints", model, optimizer, context)
    make_trainer(
        config,
        model=model,
        task=task,
        optimizer=optimizer,
        reader=DrawnReader(rank, 2, 16),
        writer=None,
        validation_reader=None,
        checkpointer=checkpointer,
        context=context,
    ).fit()
    accumulated = full_state(model)
    _, model, optimizer, _ = build_sharded(KINDS, optimizers=optimizers)
    model.train()
    micro = list(draw_batches(rank, 2, 12, global_batch_size=16))
    for step in range(6):
        optimizer.zero_grad()
        losses = [model(batch)[0] for batch in micro[2 * step : 2 * step + 2]]
        (sum(losses) / 2).backward()
        optimizer.step()
    return [accumulated, full_state(model)]


@pytest.mark.long
def test_non_finite_steps_are_skipped_on_all_ranks_or_stop_the_run(
    ranks_each_way: RankPool, plain: str, tmp_path: Path
) -> None:
    skipping = replace(CONFIG, non_finite_loss="skip", max_non_finite_steps=2)
    skipped, _ = ranks_each_way.run(2, fit_drawn, 2, str(tmp_path / "skip"), skipping, 0, None, (0, 7))[0]
    assert skipped != plain
    lines = [json.loads(line) for line in (tmp_path / "skip" / "metrics.jsonl").read_text().splitlines()]
    assert [line["num_skipped_steps"] for line in lines if line["kind"] == "train"][-1] == 2
    assert all(line["ne"] is not None for line in lines)
    for message in ranks_each_way.run(2, _stops, str(tmp_path / "stop")):
        assert "updated nothing" in message
    assert list_steps(str(tmp_path / "stop" / "checkpoints")) == []


def _stops(rank: int, folder: str) -> str:
    with pytest.raises(NonFiniteLossError) as error:
        fit_drawn(rank, 2, folder, nan_steps=(3,))
    return str(error.value)


def _stops_at(config: EarlyStopConfig, values: list[float]) -> list[bool]:
    stop, answers = EarlyStop(config, config.metric or "ne"), []
    for value in values:
        stop.update({config.metric or "ne": value})
        answers.append(stop.is_exhausted)
    return answers


def test_early_stop_counts_evaluations_without_improvement() -> None:
    values = [0.6, 0.7, 0.705, 0.72, 0.5, 0.72]
    config = EarlyStopConfig(patience=2, metric="auc", min_delta=0.01)
    assert _stops_at(config, values) == [False, False, False, False, False, True]
    assert not any(_stops_at(EarlyStopConfig(), [1.0, 2.0, 3.0]))  # patience 0 never stops


@pytest.mark.long
def test_a_run_that_stops_early_saves_and_says_so(ranks: RankPool, tmp_path: Path) -> None:
    config = replace(CONFIG, evaluate_every_steps=2, early_stop=EarlyStopConfig(patience=1, min_delta=10.0))
    _, result = ranks.run(2, fit_drawn, 2, str(tmp_path), config)[0]
    assert (result.step, result.stopped_early) == (4, True)
    assert list_steps(str(tmp_path / "checkpoints")) == [4]
    _, again = ranks.run(2, fit_drawn, 2, str(tmp_path), config)[0]
    assert (again.step, again.stopped_early) == (4, True)  # a second run does not train on


def test_bf16_stays_close_to_fp32(ranks: RankPool, tmp_path: Path) -> None:
    full, half = ranks.run(2, _losses_of_both_precisions)[0]
    assert full != half
    assert half == pytest.approx(full, abs=0.02)


def _losses_of_both_precisions(rank: int) -> tuple[list[float], list[float]]:
    curves = []
    for bf16 in (False, True):
        task, model, optimizer, _ = build_sharded(KINDS)
        task._bf16 = bf16
        model.train()
        losses = []
        for batch in draw_batches(rank, 2, 6):
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    return curves[0], curves[1]
