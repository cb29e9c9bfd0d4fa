"""Share layers between labels (one bottom, or experts and gates: MMoE, PLE), with a tower for each
label on top.
"""

from __future__ import annotations

import torch
from torch import nn

from pipeline.config.model import LayerSettings
from pipeline.config.tables import table_name
from pipeline.data.targets import Target
from pipeline.models.layers.features import FeatureInputs
from pipeline.models.layers.mlp import MLP


class Towers(nn.Module):
    """Map dense [B, N] and rows [B, F, D] to [B, sum of the targets' widths]. Each target has an
    MLP, whose input is the output of `body` for this target. Outputs of a label of classes are the
    logits of its softmax's probabilities.
    """

    def __init__(
        self,
        inputs: FeatureInputs,
        body: nn.Module,
        width: int,
        targets: list[Target],
        sizes: list[list[int]],
        settings: LayerSettings,
    ) -> None:
        super().__init__()
        self.inputs, self.body = inputs, body
        self._classes = [target.kind == "classes" for target in targets]
        self.towers = nn.ModuleDict(
            {
                table_name(target.name): MLP(width, layer_sizes, settings, out_features=target.width)
                for target, layer_sizes in zip(targets, sizes, strict=True)
            }
        )

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        _, inputs = self.inputs(dense, rows)
        parts = zip(self.towers.values(), self.body(inputs), self._classes, strict=True)
        return torch.cat([class_logits(tower(part)) if each else tower(part) for tower, part, each in parts], dim=1)


def class_logits(scores: torch.Tensor) -> torch.Tensor:
    """Map [B, K] to [B, K]: the logits of softmax(scores), score k minus the logsumexp of all other scores."""
    itself = torch.eye(scores.shape[1], dtype=torch.bool, device=scores.device)
    return scores - scores[:, None, :].masked_fill(itself, float("-inf")).logsumexp(2)


class SharedBottom(nn.Module):
    """Map [B, in_features] to one tensor [B, H], which all `num_targets` targets share."""

    def __init__(self, layers: nn.Module, num_targets: int) -> None:
        super().__init__()
        self.layers, self._num_targets = layers, num_targets

    def forward(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        return [self.layers(inputs)] * self._num_targets


class OwnBottoms(nn.Module):
    """Map [B, in_features] to one tensor [B, H] per target, by separate layers for each target.

    Targets share only the tables.
    """

    def __init__(self, layers: list[MLP]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        return [layers(inputs) for layers in self.layers]


class Gate(nn.Module):
    """Map inputs [B, in_features] and experts [B, E, H] to [B, H]: the sum of experts, weighted by
    a softmax of the inputs.
    """

    def __init__(self, in_features: int, num_experts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_experts, bias=False)

    def forward(self, inputs: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.linear(inputs), dim=1)
        return torch.bmm(weights.unsqueeze(1), experts).squeeze(1)


class Experts(nn.Module):
    """Map [B, in_features] to one tensor [B, sizes[-1]] per expert."""

    def __init__(self, count: int, in_features: int, sizes: list[int], settings: LayerSettings) -> None:
        super().__init__()
        self.experts = nn.ModuleList(MLP(in_features, sizes, settings) for _ in range(count))

    def forward(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        return [expert(inputs) for expert in self.experts]


class MixtureOfExperts(nn.Module):
    """Map [B, in_features] to [B, H] for each target.

    Each target has a gate over the shared experts (MMoE, section 4.2).
    """

    def __init__(
        self, in_features: int, num_experts: int, sizes: list[int], num_targets: int, settings: LayerSettings
    ) -> None:
        super().__init__()
        self.experts = Experts(num_experts, in_features, sizes, settings)
        self.gates = nn.ModuleList(Gate(in_features, num_experts) for _ in range(num_targets))

    def forward(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        experts = torch.stack(self.experts(inputs), dim=1)
        return [gate(inputs, experts) for gate in self.gates]


class ExtractionLevel(nn.Module):
    """Map one input [B, in_features] per target and one for the shared experts to the same number
    of outputs [B, H] (PLE, section 4.2).

    The shared inputs are last. A target's gate weights the experts of the target and the shared
    experts. The shared gate weights all experts; the last level has no shared gate.
    """

    def __init__(
        self,
        in_features: int,
        sizes: list[int],
        num_targets: int,
        num_own: int,
        num_shared: int,
        is_last: bool,
        settings: LayerSettings,
    ) -> None:
        super().__init__()
        self.own = nn.ModuleList(Experts(num_own, in_features, sizes, settings) for _ in range(num_targets))
        self.shared = Experts(num_shared, in_features, sizes, settings)
        self.gates = nn.ModuleList(Gate(in_features, num_own + num_shared) for _ in range(num_targets))
        self.shared_gate = None if is_last else Gate(in_features, num_own * num_targets + num_shared)

    def forward(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        *own_inputs, shared_input = inputs
        shared = self.shared(shared_input)
        own = [experts(each) for experts, each in zip(self.own, own_inputs, strict=True)]
        gated = zip(self.gates, own_inputs, own, strict=True)
        outputs = [gate(each, torch.stack([*experts, *shared], dim=1)) for gate, each, experts in gated]
        if self.shared_gate is not None:
            everyone = [expert for experts in own for expert in experts] + shared
            outputs.append(self.shared_gate(shared_input, torch.stack(everyone, dim=1)))
        return outputs


class ProgressiveExtraction(nn.Module):
    """Map [B, in_features] to [B, H] for each target, by a sequence of extraction levels (PLE; one
    level is CGC).
    """

    def __init__(self, levels: list[ExtractionLevel], num_targets: int) -> None:
        super().__init__()
        self.levels, self._num_targets = nn.ModuleList(levels), num_targets

    def forward(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        parts = [inputs] * (self._num_targets + 1)
        for level in self.levels:
            parts = level(parts)
        return parts
