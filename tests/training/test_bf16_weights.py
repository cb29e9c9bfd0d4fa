"""Copies of weights in bf16 save casts, and change no number of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torchrec.modules.crossnet import LowRankCrossNet

from pipeline.config.training import DenseOptimizerConfig
from pipeline.models.layers.bf16_weights import bf16_copies, keep_bf16_weights
from pipeline.models.layers.linear_products import speed_up_crosses
from pipeline.training.optimizer import DenseOptimizer

CONFIGS = {
    "adam": DenseOptimizerConfig("adam", lr=0.01),
    "adam_with_decay": DenseOptimizerConfig("adam", lr=0.01, weight_decay=0.1),
    "adamw": DenseOptimizerConfig("adamw", lr=0.01, weight_decay=0.1),
    "adagrad": DenseOptimizerConfig("adagrad", lr=0.01),  # is given gradients in fp32
}
NUM_STEPS = 4


@pytest.fixture(params=[1, 2], ids=["one_thread", "two_threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _layers() -> nn.Sequential:
    """Sizes that no number of lanes divides, by less than eight, and one that has several blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(33, 513), nn.ReLU(), LowRankCrossNet(513, 2, 5), nn.Linear(513, 129), nn.Linear(129, 1, bias=False)
    )
    speed_up_crosses(model)
    return model


def _train(model: nn.Module, optimizer: DenseOptimizer, steps: range) -> list[torch.Tensor]:
    model.train()
    losses = []
    for step in steps:
        inputs = torch.randn(64, 33, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.update()
        losses.append(loss.detach())
    return losses


def _optimizer(model: nn.Module, name: str, l2: float = 0.0) -> DenseOptimizer:
    return DenseOptimizer(dict(model.named_parameters()), CONFIGS[name], l2, bf16_copies(model))


@pytest.mark.parametrize("l2", [0.0, 0.1], ids=["plain", "l2"])
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_weights_and_moments_are_autocasts_bit_for_bit(name: str, l2: float, threads: int) -> None:
    found = []
    for has_copies in (False, True):
        model = _layers()
        if has_copies:
            assert keep_bf16_weights(model) == 4
        optimizer = _optimizer(model, name, l2)
        losses = _train(model, optimizer, range(NUM_STEPS))
        found.append((losses, model.state_dict(), optimizer.state_dict()["state"]))
    (losses, weights, moments), (ours, our_weights, our_moments) = found
    assert ours == losses and len({float(loss) for loss in ours}) == NUM_STEPS
    assert list(our_weights) == list(weights)
    assert all(torch.equal(our_weights[key], value) for key, value in weights.items())
    assert all(torch.equal(our_moments[key][part], value) for key in moments for part, value in moments[key].items())


def test_copies_are_their_weights_rounded_after_steps_and_after_others_write_them() -> None:
    model = _layers()
    keep_bf16_weights(model)
    optimizer = _optimizer(model, "adam")
    _train(model, optimizer, range(2))
    copies = bf16_copies(model)
    assert len(copies) == 3 + 2 + 4  # two layers with biases, one without, and two crosses of two matrices
    assert all(torch.equal(copy.numbers(), copy.weight.bfloat16()) for copy in copies)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    expected = _train(model, optimizer, range(2, 3))
    assert not torch.equal(saved["0.weight"], model.state_dict()["0.weight"])
    model.load_state_dict(saved)
    assert _train(model, optimizer, range(2, 3)) == expected


def test_gradients_of_a_step_are_their_weights_afterwards_and_evaluation_takes_the_weights() -> None:
    model = _layers()
    keep_bf16_weights(model)
    _train(model, _optimizer(model, "adam"), range(1))
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.parameters())
    plain = _layers()
    plain.load_state_dict(model.state_dict())
    inputs = torch.randn(5, 33)
    model.eval()
    assert torch.equal(model(inputs), plain.eval()(inputs))
