"""Pairs, crosses and compressed interactions equal the papers' formulas, written out sample by sample."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from pipeline.extras.models.layers.cin import CINAndDeep, CompressedInteraction
from pipeline.models.layers.cross import CrossNetwork, MatrixCross, MixtureCross, VectorCross
from pipeline.models.layers.features import FeatureInputs
from pipeline.models.layers.fm import FMAndDeep, PairTerms, pair_products
from pipeline.models.layers.interaction import DotInteraction

NUM_ROWS, FEATURES, DIM = 3, 4, 5
WIDTH = FEATURES * DIM


@pytest.fixture
def vectors() -> torch.Tensor:
    return torch.randn(NUM_ROWS, FEATURES, DIM, generator=torch.Generator().manual_seed(0), requires_grad=True)


def fill(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def assert_same(found: torch.Tensor, expected: torch.Tensor, inputs: torch.Tensor) -> None:
    """Outputs and gradients."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    pull = torch.randn_like(found)
    gradients = [torch.autograd.grad((value * pull).sum(), inputs, retain_graph=True)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_pair_products_are_the_dot_products_of_all_pairs(vectors: torch.Tensor) -> None:
    pairs = itertools.combinations(range(FEATURES), 2)
    expected = torch.stack([(vectors[:, i] * vectors[:, j]).sum(1) for i, j in pairs]).sum(0).unsqueeze(1)
    assert_same(pair_products(vectors), expected, vectors)


@pytest.mark.parametrize("uses_kernel", [True, False])
def test_dots_without_dense_features_are_those_of_the_rows(vectors: torch.Tensor, uses_kernel: bool) -> None:
    layer = DotInteraction(FEATURES, has_dense=False)
    layer.uses_kernel = uses_kernel
    pairs = itertools.combinations(range(FEATURES), 2)
    expected = torch.stack([(vectors[:, i] * vectors[:, j]).sum(1) for i, j in pairs], dim=1)
    assert_same(layer(None, vectors), expected, vectors)
    assert layer.out_features == expected.shape[1]


def test_deepfm_adds_linear_terms_pairs_and_an_mlp() -> None:
    rows, dense = torch.randn(NUM_ROWS, FEATURES, DIM + 1, requires_grad=True), torch.randn(NUM_ROWS, 2)
    inputs = FeatureInputs(FEATURES, 2, DIM, dense_as_vectors=True)
    layer = fill(FMAndDeep(inputs, 2, nn.Linear(inputs.width, 1)))
    weights = dict(layer.named_parameters())
    logits = []
    for row, values in zip(rows, dense, strict=True):
        found = [weights["inputs.dense_vectors.weight"][i] * values[i] for i in range(2)] + list(row[:, :-1])
        logit = row[:, -1].sum() + values @ weights["dense_term.weights"][:, 0] + weights["dense_term.bias"][0]
        logit = logit + sum((one * other).sum() for one, other in itertools.combinations(found, 2))
        logits.append(logit + torch.cat(found) @ weights["deep.weight"][0] + weights["deep.bias"][0])
    assert_same(layer(dense, rows), torch.stack(logits).unsqueeze(1), rows)


@pytest.mark.parametrize("num_dense", [0, 2])
def test_gradients_of_rows_are_those_of_autograd_bit_for_bit(num_dense: int) -> None:
    """Of both models over rows that end in a linear weight, where backward is written out."""
    torch.manual_seed(0)
    rows, dense = torch.randn(NUM_ROWS, FEATURES, DIM + 1, requires_grad=True), torch.randn(NUM_ROWS, num_dense)
    vectors, weights = rows[:, :, :-1], rows[:, :, -1]
    pull = torch.randn(NUM_ROWS, 1)

    fm = fill(PairTerms(num_dense, DIM))
    total, squares = vectors.sum(dim=1), vectors.square().sum(dim=1)
    if num_dense:
        total = total + dense @ fm.dense_vectors
        squares = squares + dense.square() @ fm.dense_vectors.square()
    pairs = (total.square() - squares).sum(dim=1, keepdim=True) / 2
    expected = pairs + weights.sum(dim=1, keepdim=True) + fm.dense_term(dense)
    assert_equal_bits(fm(dense, rows), expected, rows, pull)

    inputs = FeatureInputs(FEATURES, num_dense, DIM, dense_as_vectors=True)
    deepfm = fill(FMAndDeep(inputs, num_dense, nn.Linear(inputs.width, 1)))
    own, flat = inputs(dense, vectors)
    products = (own.sum(dim=1).square().sum(dim=1, keepdim=True) - own.square().sum(dim=(1, 2))[:, None]) / 2
    linear = weights.sum(dim=1, keepdim=True) + deepfm.dense_term(dense)
    assert_equal_bits(deepfm(dense, rows), deepfm.deep(flat) + products + linear, rows, pull)


def test_linear_weights_count_so_many_times() -> None:
    torch.manual_seed(0)
    rows, dense = torch.randn(NUM_ROWS, FEATURES, DIM + 1), torch.randn(NUM_ROWS, 2)
    larger = torch.cat([rows[:, :, :-1], 3 * rows[:, :, -1:]], dim=2)
    inputs = FeatureInputs(FEATURES, 2, DIM, dense_as_vectors=True)
    deep = nn.Linear(inputs.width, 1)
    for make in (
        lambda scale: PairTerms(2, DIM, linear_scale=scale),
        lambda scale: FMAndDeep(inputs, 2, deep, scale),
        lambda scale: CINAndDeep(inputs, 2, [3], deep, scale),
    ):
        plain = make(1.0)
        scaled = make(3.0)
        scaled.load_state_dict(plain.state_dict())
        torch.testing.assert_close(scaled(dense, rows), plain(dense, larger))


def assert_equal_bits(found: torch.Tensor, expected: torch.Tensor, rows: torch.Tensor, pull: torch.Tensor) -> None:
    """To the last bit."""
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(value, rows, pull, retain_graph=True)[0] for value in (found, expected)]
    assert torch.equal(*gradients)


