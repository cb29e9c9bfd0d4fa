"""Linear layers by oneDNN give torch's numbers, forward and backward, and the same bits on any number of threads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.mlp import Perceptron

from pipeline.config.model import LayerSettings
from pipeline.devices.cpu import products
from pipeline.devices.cpu.products import (
    MIN_WIDTH,
    FastCross,
    FastLinear,
    _Linear,
    speed_up_linear_layers,
)
from pipeline.models.layers.mlp import MLP

SHAPES = [(300, 13, 512), (257, 367, 64), (64, 16, 1), (40, 5, 24), (1, 32, 32), (2048, 64, 32)]
ASKED = products.onednn_multiplies_faster
TOLERANCE = 3e-5  # sums of up to 2,048 products of normal numbers, beside the largest of them


@pytest.fixture(autouse=True)
def _by_onednn() -> Iterator[None]:
    """As on the CPUs where it is faster: oneDNN computes on any."""
    with (
        patch.object(products, "onednn_multiplies_faster", lambda: True),
        patch.object(products, "MIN_PRODUCTS", 0),
    ):
        yield


def _results(shape: tuple[int, int, int], has_bias: bool, by_torch: bool) -> list[torch.Tensor | None]:
    batch, into, out = shape
    torch.manual_seed(0)
    layer, inputs = nn.Linear(into, out, bias=has_bias), torch.randn(batch, into, requires_grad=True)
    values = layer(inputs) if by_torch else FastLinear(layer)(inputs)
    (values * torch.randn(batch, out)).sum().backward()
    return [values.detach(), inputs.grad, *(weight.grad for weight in layer.parameters())]


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_values_and_gradients_are_torchs(shape: tuple[int, int, int], has_bias: bool) -> None:
    ours, torchs = (_results(shape, has_bias, by_torch) for by_torch in (False, True))
    for one, other in zip(ours, torchs, strict=True):
        assert one is not None and other is not None
        assert (one - other).abs().max() <= TOLERANCE * other.abs().max()


def test_the_number_of_threads_changes_no_bit() -> None:
    """Of what oneDNN multiplies; MKL's product of 40 x 5 with 24 x 5 has other bits on 3 threads than on 1."""
    before = torch.get_num_threads()
    wide = [shape for shape in SHAPES if min(shape) >= MIN_WIDTH]
    found = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            found.append([_results(shape, True, by_torch=False) for shape in wide])
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None)


def test_the_gradient_of_a_sum_which_is_one_number_spread_is_right() -> None:
    layer, inputs = nn.Linear(16, 24), torch.randn(32, 16)
    FastLinear(layer)(inputs).sum().backward()
    torch.testing.assert_close(layer.weight.grad, inputs.sum(0).expand(24, 16), rtol=1e-5, atol=1e-5)


def test_inputs_may_have_any_dimensions_and_strides() -> None:
    inputs, layer = torch.randn(4, 16, 9).transpose(1, 2), nn.Linear(16, 24)
    for each in (inputs, inputs[0, 0]):
        torch.testing.assert_close(FastLinear(layer)(each), layer(each), rtol=1e-5, atol=1e-5)


def test_layers_and_perceptrons_are_sped_up_and_keep_names_and_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Perceptron(16, 32, activation=torch.relu_), MLP(32, [24], LayerSettings(), out_features=8))
    inputs, names = torch.randn(64, 16), list(model.state_dict())
    before = model(inputs)
    assert speed_up_linear_layers(model) == 3
    assert list(model.state_dict()) == names
    with patch.object(_Linear, "apply", wraps=_Linear.apply) as called:
        torch.testing.assert_close(model(inputs), before, rtol=1e-5, atol=1e-5)
    assert called.call_count == 3


def test_torchrecs_cross_network_keeps_its_numbers() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(LowRankCrossNet(96, num_layers=2, low_rank=16))
    for weight in plain.parameters():
        nn.init.normal_(weight, std=0.1)
    fast = copy.deepcopy(plain)
    assert speed_up_linear_layers(fast) == 1 and isinstance(fast[0].forward, FastCross)
    inputs, factors, found = torch.randn(40, 96), torch.randn(40, 96), []
    for model in (plain, fast):
        own = inputs.clone().requires_grad_()
        values = model(own)
        (values * factors).sum().backward()
        found.append([values.detach(), own.grad, *(weight.grad for weight in model.parameters())])
    for theirs, ours in zip(*found, strict=True):
        assert theirs is not None and ours is not None
        assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


def test_a_copy_multiplies_by_its_own_weights() -> None:
    layer = nn.Linear(16, 16)
    model = nn.Sequential(layer)
    speed_up_linear_layers(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        layer.weight.zero_()
    assert isinstance(copied[0].forward, FastLinear)
    assert copied(torch.ones(2, 16)).std() > 0


def test_autocast_and_export_take_torchs_products() -> None:
    layer = nn.Linear(16, 24)
    model, inputs = nn.Sequential(layer), torch.randn(8, 16)
    speed_up_linear_layers(model)
    with patch.object(_Linear, "apply", side_effect=AssertionError):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(inputs).dtype == torch.bfloat16
        operations = {str(node.target) for node in torch.export.export(model, (inputs,)).graph.nodes}
        assert model.double()(inputs.double()).dtype == torch.float64
    assert "aten.linear.default" in operations


@pytest.mark.parametrize(
    ("vendor", "width", "is_faster"),
    [
        pytest.param("AuthenticAMD", "AVX512", True, id="wide_amd"),
        pytest.param("GenuineIntel", "AVX512", False, id="wide_intel"),
        pytest.param("AuthenticAMD", "AVX2", False, id="narrow_amd"),
    ],
)
def test_the_vendor_and_the_width_decide(vendor: str, width: str, is_faster: bool) -> None:
    with (
        patch.object(torch.backends.cpu, "get_cpu_capability", lambda: width),
        patch.object(Path, "is_file", lambda _: True),
        patch.object(Path, "read_text", lambda *_, **__: f"vendor_id\t: {vendor}\n"),
    ):
        assert ASKED.__wrapped__() == is_faster


def test_where_torchs_products_are_faster_layers_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    with patch.object(products, "onednn_multiplies_faster", lambda: False):
        assert speed_up_linear_layers(model) == 0
    assert not isinstance(model[0].forward, FastLinear)
