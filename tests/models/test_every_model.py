"""What holds for each click model, whatever it is: any data, bf16, compiled layers, and layers exported for serving.

Models come from the registry: a new one is tested without a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.config.model import ModelConfig
from pipeline.data.read.batch import Batch
from pipeline.models.tasks.task import TaskModel
from pipeline.runtime.errors import ConfigError
from pipeline.serving.artifact.dense_export import Layers, export_layers, program_bytes, take_collection
from pipeline.serving.scoring.dense_program import load_program
from pipeline.training.compiled import DenseCompiler
from tests.checkpoint.resharding import Values, largest_difference, whole
from tests.models.every_model import (
    CLICK_MODELS,
    DATA,
    REFUSED,
    VARIANTS,
    WITHOUT_LAYERS,
    batch,
    build,
    materialize,
    shard,
    small,
    train_steps,
)
from tests.support.ranks import RankPool


def cases(parameters: list[tuple[Any, ...]], in_default: Callable[..., bool] = lambda *_: True) -> list[Any]:
    """Each with a name of its own; those that are not `in_default` are campaigns."""
    found = []
    for values in parameters:
        words = [
            value if isinstance(value, str) else ",".join(f"{key}={each}" for key, each in value.items())
            for value in values
        ]
        marks = [] if in_default(*values) else [pytest.mark.campaign]
        found.append(pytest.param(*values, id="-".join(word for word in words if word), marks=marks))
    return found


FORMS = [(kind, form) for kind in CLICK_MODELS for form in [{}, *VARIANTS.get(kind, [])]]
by_form = pytest.mark.parametrize(("kind", "form"), cases(FORMS))


def _pooled(task: TaskModel, keys: list[str], rows: Batch) -> torch.Tensor:
    """[B, sum of dims] of `keys`, as a served artifact looks them up."""
    (collection,) = [module for module in task.modules() if isinstance(module, EmbeddingBagCollection)]
    if not keys:
        return torch.empty(rows.batch_size, 0)
    found = collection(rows.sparse_features)
    return torch.cat([found[key] for key in keys], dim=1)


def _train(task: TaskModel, data: str, num_steps: int) -> list[float]:
    """Losses of evaluation before and after steps on one batch."""
    rows = batch(0, data)
    optimizer = torch.optim.Adam(task.parameters(), lr=0.01)
    losses = [_evaluated(task, rows)]
    task.train()
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss, _ = task(rows)
        loss.backward()
        optimizer.step()
    return [*losses, _evaluated(task, rows)]


def _evaluated(task: TaskModel, rows: Batch) -> float:
    with torch.no_grad():
        return float(task.eval()(rows)[0])


@by_form
@pytest.mark.parametrize("data", DATA)
def test_a_model_learns_from_categorical_features_from_dense_ones_and_from_both(
    kind: str, form: dict[str, Any], data: str
) -> None:
    config = small(kind, **form)
    if kind in REFUSED.get(data, []) or _reads_what_is_not_there(config, data):
        with pytest.raises(ConfigError):
            build(config, data)
        return
    task = materialize(build(config, data)[0])
    before, after = _train(task, data, 25)
    assert after < before - 0.02, (before, after)
    assert all(weight.grad is not None for weight in task.parameters())


def _reads_what_is_not_there(config: ModelConfig, data: str) -> bool:
    """By a setting of the form, not by the model."""
    return data == "dense" and (
        bool(getattr(config, "first_context", []))
        or (config.kind, getattr(config, "dense_features", "")) == ("autoint", "values")
    )


@by_form
def test_bf16_scores_are_near_those_of_fp32_and_its_gradients_finite(kind: str, form: dict[str, Any]) -> None:
    exact, rounded = (materialize(build(small(kind, **form), precision=precision)[0]) for precision in ("fp32", "bf16"))
    rows = batch(1)
    assert rounded.load_state_dict(exact.state_dict())
    with torch.no_grad():
        wanted, found = (task.eval()(rows)[1].logits for task in (exact, rounded))
    assert found.dtype == torch.float32
    assert (found - wanted).norm() < 0.05 * wanted.norm() + 0.02
    rounded.train()(rows)[0].backward()
    assert all(weight.grad.isfinite().all() for weight in rounded.parameters())


def _first_step(kind: str, form: dict[str, Any], compiled: bool) -> tuple[float, torch.Tensor]:
    """(loss, all gradients), without dropout, whose random numbers a compiler draws in another order."""
    config = small(kind, **form)
    for name in ("dropout", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    task = materialize(build(config)[0])
    compiler = DenseCompiler()
    if compiled:
        assert compiler.compile(task.model)
    loss, _ = task.train()(batch(0))
    loss.backward()
    assert compiler.failure is None
    return loss.item(), torch.cat([weight.grad.flatten() for weight in task.parameters()])


@pytest.mark.parametrize(("kind", "form"), cases(FORMS, lambda *_: False))  # Inductor takes half a CPU minute a model
def test_compiled_layers_give_the_loss_and_gradients_of_those_that_are_not(
    kind: str, form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind in WITHOUT_LAYERS:
        pytest.skip("the model has no layers beside its tables")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (loss, gradients), (compiled_loss, compiled_gradients) = (_first_step(kind, form, way) for way in (False, True))
    assert compiled_loss == pytest.approx(loss, abs=1e-5)
    assert (compiled_gradients - gradients).norm() < 1e-4 * gradients.norm()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "form", "data"),
    cases(
        [(kind, form, data) for kind, form in FORMS for data in DATA if kind not in REFUSED.get(data, [])],
        lambda kind, form, data: not form and data == "categorical",
    ),
)
def test_exported_layers_give_the_logits_of_evaluation(kind: str, form: dict[str, Any], data: str) -> None:
    config = small(kind, **form)
    if _reads_what_is_not_there(config, data):
        pytest.skip("the form reads features that are not in these data")
    task, tables = build(config, data)
    _train(materialize(task), data, 2)  # so that running means are not where they began
    model = task.model.eval()
    rows = batch(2, data)
    with torch.no_grad():
        wanted = task(rows)[1].logits
        keys = [feature for table in tables for feature in table.feature_names]
        pooled = _pooled(task, keys, rows)
    columns = sum(take_collection(model, keys))
    program = load_program(program_bytes(export_layers(model, "fp32", DATA[data][1], columns)), "dense.pt2")
    torch.testing.assert_close(program(rows.dense_features, pooled), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(program(rows.dense_features[:1], pooled[:1]), wanted[:1], rtol=1e-5, atol=1e-5)
    assert Layers(model)(rows.dense_features, pooled).shape == wanted.shape


def _saved_and_resumed(rank: int, folder: str, kind: str, form: dict[str, Any]) -> tuple[Values, Values, Values]:
    """Of two ranks: what a step held, what the run went on to, and what another that resumed from it went on to."""
    model, optimizer, context = shard(small(kind, **form))
    train_steps(rank, model, optimizer, range(2))
    Checkpointer(folder, model, optimizer, context).save(2)
    saved = whole(model, optimizer)
    train_steps(rank, model, optimizer, range(2, 4))
    other, resumed, _ = shard(small(kind, **form), seed=7)
    torch.rand(3)  # dropout's generator is elsewhere, and comes back with the step
    Checkpointer(folder, other, resumed, context).restore(2)
    train_steps(rank, other, resumed, range(2, 4))
    return saved, whole(model, optimizer), whole(other, resumed)


def _restored(rank: int, folder: str, kind: str, form: dict[str, Any]) -> tuple[Values, torch.Tensor]:
    """What is restored on these ranks, and this rank's logits of evaluation."""
    model, optimizer, context = shard(small(kind, **form), seed=9)
    Checkpointer(folder, model, optimizer, context).restore(2)
    model.eval()
    with torch.no_grad():
        logits = model(batch(9, rank=rank, world_size=context.world_size))[1].logits
    return whole(model, optimizer), logits


@pytest.mark.long
@pytest.mark.parametrize(("kind", "form"), cases(FORMS, lambda kind, form: kind == "finalmlp" and bool(form)))
def test_a_run_resumes_bit_for_bit_and_a_step_is_restored_on_other_ranks(
    kind: str, form: dict[str, Any], ranks: RankPool, tmp_path: Path
) -> None:
    saved, went_on, resumed = ranks.run(2, _saved_and_resumed, str(tmp_path), kind, form)[0]
    assert largest_difference(resumed, went_on) == 0.0
    assert largest_difference(went_on, saved) > 0.0
    (alone, logits), *_ = ranks.run(1, _restored, str(tmp_path), kind, form)
    assert largest_difference(alone, saved) == 0.0
    parts = [part for _, part in ranks.run(2, _restored, str(tmp_path), kind, form)]
    torch.testing.assert_close(torch.cat(parts), logits, rtol=1e-5, atol=1e-5)
