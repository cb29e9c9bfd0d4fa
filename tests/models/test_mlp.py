"""The MLP equals torch's own layers, its batch norm is that of the global batch, and linear layers begin as the config says."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.mlp import MLP as TorchRecMLP

from pipeline.config.model import ACTIVATIONS as NAMES
from pipeline.config.model import INITS, LayersConfig, LayerSettings
from pipeline.devices.cpu.host_exchange import connect
from pipeline.models.layers.batch_norm import BatchNorm
from pipeline.models.layers.mlp import ACTIVATIONS, MLP, initialize_linear_layers
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.process.distributed import DistributedContext
from tests.support.messages import names
from tests.support.ranks import RankPool

NUM_ROWS, WIDTH, MOMENTUM = 13, 5, 0.1
CUTS = {2: [0, 9, 13], 1: [0, 13]}  # ranks with 9 and 4 rows


def test_plain_layers_have_the_names_and_bits_of_torchrecs() -> None:
    torch.manual_seed(3)
    own = MLP(6, [8, 4])
    torch.manual_seed(3)
    other = TorchRecMLP(6, [8, 4])
    assert list(own.state_dict()) == list(other.state_dict())
    rows = torch.randn(10, 6)
    assert torch.equal(own(rows), other(rows))


@pytest.mark.parametrize("norm", ["none", "batch_norm", "layer_norm"])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_a_layer_is_linear_then_norm_then_activation(norm: str, activation: str) -> None:
    settings = LayerSettings(activation, batch_norm=norm == "batch_norm", layer_norm=norm == "layer_norm")
    torch.manual_seed(0)
    mlp = MLP(6, [8], settings, out_features=1)
    weights = {name: value.clone() for name, value in mlp.named_parameters()}
    rows = torch.randn(10, 6)
    values = rows @ weights["_mlp.0._linear.weight"].T + weights["_mlp.0._linear.bias"]
    if norm != "none":
        over = 0 if norm == "batch_norm" else 1
        spread = values.var(over, unbiased=False, keepdim=True)
        values = (values - values.mean(over, keepdim=True)) / (spread + 1e-5).sqrt()
    values = values if activation == "identity" else getattr(F, activation)(values)
    expected = values @ weights["last.weight"].T + weights["last.bias"]
    torch.testing.assert_close(mlp(rows), expected)
    mlp(rows).sum().backward()
    assert all(parameter.grad is not None for parameter in mlp.parameters())


def test_every_activation_that_the_config_names_exists() -> None:
    assert {*ACTIVATIONS, "dice"} == set(NAMES)  # which has parameters: tests/extras/models/test_histories.py


def test_dropout_zeroes_its_share_in_training_alone() -> None:
    mlp = MLP(6, [2000], LayerSettings("identity", dropout=0.3))
    rows = torch.ones(1, 6)
    dropped = mlp(rows) == 0
    assert 0.25 < dropped.float().mean() < 0.35
    assert not (mlp.eval()(rows) == 0).any()


def test_batch_norm_of_one_rank_is_torchs() -> None:
    own, other = BatchNorm(WIDTH), nn.BatchNorm1d(WIDTH)
    for _ in range(3):
        rows = torch.randn(NUM_ROWS, WIDTH) * 3 + 1
        assert torch.equal(own(rows), other(rows))
    assert torch.equal(own.running_mean, other.running_mean) and torch.equal(own.running_var, other.running_var)
    assert torch.equal(own.eval()(rows), other.eval()(rows))


def _steps(rank: int, world_size: int, dtype: torch.dtype, way: str = "gloo") -> dict[str, torch.Tensor]:
    """Of two steps over this rank's rows: outputs, gradients and buffers; gradients are added up over ranks by the test."""
    if way == "shared":
        context = DistributedContext(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
        assert connect(context, 60.0) is not None
    torch.manual_seed(0)
    norm = BatchNorm(WIDTH)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    rows = (torch.randn(2, NUM_ROWS, WIDTH) + 100).to(dtype)  # a large mean, where sums of squares lose the spread
    pull = torch.randn(2, NUM_ROWS, WIDTH)
    mine = slice(*CUTS[world_size][rank : rank + 2])
    inputs = [batch[mine].clone().requires_grad_() for batch in rows]
    outputs = [norm(batch) for batch in inputs]
    sum((output * part[mine]).sum() for output, part in zip(outputs, pull, strict=True)).backward()
    evaluated = norm.eval()(rows[0])
    return {
        "outputs": torch.stack(outputs).detach(),
        "to_inputs": torch.stack([batch.grad for batch in inputs]),
        "to_weight": norm.weight.grad,
        "to_bias": norm.bias.grad,
        "mean": norm.running_mean.clone(),
        "variance": norm.running_var.clone(),
        "evaluated": evaluated.detach(),
    }


def test_batch_norm_has_the_same_bits_through_shared_memory_and_through_gloo(ranks: RankPool) -> None:
    found = {way: ranks.run(2, _steps, 2, torch.float32, way) for way in ("shared", "gloo")}
    for shared, gloo in zip(found["shared"], found["gloo"], strict=True):
        for name, value in gloo.items():
            assert torch.equal(shared[name], value), name


@pytest.mark.parametrize(
    ("dtype", "way"), [(torch.float32, "shared"), (torch.bfloat16, "shared"), (torch.float32, "gloo")]
)
def test_batch_norm_of_two_ranks_with_uneven_batches_is_that_of_one(
    ranks: RankPool, dtype: torch.dtype, way: str
) -> None:
    both, (whole,) = ranks.run(2, _steps, 2, dtype, way), ranks.run(1, _steps, 1, dtype)
    for name in ("mean", "variance", "evaluated"):
        assert torch.equal(both[0][name], both[1][name]), name
        torch.testing.assert_close(both[0][name], whole[name], rtol=1e-4, atol=1e-4)
    for name in ("outputs", "to_inputs"):
        torch.testing.assert_close(torch.cat([part[name] for part in both], dim=1), whole[name], rtol=1e-3, atol=1e-3)
    for name in ("to_weight", "to_bias"):
        torch.testing.assert_close(both[0][name] + both[1][name], whole[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("init", INITS)
def test_linear_layers_begin_as_the_config_says(init: str) -> None:
    torch.manual_seed(0)
    mlp = MLP(300, [200], out_features=1)
    before = copy.deepcopy(mlp.state_dict())
    initialize_linear_layers(mlp, init)
    weight, bias = mlp._mlp[0]._linear.weight, mlp._mlp[0]._linear.bias
    if init == "torch":
        assert torch.equal(weight, before["_mlp.0._linear.weight"])
        return
    variance = 2 / (300 + 200) if "xavier" in init else 2 / 300
    assert weight.std().item() == pytest.approx(variance**0.5, rel=0.02)
    assert not bias.any()
    bound = (3 * variance) ** 0.5
    assert (weight.abs().max() <= bound) == ("uniform" in init)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation": "relo"}, "model.activation relo relu"),
        ({"dropout": 1.0}, "model.dropout 1.0"),
        ({"batch_norm": True, "layer_norm": True}, "model.batch_norm model.layer_norm"),
        ({"init": "he"}, "model.init he"),
        ({"l2": -1.0}, "model.l2 -1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        LayersConfig(**settings)