def crosses(kind: str) -> nn.Module:
    return {
        "vector": lambda: VectorCross(WIDTH),
        "matrix": lambda: MatrixCross(WIDTH),
        "low_rank": lambda: MatrixCross(WIDTH, 3),
        "mixture": lambda: MixtureCross(WIDTH, 3, 2),
    }[kind]()


def crossed(kind: str, weights: dict[str, torch.Tensor], first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Of one sample, as the papers write it."""
    if kind == "vector":
        return first * (last @ weights["weight.weight"][0]) + weights["bias"] + last
    up, bias = weights["up.weight"], weights["up.bias"]
    if kind == "matrix":
        return first * (up @ last + bias) + last
    if kind == "low_rank":
        return first * (up @ (weights["down.weight"] @ last) + bias) + last
    gates = torch.softmax(weights["gates.weight"] @ last, 0)
    experts = []
    for number, inner in enumerate(weights["inner"]):
        mine = slice(number * 3, number * 3 + 3)
        hidden = torch.tanh(inner @ torch.tanh(weights["down.weight"][mine] @ last))
        experts.append(first * (up[:, mine] @ hidden + bias))
    return sum((gate * expert for gate, expert in zip(gates, experts, strict=True)), start=last)


@pytest.mark.parametrize("kind", ["vector", "matrix", "low_rank", "mixture"])
def test_crosses_are_the_papers(kind: str, vectors: torch.Tensor) -> None:
    torch.manual_seed(0)
    network = CrossNetwork([fill(crosses(kind)), fill(crosses(kind))])
    outputs = []
    for first in vectors.flatten(1):
        last = first
        for layer in network.layers:
            last = crossed(kind, dict(layer.named_parameters()), first, last)
        outputs.append(last)
    scale = torch.stack(outputs).detach().abs().max()
    assert_same(network(vectors.flatten(1)) / scale, torch.stack(outputs) / scale, vectors)


def test_a_compressed_interaction_is_the_papers(vectors: torch.Tensor) -> None:
    sizes = [3, 2]
    layer = fill(CompressedInteraction(FEATURES, sizes))
    sums, last = [], vectors
    for linear, size in zip(layer.layers, sizes, strict=True):
        weights = linear.weight.view(size, last.shape[1], FEATURES)
        last = torch.stack(
            [
                sum(
                    weights[h, i, j] * last[:, i] * vectors[:, j] for i in range(last.shape[1]) for j in range(FEATURES)
                )
                + linear.bias[h]
                for h in range(size)
            ],
            dim=1,
        )
        sums.append(last.sum(2))
    assert_same(layer(vectors), torch.cat(sums, dim=1), vectors)
