"""What each kind of compressed table computes, written down plainly: one id at a time, from the arithmetic of its paper.

Nothing here is from pipeline.embeddings. `weights` are tables and dense parameters by their own names.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Weights = dict[str, torch.Tensor]
RowOf = Callable[[Weights, int], torch.Tensor]  # (weights, id) -> [dim]
WORD = 2**64 - 1


def splitmix(word: int) -> int:
    """Steele, Lea and Flood's finalizer (OOPSLA 2014), on Python's integers."""
    word = (word + 0x9E3779B97F4A7C15) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def hashed(name: str, num_rows: int, seed: int) -> RowOf:
    return lambda weights, id_: weights[f"{name}__hash"][((splitmix(id_ ^ splitmix(seed)) >> 32) * num_rows) >> 32]


def added(*parts: tuple[str, Callable[[int], int]]) -> RowOf:
    """Of (table, id -> its row there)."""
    return lambda weights, id_: torch.stack([weights[name][row(id_)] for name, row in parts]).sum(dim=0)


def multiplied(*parts: tuple[str, Callable[[int], int]]) -> RowOf:
    return lambda weights, id_: torch.stack([weights[name][row(id_)] for name, row in parts]).prod(dim=0)


def concatenated(*parts: tuple[str, Callable[[int], int]]) -> RowOf:
    return lambda weights, id_: torch.cat([weights[name][row(id_)] for name, row in parts])


def path_based(name: str, num_rows: int) -> RowOf:
    def row(weights: Weights, id_: int) -> torch.Tensor:
        bucket, base = id_ // num_rows, weights[f"{name}__remainder"][id_ % num_rows]
        hidden = torch.relu(weights[f"{name}.hidden_weight"][bucket] @ base + weights[f"{name}.hidden_bias"][bucket])
        return weights[f"{name}.output_weight"][bucket] @ hidden + weights[f"{name}.output_bias"][bucket]

    return row


def mixed_dimension(name: str, ends: list[int]) -> RowOf:
    """Blocks of ids that end before `ends`."""

    def row(weights: Weights, id_: int) -> torch.Tensor:
        block = next(index for index, end in enumerate(ends) if id_ < end)
        narrow = weights[f"{name}__block_{block}"][id_ - ([0, *ends][block])]
        projection = weights.get(f"{name}.projections.block_{block}")
        return narrow if projection is None else narrow @ projection

    return row


def tensor_train(name: str, rows: tuple[int, int, int]) -> RowOf:
    """Row of the full table that the cores multiply out to, as one sum over both ranks."""

    def row(weights: Weights, id_: int) -> torch.Tensor:
        first, second, third = (weights[f"{name}.{core}"] for core in ("first", "second", "third"))
        rank = first.shape[2]
        i, j, k = id_ // (rows[1] * rows[2]), id_ // rows[2] % rows[1], id_ % rows[2]
        middle = second[j].view(rank, -1, rank)
        return torch.einsum("ar,rbs,sc->abc", first[i], middle, third[k]).reshape(-1)

    return row


def pool(row_of: RowOf, weights: Weights, bags: list[list[int]], pooling: str, dim: int) -> torch.Tensor:
    """[batch, dim]; each id's row is composed, then the bag is summed or averaged. An empty bag is 0."""
    pooled = []
    for bag in bags:
        total = torch.zeros(dim) + sum(row_of(weights, id_) for id_ in bag)
        pooled.append(total / len(bag) if pooling == "mean" and bag else total)
    return torch.stack(pooled)
