"""Compute each label's columns from the columns of the labels that it depends on (DBMTL, arXiv
1902.09154, section 3).
"""

from __future__ import annotations

import torch
from torch import nn

from pipeline.models.layers.mlp import MLP


class DependentLabels(nn.Module):
    """Map [B, in_features] to one tensor [B, H] per target: relation([own(shared(x)), tensors of
    the targets that it depends on]).

    parents: for each target, the numbers of these targets. order: all targets, after their parents.
    """

    def __init__(
        self, shared: nn.Module, own: list[MLP], relations: list[MLP], parents: list[list[int]], order: list[int]
    ) -> None:
        super().__init__()
        self.shared, self.own, self.relations = shared, nn.ModuleList(own), nn.ModuleList(relations)
        self._parents, self._order = parents, order

    def forward(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        shared = self.shared(inputs)
        found: dict[int, torch.Tensor] = {}
        for number in self._order:
            parts = [self.own[number](shared), *(found[parent] for parent in self._parents[number])]
            found[number] = self.relations[number](torch.cat(parts, dim=1))
        return [found[number] for number in range(len(self._order))]
