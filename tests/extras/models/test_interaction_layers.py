"""Attention, gated crosses, factorized layers, factorization blocks, masks, gates and fusion give the numbers of their papers' formulas, feature by feature and head by head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.config.model import LayerSettings
from pipeline.extras.models.finalnet import FinalNetConfig
from pipeline.extras.models.layers.attention import MultiHeadInteraction
from pipeline.extras.models.layers.factorized import FactorizedLayer, FactorizedStreams
from pipeline.extras.models.layers.gated_cross import GatedCross
from pipeline.extras.models.layers.masks import FeatureNorm, MaskBlock
from pipeline.extras.models.layers.streams import BilinearFusion, FeatureGate
from pipeline.extras.models.tasks.distilled_streams import DistilledStreamsTask
from pipeline.extras.models.wukong import WukongConfig
from pipeline.models.layers.cross import CrossNetwork
from pipeline.models.layers.features import FeatureInputs
from pipeline.models.layers.mlp import initialize_linear_layers
from pipeline.runtime.errors import ConfigError
from tests.models.every_model import build, small
from tests.support.clicks import labelled
from tests.support.messages import names

B, F, D = 5, 4, 6


def _normalized(rows: torch.Tensor) -> torch.Tensor:
    spread = rows.var(-1, unbiased=False, keepdim=True)
    return (rows - rows.mean(-1, keepdim=True)) / (spread + 1e-5).sqrt()


@pytest.mark.parametrize(
    ("width", "num_heads", "settings"),
    [(6, 1, {}), (8, 2, {"scale": True}), (8, 4, {"layer_norm": True}), (6, 3, {"residual": False})],
)
def test_an_interacting_layer_is_the_papers_sum_over_heads(
    width: int, num_heads: int, settings: dict[str, bool]
) -> None:
    torch.manual_seed(0)
    layer = MultiHeadInteraction(D, width, num_heads, **settings)
    rows, part = torch.randn(B, F, D), width // num_heads
    expected = torch.zeros(B, F, width)
    for sample in range(B):
        for head in range(num_heads):
            columns = slice(head * part, (head + 1) * part)
            query, key, value = (
                map_.weight[columns] @ rows[sample].T for map_ in (layer.query, layer.key, layer.value)
            )
            for feature in range(F):
                products = query[:, feature] @ key
                weights = torch.exp(products / part**0.5 if settings.get("scale") else products)
                expected[sample, feature, columns] = (value * weights / weights.sum()).sum(dim=1)
    if settings.get("residual", True):
        expected += rows if width == D else rows @ layer.residual.weight.T
    if settings.get("layer_norm"):
        expected = _normalized(expected)
    torch.testing.assert_close(layer(rows), expected.clamp(min=0), rtol=1e-5, atol=1e-5)


def test_attention_drops_weights_in_training_alone() -> None:
    torch.manual_seed(0)
    layer, rows = MultiHeadInteraction(D, D, 2, dropout=0.5), torch.randn(B, F, D)
    assert not torch.equal(layer(rows), layer(rows))
    assert torch.equal(layer.eval()(rows), layer(rows))


def _array(values: torch.Tensor) -> np.ndarray:
    return values.detach().numpy().astype(np.float64)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def test_a_gated_cross_is_the_papers_product_of_the_input_a_linear_map_and_a_gate() -> None:
    torch.manual_seed(0)
    network = CrossNetwork([GatedCross(D), GatedCross(D)])
    for weight in network.parameters():
        nn.init.normal_(weight)
    inputs = torch.randn(B, D)
    for sample, found in zip(_array(inputs), _array(network(inputs)), strict=True):
        crossed = sample
        for layer in network.layers:
            linear = _array(layer.cross.weight) @ crossed + _array(layer.cross.bias)
            crossed = sample * linear * _sigmoid(_array(layer.gate.weight) @ crossed) + crossed
        np.testing.assert_allclose(found, crossed, rtol=1e-4, atol=1e-4)


def test_the_biases_of_a_gated_cross_start_uniform_also_after_the_first_weights_are_drawn() -> None:
    torch.manual_seed(0)
    layer = GatedCross(1000)
    initialize_linear_layers(layer, "xavier_normal")
    bias = layer.cross.bias.detach()
    assert 0 <= bias.min() < 0.02 and 0.98 < bias.max() < 1 and abs(bias.mean() - 0.5) < 0.04


@pytest.mark.parametrize("norm", [True, False])
def test_a_mask_block_masks_normalizes_and_activates(norm: bool) -> None:
    torch.manual_seed(0)
    block = MaskBlock(7, 6, 3, 0.5, LayerSettings(layer_norm=norm))
    inputs, hidden = torch.randn(B, 7), torch.randn(B, 6)
    first, second = block.mask.aggregation, block.mask.projection
    assert first.weight.shape == (3, 7) and second.weight.shape == (6, 3)
    units = (inputs @ first.weight.T + first.bias).clamp(min=0)
    values = ((units @ second.weight.T + second.bias) * hidden) @ block.linear.weight.T
    torch.testing.assert_close(block(inputs, hidden), (_normalized(values) if norm else values).clamp(min=0))


def test_each_features_vector_is_normalized_with_weights_of_its_own() -> None:
    torch.manual_seed(0)
    norm, rows = FeatureNorm(F, D), torch.randn(B, F, D)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    for feature in range(F):
        expected = _normalized(rows[:, feature]) * norm.weight[feature] + norm.bias[feature]
        torch.testing.assert_close(norm(rows)[:, feature], expected)


def test_a_gate_is_made_of_the_context_features_or_is_learnt() -> None:
    torch.manual_seed(0)
    rows = torch.randn(B, F, D)
    gate = FeatureGate([2, 0], D, [3], 9)
    first, last = gate.layers._mlp[0]._linear, gate.layers.last
    context = torch.cat([rows[:, 2], rows[:, 0]], dim=1)
    units = (context @ first.weight.T + first.bias).clamp(min=0)
    torch.testing.assert_close(gate(rows), 2 * torch.sigmoid(units @ last.weight.T + last.bias))
    learnt = FeatureGate([], D, [3], 9)
    assert learnt(rows).shape == (1, 9) and learnt.context is not None


@pytest.mark.parametrize("num_heads", [1, 2])
def test_fusion_is_the_papers_bilinear_form_of_each_head(num_heads: int) -> None:
    torch.manual_seed(0)
    fusion, first, second = BilinearFusion(6, 4, num_heads), torch.randn(B, 6), torch.randn(B, 4)
    expected = first @ fusion.first.weight.T + second @ fusion.second.weight.T + fusion.first.bias + fusion.second.bias
    for head in range(num_heads):
        x, y = (part.chunk(num_heads, dim=1)[head] for part in (first, second))
        expected[:, 0] += torch.einsum("bi,ij,bj->b", x, fusion.weight[head], y)
    torch.testing.assert_close(fusion(first, second), expected, rtol=1e-5, atol=1e-5)


def _logits_of_block(block: nn.Sequential, inputs: np.ndarray, is_concat: bool) -> np.ndarray:
    for layer in list(block)[:-1]:
        assert isinstance(layer, FactorizedLayer)
        hidden, factors = np.split(inputs @ _array(layer.linear.weight).T + _array(layer.linear.bias), 2, axis=1)
        inputs = np.concatenate([hidden, hidden * factors], 1) if is_concat else hidden + hidden * factors
    return (inputs @ _array(block[-1].weight).T + _array(block[-1].bias))[:, 0]


@pytest.mark.parametrize("combine", ["concat", "sum"])
def test_factorized_blocks_are_the_papers_products_and_are_trained_towards_their_mean(combine: str) -> None:
    torch.manual_seed(0)
    config = FinalNetConfig(
        first_layer_sizes=[8, 4], second_layer_sizes=[6], combine=combine, batch_norm=False, dropout=0, distillation=0.3
    )
    arch = config.build_over_arch(FeatureInputs(F, 0, D, dense_as_vectors=True), [], D)
    assert isinstance(arch, FactorizedStreams) and arch.gates is not None and arch.second is not None
    nn.init.normal_(arch.gates.weight), nn.init.normal_(arch.gates.bias)
    dense, rows = torch.empty(B, 0), torch.randn(B, F, D)
    vectors = _array(rows)
    gates = np.einsum("fg,bgd->bfd", _array(arch.gates.weight), vectors) + _array(arch.gates.bias)
    gated = np.concatenate([vectors, vectors * gates], axis=1).reshape(B, -1)
    pairs = (arch.first, gated), (arch.second, vectors.reshape(B, -1))
    streams = np.stack([_logits_of_block(block, inputs, combine == "concat") for block, inputs in pairs], axis=1)
    np.testing.assert_allclose(_array(arch.train()(dense, rows)), streams, rtol=1e-4, atol=1e-4)
    mean = streams.mean(axis=1)
    np.testing.assert_allclose(_array(arch.eval()(dense, rows))[:, 0], mean, rtol=1e-4, atol=1e-4)

    labels, weights = np.arange(B) % 2, np.arange(B) / 2
    batch = labelled(torch.tensor(labels).float(), torch.tensor(weights).float())
    task = DistilledStreamsTask(config, [])

    def cross_entropy(targets: np.ndarray, logits: np.ndarray) -> float:
        losses = -targets * np.log(_sigmoid(logits)) - (1 - targets) * np.log(1 - _sigmoid(logits))
        return float((weights * losses).mean())

    plain = cross_entropy(labels, mean)
    distilled = sum(cross_entropy(_sigmoid(mean), streams[:, number]) for number in range(2))
    logits = torch.tensor(streams, dtype=torch.float32, requires_grad=True)
    loss, prediction = task.train()(logits, batch)
    assert loss.item() == pytest.approx(plain + 0.3 * distilled, rel=1e-5)
    # The targets get no gradient.
    of_mean = 0.5 * (_sigmoid(mean) - labels)[:, None]
    wanted = weights[:, None] * (of_mean + 0.3 * (_sigmoid(streams) - _sigmoid(mean)[:, None]))
    np.testing.assert_allclose(_array(torch.autograd.grad(loss, logits)[0]), wanted / B, rtol=1e-4, atol=1e-5)
    assert task.eval()(prediction.logits[:, None], batch)[0].item() == pytest.approx(plain, rel=1e-5)


def test_finalnet_refuses_halves_of_odd_layers_and_has_the_log_loss_with_one_block() -> None:
    with pytest.raises(ConfigError, match=names("model.combine 7")):
        FinalNetConfig(first_layer_sizes=[7])
    assert FinalNetConfig(first_layer_sizes=[7], second_layer_sizes=[], combine="sum").task == "click"
    assert FinalNetConfig(distillation=0).task == "click" and FinalNetConfig().task == "distilled_streams"


def _normalized_array(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / np.sqrt(values.var() + 1e-5)


def test_wukong_stacks_the_papers_factorization_machines_and_linear_sums() -> None:
    torch.manual_seed(0)
    config = WukongConfig(
        num_layers=2, num_fm_vectors=3, num_linear_vectors=2, rank=2, fm_layer_sizes=[7], hidden_layer_sizes=[],
        batch_norm=False, dropout=0,
    )  # fmt: skip
    arch = config.build_over_arch(FeatureInputs(F, 0, D, dense_as_vectors=True), [], D)
    for name, weight in arch.named_parameters():
        if "norm" not in name:
            nn.init.normal_(weight)
    rows = torch.randn(B, F, D)
    weights = {name: _array(weight) for name, weight in arch.named_parameters()}
    for sample, found in zip(_array(rows), _array(arch(torch.empty(B, 0), rows)), strict=True):
        vectors = sample  # [number of vectors, D]
        for layer in ("layers.0", "layers.1"):
            units = _normalized_array((vectors @ vectors.T @ weights[f"{layer}.block.projection"].T).flatten())
            for linear in ("_mlp.0._linear", "last"):
                units = (
                    weights[f"{layer}.block.mlp.{linear}.weight"] @ units + weights[f"{layer}.block.mlp.{linear}.bias"]
                )
                units = units if linear == "last" else np.maximum(units, 0)
            outputs = np.concatenate([units.reshape(3, D), weights[f"{layer}.linear.weight"] @ vectors])
            residual = weights.get(f"{layer}.residual.weight", np.eye(len(vectors)))
            vectors = np.stack([_normalized_array(vector) for vector in outputs + residual @ vectors])
        assert len(vectors) == 5 and "layers.1.residual.weight" not in weights
        logit = weights["over.last.weight"] @ vectors.flatten() + weights["over.last.bias"]
        np.testing.assert_allclose(found, logit, rtol=1e-4, atol=1e-4)


def test_wukong_refuses_dense_values() -> None:
    with pytest.raises(ConfigError, match=names("model.dense_features=values 3 dense")):
        build(small("wukong", dense_features="values"))


def test_dense_features_are_vectors_times_their_values_or_values() -> None:
    torch.manual_seed(0)
    dense, rows = torch.randn(B, 2), torch.randn(B, F, D)
    as_vectors = FeatureInputs(F, 2, D, dense_as_vectors=True)
    vectors, inputs = as_vectors(dense, rows)
    assert torch.equal(vectors[:, 1], dense[:, 1:] * as_vectors.dense_vectors.weight[1])
    assert torch.equal(vectors[:, 2:], rows) and torch.equal(inputs, vectors.flatten(1))
    assert (as_vectors.num_vectors, as_vectors.width) == (6, 36)
    as_values = FeatureInputs(F, 2, D, dense_as_vectors=False)
    vectors, inputs = as_values(dense, rows)
    assert torch.equal(vectors, rows) and torch.equal(inputs, torch.cat([rows.flatten(1), dense], dim=1))
    assert (as_values.num_vectors, as_values.width) == (4, inputs.shape[1])
