"""Narrow stacks of layers in one kernel give torch's numbers, forward and backward, and the same bits on any number of threads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.config.model import LayerSettings
from pipeline.extras.narrow_stacks.stack import FastStack, _Stack, speed_up_stacks
from pipeline.models.layers.dlrm import DotDLRM
from pipeline.models.layers.mlp import MLP

SHAPES = [(300, 13, [64, 32, 16], None), (257, 37, [24, 5], 1), (1, 4, [3], 2), (600, 16, [40], None)]
TOLERANCE = 1e-5  # of sums of hundreds of numbers, beside the largest of them


@pytest.fixture(autouse=True)
def _as_on_wide_cpus() -> Iterator[None]:
    """The kernels compute on any CPU; they are taken where they are faster."""
    with patch.object(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512"):
        yield


def _stack(inputs: int, sizes: list[int], last: int | None) -> MLP:
    torch.manual_seed(0)
    return MLP(inputs, sizes, out_features=last)


def _results(stack: MLP, batch: int) -> list[torch.Tensor]:
    """The values, and the gradients of the inputs and of all parameters."""
    generator = torch.Generator().manual_seed(1)
    width = stack.linear_layers()[0][0].in_features
    inputs = torch.randn(batch, width, generator=generator).requires_grad_()
    factors = torch.randn(batch, stack.out_features, generator=generator)
    values = stack(inputs)
    (values * factors).sum().backward()
    gradients = [each.grad for each in (inputs, *stack.parameters()) if each.grad is not None]
    stack.zero_grad()
    return [values.detach(), *gradients]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_values_and_gradients_are_torchs(shape: tuple[int, int, list[int], int | None]) -> None:
    batch, *sizes = shape
    stack = _stack(*sizes)
    expected = _results(stack, batch)
    assert speed_up_stacks(stack) == 1
    with patch.object(_Stack, "apply", wraps=_Stack.apply) as called:
        found = _results(stack, batch)
    assert called.call_count == 1
    assert len(found) == len(expected) == 2 + len(list(stack.parameters()))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= TOLERANCE * other.abs().max()


def test_under_autocast_layers_run_as_before() -> None:
    stack = _stack(37, [24, 5], 1)
    before = copy.deepcopy(stack)
    speed_up_stacks(stack)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(stack(torch.ones(3, 37)), before(torch.ones(3, 37)))


@pytest.mark.long
def test_the_number_of_threads_changes_no_bit() -> None:
    stack, before = _stack(13, [64, 32, 16], None), torch.get_num_threads()
    speed_up_stacks(stack)
    found = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            found.append(_results(stack, 1500))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_number_that_is_none_comes_out_and_goes_no_further_than_its_row() -> None:
    stack = _stack(13, [64, 32, 16], None)
    speed_up_stacks(stack)
    inputs = torch.randn(300, 13)
    inputs[7, 3] = torch.nan
    assert torch.isnan(stack(inputs)).any(dim=1).nonzero().flatten().tolist() == [7]


def test_both_archs_of_a_dlrm_are_stacks_and_keep_names_and_numbers() -> None:
    torch.manual_seed(0)
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=4, embedding_dim=8, feature_names=[f"f{i}"])
            for i in range(2)
        ]
    )
    model: DLRM = DotDLRM(
        embedding_bag_collection=tables,
        dense_in_features=5,
        dense_arch_layer_sizes=[12, 8],
        over_arch_layer_sizes=[6, 1],
    )
    names = list(model.state_dict())
    dense, crossed = torch.randn(40, 5), torch.randn(40, model.over_arch.model[0]._mlp[0]._in_size)
    before = model.dense_arch(dense), model.over_arch(crossed)
    assert speed_up_stacks(model) == 2
    assert list(model.state_dict()) == names
    with patch.object(_Stack, "apply", wraps=_Stack.apply) as called:
        after = model.dense_arch(dense), model.over_arch(crossed)
    assert called.call_count == 2
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "stack",
    [
        MLP(300, [300]),
        MLP(8, [8], LayerSettings(dropout=0.5)),
        MLP(8, [8], LayerSettings(activation="gelu")),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
    ],
    ids=["wide", "dropout", "gelu", "no_relu"],
)
def test_others_stay_as_they_are(stack: nn.Module) -> None:
    assert speed_up_stacks(stack) == 0


def test_hooks_inside_see_their_layers_and_nothing_is_kept_where_nothing_trains() -> None:
    stack, seen = _stack(4, [3], 1), []
    speed_up_stacks(stack)
    with patch.object(_Stack, "apply", wraps=_Stack.apply) as called:
        with torch.no_grad():
            stack(torch.randn(2, 4))
        assert stack.last is not None
        stack.last.register_forward_hook(lambda *_: seen.append("last"))
        stack(torch.randn(2, 4))
    assert (called.call_count, seen) == (0, ["last"])


def test_a_copy_multiplies_by_its_own_weights() -> None:
    stack = _stack(4, [3], 1)
    speed_up_stacks(stack)
    copied, inputs = copy.deepcopy(stack), torch.randn(2, 4)
    before = copied(inputs)
    with torch.no_grad():
        for weight in stack.parameters():
            weight.zero_()
    assert isinstance(copied.forward, FastStack)
    assert torch.equal(copied(inputs), before)
    assert not stack(inputs).any()
