"""Scale inputs and layers by gates that know the domain and the user (PEPNet, arXiv 2302.01115)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pipeline.config.model import LayerSettings
from pipeline.config.tables import table_name
from pipeline.data.targets import Target
from pipeline.extras.models.layers.towers import class_logits
from pipeline.models.layers.features import FeatureInputs
from pipeline.models.layers.mlp import Layer

SCALE = 2.0  # gamma: a gate of 1 keeps a column, 0 removes it, 2 doubles it


class GateUnit(nn.Module):
    """Map [B, in_features] to factors [B, out_features] from 0 to 2: 2 sigmoid(W' relu(W x))."""

    def __init__(self, in_features: int, hidden: int, out_features: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(in_features, hidden), nn.Linear(hidden, out_features)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return SCALE * torch.sigmoid(self.second(torch.relu(self.first(values))))


class GatedTower(nn.Module):
    """Map inputs [B, in_features] and prior [B, P] to [B, target's width]. The input of each layer
    is multiplied by its gate of the prior; without gates this is an MLP.
    """

    def __init__(
        self, in_features: int, sizes: list[int], target: Target, settings: LayerSettings, gates: list[GateUnit]
    ) -> None:
        super().__init__()
        widths = [in_features, *sizes]
        layers = [Layer(width, size, settings) for width, size in zip(widths, sizes, strict=False)]
        self.layers = nn.ModuleList([*layers, nn.Linear(widths[-1], target.width)])
        self.gates = nn.ModuleList(gates)
        self._is_classes = target.kind == "classes"

    def forward(self, inputs: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            inputs = layer(inputs * self.gates[number](prior) if len(self.gates) else inputs)
        return class_logits(inputs) if self._is_classes else inputs


class GatedTowers(nn.Module):
    """Map dense [B, N] and rows [B, F, D] to [B, sum of the targets' widths].

    E are the columns of all features. `domain_gate` of [rows of the domain, E] scales E. The prior
    of the towers' gates is [rows of the prior features, scaled E]. E gets no gradient by the gates.
    domain, prior: the numbers of these features.
    """

    def __init__(
        self,
        inputs: FeatureInputs,
        domain: Sequence[int],
        domain_gate: GateUnit | None,
        prior: Sequence[int],
        towers: dict[str, GatedTower],
    ) -> None:
        super().__init__()
        self.inputs, self.domain_gate = inputs, domain_gate
        self.towers = nn.ModuleDict({table_name(name): tower for name, tower in towers.items()})
        self._domain, self._prior = list(domain), list(prior)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        _, inputs = self.inputs(dense, rows)
        if self.domain_gate is not None:
            inputs = inputs * self.domain_gate(_with_rows(rows, self._domain, inputs))
        prior = _with_rows(rows, self._prior, inputs)
        return torch.cat([tower(inputs, prior) for tower in self.towers.values()], dim=1)


def _with_rows(rows: torch.Tensor, features: list[int], inputs: torch.Tensor) -> torch.Tensor:
    """Return [B, len(features) * D + W]: the rows of these features, and the inputs without their gradient."""
    return torch.cat([*(rows[:, number] for number in features), inputs.detach()], dim=1)
