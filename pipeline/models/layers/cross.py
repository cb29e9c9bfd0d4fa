"""Cross the features' columns with each other, one degree per layer (DCN, arXiv 1708.05123; DCNv2,
arXiv 2008.13535).
"""

from __future__ import annotations

import torch
from torch import nn

from pipeline.models.layers.features import FeatureInputs


class VectorCross(nn.Module):
    """Map first, last [B, width] to first * (last . w) + b + last (arXiv 1708.05123,
    equation 3).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(last + self.bias, first, self.weight(last))


class MatrixCross(nn.Module):
    """Map first, last [B, width] to first * (W last + b) + last.

    W has full rank or is U V of `rank` (arXiv 2008.13535, 3.1, 3.2).
    """

    def __init__(self, width: int, rank: int | None = None) -> None:
        super().__init__()
        self.down = None if rank is None else nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank or width, width)

    def forward(self, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        crossed = self.up(last if self.down is None else self.down(last))
        return torch.addcmul(last, first, crossed)


class MixtureCross(nn.Module):
    """Map first, last [B, width] to first * (sum of gated experts + b) + last.

    An expert is U tanh(C tanh(V last)).

    Source: arXiv 2008.13535, section 3.2 (DCN-Mix). The gates are a softmax of a linear map of
    `last`. All experts are computed as two products, with the gate applied before the second
    product; the sum is the same.
    """

    def __init__(self, width: int, rank: int, num_experts: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, num_experts * rank, bias=False)
        self.inner = nn.Parameter(torch.empty(num_experts, rank, rank))
        self.up = nn.Linear(num_experts * rank, width)
        self.gates = nn.Linear(width, num_experts, bias=False)
        for inner in self.inner.data:
            nn.init.xavier_normal_(inner)

    def forward(self, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.down(last)).unflatten(1, self.inner.shape[:2])  # [B, experts, rank]
        hidden = torch.tanh(torch.einsum("ber,esr->bes", hidden, self.inner))
        gated = hidden * torch.softmax(self.gates(last), dim=1).unsqueeze(2)
        return torch.addcmul(last, first, self.up(gated.flatten(1)))


class CrossNetwork(nn.Module):
    """Map inputs [B, width] -> [B, width]: each layer crosses the inputs with the output of the
    previous layer.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        crossed = inputs
        for layer in self.layers:
            crossed = layer(inputs, crossed)
        return crossed


class CrossAndDeep(nn.Module):
    """Map dense [B, num_dense] and rows [B, F, D] to logits [B, 1]: a cross network with up to two
    MLPs.
    """

    def __init__(
        self, inputs: FeatureInputs, cross: CrossNetwork, behind: nn.Module | None, beside: nn.Module | None
    ) -> None:
        """behind: an MLP over the crosses. beside: an MLP over the inputs.

        Both take [B, inputs.width] and end in a hidden layer (their `out_features`).
        """
        super().__init__()
        self.inputs, self.cross, self.behind, self.beside = inputs, cross, behind, beside
        widths = [inputs.width if behind is None else behind.out_features]
        widths += [] if beside is None else [beside.out_features]
        self.last = nn.Linear(sum(widths), 1)  # type: ignore[arg-type]

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        _, inputs = self.inputs(dense, rows)
        crossed = self.cross(inputs)
        parts = [crossed if self.behind is None else self.behind(crossed)]
        if self.beside is not None:
            parts.append(self.beside(inputs))
        logits: torch.Tensor = self.last(torch.cat(parts, dim=1))
        return logits
