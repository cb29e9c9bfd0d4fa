"""Define layers over a sequence with its target at the end: transformer blocks (BST, SASRec) and
HSTU's pointwise attention.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from pipeline.extras.models.layers.history import ages


class WithTarget(nn.Module):
    """Map target [B, Q], rows [B, L, K] and mask [B, L] to [B, width]: the blocks' output at the
    target's position.

    The target follows the sequence. A linear layer maps target and rows to `width` columns.
    Positions count back from the target, which is 0; the newest id is 1 for any length of the
    sequence. Each block takes (values [B, L + 1, width], ages [B, L + 1], seen [B, L + 1, L + 1]).
    learnt_positions: add a vector for each position, for blocks that do not use ages.
    """

    def __init__(
        self,
        target_width: int,
        row_width: int,
        num_positions: int,
        width: int,
        blocks: list[nn.Module],
        learnt_positions: bool,
    ) -> None:
        super().__init__()
        self.of_target, self.of_row = nn.Linear(target_width, width), nn.Linear(row_width, width)
        positions = torch.empty(num_positions + 1, width)
        self.positions = nn.Parameter(nn.init.normal_(positions, std=0.02)) if learnt_positions else None
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width)

    def forward(self, target: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        values = torch.cat([self.of_row(rows), self.of_target(target).unsqueeze(1)], dim=1)
        age = F.pad(ages(mask), (0, 1)).clamp(min=0)
        present = F.pad(mask, (0, 1), value=True)
        if self.positions is not None:
            values = values + F.embedding(age, self.positions)
        # Each position sees ids that exist and are not newer than the position. Padding sees the
        # target, because a softmax over nothing is undefined.
        is_older = age.unsqueeze(2) <= age.unsqueeze(1)
        seen = present.unsqueeze(1) & (is_older | ~present.unsqueeze(2))
        for block in self.blocks:
            values = block(values, age, seen)
        last: torch.Tensor = self.norm(values[:, -1])
        return last


class TransformerBlock(nn.Module):
    """Apply multi-head attention, then an MLP to each position. Each has a norm before it and a
    residual.

    Source: arXiv 1905.06874 and 1808.09781.
    """

    def __init__(self, width: int, num_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.attention_norm, self.layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: torch.Tensor, age: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(self.attention_norm(values)).unflatten(2, (3, self._num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [B, heads, L, width / heads]
        products = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
        weights = torch.softmax(products.masked_fill(~seen.unsqueeze(1), -1e9), dim=3)
        attended = (weights @ value).transpose(1, 2).flatten(2)
        values = values + self.dropout(self.output(attended))
        hidden = F.leaky_relu(self.first(self.layer_norm(values)))
        return values + self.dropout(self.second(hidden))


class HSTUBlock(nn.Module):
    """Apply pointwise attention with a gate (arXiv 2402.17152, 3.2).

    There is no softmax, so the result depends on how often an event occurs.

    Y = norm(A V) * U with A = silu(Q K^T + bias) / L. The bias depends on the head and on the
    distance of two positions.
    """

    def __init__(self, width: int, num_heads: int, num_positions: int, dropout: float) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.input_norm, self.output_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(nn.init.normal_(torch.empty(num_positions + 1, num_heads), std=0.02))
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: torch.Tensor, age: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        gate, *heads = F.silu(self.inputs(self.input_norm(values))).chunk(4, dim=2)
        query, key, value = (each.unflatten(2, (self._num_heads, -1)).transpose(1, 2) for each in heads)
        # [B, L, L]: how much older the seen position is
        distance = (age.unsqueeze(1) - age.unsqueeze(2)).clamp(min=0)
        bias = F.embedding(distance, self.bias).permute(0, 3, 1, 2)
        weights = F.silu(query @ key.transpose(2, 3) + bias) * seen.unsqueeze(1) / self.bias.shape[0]
        attended = (weights @ value).transpose(1, 2).flatten(2)
        return values + self.output(self.dropout(self.output_norm(attended) * gate))
