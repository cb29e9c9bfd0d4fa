"""trainer.compile gives the same losses, keeps names, and falls back where there is no compiler."""

from __future__ import annotations

import logging
import os
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from pipeline.training.compiled import DenseCompiler
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded, draw_batches

KINDS = {"a": "table_wise", "b": "row_wise", "c": "data_parallel", "d": "table_wise"}
NUM_STEPS = 6
TOLERANCE = 1e-5  # of losses of about 0.7: compiled layers add up in another order


def _losses(rank: int, cache: str, backend: str) -> tuple[list[float], list[str], list[str], int]:
    """Through TorchRec's pipeline: losses, compiled children, the state's names, graphs compiled. Backend "": as they are."""
    from torch._dynamo.utils import counters

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # a fresh one, so that it is compiled here, and by one rank for both
    counters.clear()
    task, model, optimizer, context = build_sharded(KINDS)
    compiler = DenseCompiler()
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        names = compiler.compile(task.model) if backend else []
    model.train()
    pipeline = TrainPipelineSparseDist(model, optimizer, context.device, execute_all_batches=True)
    batches = iter(list(draw_batches(rank, context.world_size, NUM_STEPS)))
    losses = [float(pipeline.progress(batches).loss) for _ in range(NUM_STEPS)]
    return losses, names, list(model.state_dict()), 0 if compiler.failure else counters["stats"]["unique_graphs"]


# aot_eager: graphs are captured, with their backward, and guarded as ever, and no C++ is compiled of them.
@pytest.mark.campaign
@pytest.mark.parametrize(("backend", "num_ranks"), [("aot_eager", 1), ("inductor", 2)])
def test_compiled_layers_train_to_the_same_losses_under_torchrecs_pipeline(
    ranks: RankPool, tmp_path: Path, backend: str, num_ranks: int
) -> None:
    plain = ranks.run(num_ranks, _losses, str(tmp_path), "")
    compiled = ranks.run(num_ranks, _losses, str(tmp_path), backend)
    assert bool(list(tmp_path.rglob("*.so"))) == (backend == "inductor"), "nothing was compiled"
    for (expected, _, names, _), (losses, layers, compiled_names, num_graphs) in zip(plain, compiled, strict=True):
        assert num_graphs == len(layers)
        assert layers == ["dense_arch", "over_arch"]
        assert compiled_names == names
        print(max(abs(a - b) for a, b in zip(losses, expected, strict=True)))
        assert losses == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.long
def test_without_a_compiler_layers_run_as_they_are_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor.cpp, "cxx", (str(tmp_path / "no-compiler"),))
    monkeypatch.setattr(inductor, "force_disable_caches", True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(7, 5), nn.Sigmoid()), nn.Linear(5, 1))
    inputs = torch.randn(3, 7)
    expected = model(inputs)
    compiler = DenseCompiler()
    compiler.compile(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = model(inputs)
            assert torch.equal(found, expected)
    found.sum().backward()
    assert compiler.failure is not None
    assert all(weight.grad is not None for weight in model.parameters())
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    lines = [record.getMessage() for record in warned if record.name.startswith("pipeline")]
    assert len(lines) == 1, lines
    assert "cannot be compiled" in lines[0] and "\n" not in lines[0]


def test_what_is_wrong_with_the_input_is_raised_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Any, **_: Any) -> Any:
        def call(*arguments: Any) -> Any:
            raise RuntimeError("anything")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    model = nn.Sequential(nn.Linear(7, 5))
    DenseCompiler().compile(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 8))


def test_evaluation_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *arguments: chain())
    model = nn.Sequential(nn.Linear(7, 5))
    DenseCompiler().compile(model)
    assert isinstance(model(torch.ones(3, 7)), chain)
    with torch.no_grad():
        assert model(torch.ones(3, 7)).shape == (3, 5)
