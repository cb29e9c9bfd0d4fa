"""Cross the columns with each other; each layer raises the degree by one (DCN 1708.05123, DCNv2 2008.13535)."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.models.layers.features import FeatureInputs


class VectorCross(nn.Module):
    """Map first, last [B, width] to first * (last . w) + b + last (1708.05123, equation 3)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(last + self.bias, first, self.weight(last))


class MatrixCross(nn.Module):
    """Map first, last [B, width] to first * (W last + b) + last. W is a full matrix, or U V of rank `rank`."""

    def __init__(self, width: int, rank: int | None = None) -> None:
        super().__init__()
        self.down = None if rank is None else nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank or width, width)

    def forward(self, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        crossed = self.up(last if self.down is None else self.down(last))
        return torch.addcmul(last, first, crossed)


class MixtureCross(nn.Module):
    """Map first, last [B, width] to first * (sum of gated experts + b) + last (DCN-Mix).

    An expert is U tanh(C tanh(V last)); gates are a softmax of a linear map of `last` (arXiv
    2008.13535, 3.2). All experts together are computed by two products. The gate is applied before
    the second product, which gives the same sum.
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
    """Map inputs [B, width] -> [B, width]. Each layer crosses the inputs with the output of the layer before."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        crossed = inputs
        for layer in self.layers:
            crossed = layer(inputs, crossed)
        return crossed


class CrossAndDeep(nn.Module):
    """Map dense [B, num_dense] and rows [B, F, D] to logits [B, 1] by crosses and up to two MLPs."""

    def __init__(
        self, inputs: FeatureInputs, cross: CrossNetwork, behind: nn.Module | None, beside: nn.Module | None
    ) -> None:
        """behind: an MLP over the output of the crosses. beside: an MLP over the inputs. Both have `out_features`."""
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
