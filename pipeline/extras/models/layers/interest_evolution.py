"""Follow an interest along a sequence by two GRUs (DIEN, arXiv 1809.03672, section 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.extras.models.layers.history import HistoryInputs


class GRU(nn.Module):
    """Map values [B, L, in_features] to states [B, L, width]; the state before the first is 0.

    u = sigmoid(W x + U h + b), r alike, h~ = tanh(W x + r * U h + b), h = (1 - u) * h + u * h~.
    weights [B, L]: multiply u by them, which makes this an AUGRU.
    """

    def __init__(self, in_features: int, width: int) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Linear(in_features, 3 * width), nn.Linear(width, 3 * width, bias=False)

    def forward(self, values: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        inputs, states = self.of_input(values), []
        state = values.new_zeros(values.shape[0], self.of_state.in_features)
        for position in range(values.shape[1]):
            update_x, reset_x, new_x = inputs[:, position].chunk(3, dim=1)
            update_h, reset_h, new_h = self.of_state(state).chunk(3, dim=1)
            update = torch.sigmoid(update_x + update_h)
            if weights is not None:
                update = update * weights[:, position : position + 1]
            new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
            state = state + update * (new - state)
            states.append(state)
        return torch.stack(states, dim=1)


class InterestEvolution(nn.Module):
    """Map target [B, Q], rows [B, L, K] and mask [B, L] to [B, K]: the last state of the AUGRU.

    Its weights are softmax(h W target) over the positions with an id.
    """

    def __init__(self, target_width: int, row_width: int) -> None:
        super().__init__()
        self.extractor, self.evolution = GRU(row_width, row_width), GRU(row_width, row_width)
        self.attention = nn.Linear(target_width, row_width, bias=False)

    def forward(self, target: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.evolve(target, self.extractor(rows), mask)

    def evolve(self, target: torch.Tensor, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        products = torch.bmm(states, self.attention(target).unsqueeze(2)).squeeze(2)
        weights = torch.softmax(products.masked_fill(~mask, -1e9), dim=1) * mask
        return self.evolution(states, weights)[:, -1]  # a position of weight 0 does not change the state


class EvolutionArch(nn.Module):
    """Map the inputs to logits [B, 1]; in training to [B, 2], whose last column is each row's
    auxiliary loss.
    """

    def __init__(self, encoder: InterestEvolution, layers: nn.Module) -> None:
        super().__init__()
        self.encoder, self.layers = encoder, layers

    def forward(
        self, dense: torch.Tensor, others: torch.Tensor, target: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        states = self.encoder.extractor(rows)
        interest = self.encoder.evolve(target, states, mask)
        logits: torch.Tensor = self.layers(torch.cat([dense, others, interest], dim=1))
        return (
            torch.cat([logits, auxiliary_losses(states, rows, mask).unsqueeze(1)], dim=1) if self.training else logits
        )


def auxiliary_losses(states: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return [B]: the mean over a row's positions t of -log s(h_t e_t+1) - log(1 - s(h_t n_t+1)).

    s is the sigmoid, e the next id's row and n the same position of the neighbouring row: rows 0
    and 1, rows 2 and 3, and so on are neighbours, so a step is the same on any number of ranks if a
    stream has an even number of rows in a batch. An equal id is not a negative.
    """
    following, known = rows[:, 1:], mask[:, 1:]
    even = 2 * (len(rows) // 2)
    negative, has_negative = (_swapped(each, even) for each in (following, known))
    has_negative = has_negative & (negative != following).any(dim=2) & known
    before = states[:, :-1]
    losses = F.softplus(-(before * following).sum(dim=2)) * known
    losses = losses + F.softplus((before * negative).sum(dim=2)) * has_negative
    return losses.sum(dim=1) / known.sum(dim=1).clamp(min=1)


def _swapped(values: torch.Tensor, even: int) -> torch.Tensor:
    """Return the neighbour's values for each of the first `even` rows, and 0 for a last row without a neighbour."""
    swapped = values[:even].unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    return torch.cat([swapped, torch.zeros_like(values[even:])])


class EvolutionModel(nn.Module):
    """Compute forward(dense_features [B, num_dense], sparse_features) -> the output of `arch`."""

    def __init__(self, embeddings: nn.Module, inputs: HistoryInputs, arch: EvolutionArch) -> None:
        super().__init__()
        self.embedding_bag_collection, self.inputs, self.arch = embeddings, inputs, arch

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        history = self.inputs(self.embedding_bag_collection(sparse_features))
        output: torch.Tensor = self.arch(dense_features, history.others, history.target, history.rows, history.mask)
        return output
