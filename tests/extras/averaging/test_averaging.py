"""Averages of the dense layers: they equal their formulas, are what is evaluated, saved and exported, and resume bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.training import AverageConfig, TrainerConfig
from pipeline.extras.averaging import hook as hook_module
from pipeline.extras.averaging.hook import AverageLayers
from pipeline.runtime.errors import ConfigError, TrainingError
from pipeline.serving.artifact.deltas import tensors_from_bytes
from pipeline.serving.artifact.export import export
from pipeline.serving.scoring.dense_program import DenseProgram
from pipeline.serving.scoring.predictor import Predictor
from pipeline.training.hooks.base import TrainingState
from pipeline.training.summary import TrainSummary
from tests.support.jobs import evaluate_on_rank, train_on_rank
from tests.support.messages import names
from tests.support.ranks import RankPool
from tests.support.stored_tensors import step_tensors, stored_tensors

EMA = ["trainer.average.kind=ema", "trainer.average.decay=0.25"]
STEPS = 5


@pytest.fixture
def words(prepared_clicks: str) -> list[str]:
    """Batch norm has statistics to average too. Every step is kept."""
    return ["experiment=quickstart", "hardware=cpu", "model=dcnv2", "model.hidden_layer_sizes=[16]", "model.batch_norm=true",
            "trainer.global_batch_size=256", f"data.path={prepared_clicks}", "trainer.evaluate_max_batches=2", "logger.report=false",
            "logger.tensorboard=false", "checkpoint.save_every_steps=1", "checkpoint.keep_last_n=9"]  # fmt: skip


def _train(ranks: RankPool, num_ranks: int, words: list[str], run: Path, steps: int = STEPS) -> TrainSummary:
    return ranks.run(num_ranks, train_on_rank, [*words, f"run_dir={run}", f"trainer.max_steps={steps}"])[0]


def _layers(run: Path, step: int) -> dict[str, torch.Tensor]:
    """The dense weights and the statistics of batch norms in a step, by name."""
    held = step_tensors(run, step).items()
    return {key: value for key, value in held if key.startswith("model.") and "embedding_bags" not in key}


def _trained(run: Path, step: int) -> list[torch.Tensor]:
    return tensors_from_bytes((run / f"checkpoints/step_{step:08d}/trained_layers.bin").read_bytes())


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _ema(steps: list[torch.Tensor], largest_decay: float) -> torch.Tensor:
    average = steps[0]
    for number, value in enumerate(steps[1:], 1):
        decay = min(largest_decay, (1 + number) / (10 + number))
        average = decay * average + (1 - decay) * value
    return average


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AverageConfig("ema", 0.25), lambda steps: _ema(steps, 0.25)),
        (AverageConfig("ema", 0.9, start_step=3), lambda steps: _ema(steps[2:], 0.9)),
        (AverageConfig("swa", start_step=2, every_steps=2), lambda steps: (steps[1] + steps[3]) / 2),
    ],
)
def test_an_average_equals_its_formula(
    monkeypatch: pytest.MonkeyPatch, config: AverageConfig, expected: Callable[[list[torch.Tensor]], torch.Tensor]
) -> None:
    steps = list(torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    layer, state, parts = torch.zeros(7), TrainingState(*3 * [cast(Any, None)]), cast(Any, SimpleNamespace(model=None))
    monkeypatch.setattr(hook_module, "layers_of", lambda model: [layer])
    hook = AverageLayers(TrainJob(name="test", trainer=TrainerConfig(average=config)), parts)
    for state.step, value in enumerate(steps, 1):
        layer.copy_(value)
        hook.on_step_end(state)
    with hook.evaluated_model(state):
        torch.testing.assert_close(layer, expected(steps).float())
    assert torch.equal(layer, steps[-1].float())


@pytest.mark.long
def test_the_average_is_saved_evaluated_and_exported_and_training_is_unchanged(
    ranks: RankPool, words: list[str], tmp_path: Path
) -> None:
    plain, averaged, artifact = (tmp_path / name for name in ("plain", "averaged", "artifact"))
    without, summary = _train(ranks, 1, words, plain), _train(ranks, 1, [*words, *EMA], averaged)
    found, trained = _layers(averaged, STEPS), _layers(plain, STEPS)
    steps = [_layers(plain, step) for step in range(1, STEPS + 1)]
    expected = {name: _ema([step[name].double() for step in steps], 0.25).float() for name in found}
    torch.testing.assert_close(found, expected)
    assert any("running_mean" in name for name in found) and not _same([*found.values()], [*trained.values()])
    # The layers that training continues with, all tables and all optimizer states are those of a run without averages.
    assert _same(_trained(averaged, STEPS), [trained[name] for name in sorted(trained)])
    own, others = (step_tensors(run, STEPS) for run in (averaged, plain))
    assert own.keys() == others.keys()
    assert all(torch.equal(own[key], others[key]) for key in own if key not in found)
    assert summary.validation["logloss"] != without.validation["logloss"]

    export(load_config(ExportJob, [f"run={averaged}", f"output={artifact}", "precision=fp32", "parity.max_rows=200"]))
    program = Predictor.load(str(artifact)).program
    assert isinstance(program, DenseProgram)
    held = {one.numpy().tobytes() for one in program.constants}
    assert held.issuperset(value.numpy().tobytes() for name, value in found.items() if name.endswith("weight"))
    assert not held & {one.numpy().tobytes() for one in _trained(averaged, STEPS) if one.dim() == 2}


@pytest.mark.long
def test_a_resumed_run_is_equal_bit_for_bit_and_a_run_may_stop_averaging(
    ranks: RankPool, words: list[str], tmp_path: Path
) -> None:
    whole, cut, stopped = (tmp_path / name for name in ("whole", "cut", "stopped"))
    expected = _train(ranks, 2, [*words, *EMA], whole)
    _train(ranks, 2, [*words, *EMA], cut, 3)
    shutil.copytree(cut, stopped)
    resumed = _train(ranks, 2, [*words, *EMA], cut)
    assert stored_tensors(resumed.checkpoint) == stored_tensors(expected.checkpoint)
    assert _same(_trained(cut, STEPS), _trained(whole, STEPS)) and resumed.validation == expected.validation
    asked = [f"run={cut}", "split=validation", "max_batches=2", "global_batch_size=256"]
    assert ranks.run(2, evaluate_on_rank, asked)[0].metrics == expected.validation

    _train(ranks, 2, words, stopped)
    layers = _layers(stopped, STEPS)
    assert _same([layers[name] for name in sorted(layers)], _trained(whole, STEPS))


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("kind=mean", "kind='mean' none ema swa"),
        ("decay=1", "decay=1.0 below 1"),
        ("every_steps=0", "every_steps=0 at least 1"),
    ],
)
def test_bad_values_are_refused(word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=names(told)):
        load_config(TrainJob, ["data=quickstart", f"trainer.average.{word}"])


def test_an_average_that_would_never_start_is_refused() -> None:
    job = load_config(
        TrainJob, ["data=quickstart", *EMA, "trainer.average.every_steps=4", "trainer.average.start_step=6"]
    )
    state: Any = SimpleNamespace(is_endless=False, total_steps=7)
    parts: Any = None  # which the check does not read
    with pytest.raises(TrainingError, match=names("trainer.average.start_step=6 every_steps=4 7 steps")):
        AverageLayers(job, parts).on_train_start(state)
