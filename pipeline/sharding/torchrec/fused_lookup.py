"""Look up all tables of one CPU rank at once, for any grouping by TorchRec.

TorchRec has a lookup for each pooling and data type. It splits a batch between them and joins their
rows, in modules with profiler ranges. For a small model that takes longer than the lookups. Here
all lookups write into one tensor under one autograd node. The kernels and the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.sharding.torchrec.cpu_tables import Bags, FastLookup


class FusedLookup:
    """Map a batch with the keys `feature_names`, in their order, to [B, all features' D]."""

    def __init__(self, lookups: Sequence[FastLookup], feature_names: list[str]) -> None:
        """The features are those of the first lookup, then of the second, and so on."""
        self.lookups, self.feature_names = list(lookups), feature_names
        self.reserved_columns = 0
        self.dims = [dim for lookup in lookups for dim in lookup.dims]
        counts = [len(lookup.dims) for lookup in lookups]
        self._features = list(pairwise(accumulate(counts, initial=0)))
        self._columns = list(pairwise(accumulate((sum(lookup.dims) for lookup in lookups), initial=0)))
        self._orders: dict[tuple[str, ...], torch.Tensor | None] = {}

    def reserve_columns(self, columns: int) -> None:
        """Reserve columns before the features', which the model writes; follow autocast."""
        self.reserved_columns = columns
        for lookup in self.lookups:
            lookup.reserved_columns, lookup.follows_autocast = columns, True

    def __call__(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Raises RuntimeError as FastLookup.look_up does."""
        values, offsets, weights = features.values(), features.offsets(), features.weights_or_none()
        if len(self.lookups) == 1:
            return self.lookups[0](values, offsets, weights)
        bags = Bags(values, offsets.to(values.dtype), weights)
        if not torch.is_grad_enabled() or (weights is not None and weights.requires_grad):
            pairs = zip(self.lookups, self._parts(bags), strict=True)
            return torch.cat([lookup(*part) for lookup, part in pairs], dim=1)
        for lookup in self.lookups:
            lookup.count_step()
        dtype = self.lookups[0].row_dtype()
        return _Rows.apply(self.lookups[0].weights, *bags, dtype, self)

    def in_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor | None:
        """Return the batch with the keys feature_names, or None if a key is missing."""
        keys = features.keys()
        if keys == self.feature_names:
            return features
        known = tuple(keys)
        if known not in self._orders:
            has_all = set(self.feature_names) <= set(keys)
            order = [keys.index(name) for name in self.feature_names] if has_all else []
            self._orders[known] = torch.tensor(order, dtype=torch.int32) if has_all else None
        permutation = self._orders[known]
        return None if permutation is None else features.permute(permutation.tolist(), permutation)

    def _parts(self, bags: Bags) -> list[Bags]:
        """Return the bags of each lookup, with offsets that begin at 0."""
        stride = (len(bags.offsets) - 1) // len(self.dims)
        parts = []
        for first, last in self._features:
            offsets = bags.offsets[first * stride : last * stride + 1]
            begin, end = int(offsets[0]), int(offsets[-1])
            weights = None if bags.weights is None else bags.weights[begin:end]
            parts.append(Bags(bags.indices[begin:end], offsets - begin, weights))
        return parts

    def look_up(self, bags: Bags, dtype: torch.dtype) -> tuple[torch.Tensor, list[Bags]]:
        """Return pooled rows, and each lookup's bags as FBGEMM corrected them."""
        num_samples = (len(bags.offsets) - 1) // len(self.dims)
        out = torch.empty(num_samples, self.reserved_columns + sum(self.dims), dtype=dtype)
        parts = []
        for number, (lookup, (first, last)) in enumerate(zip(self.lookups, self._features, strict=True)):
            # Offsets of the complete batch. The kernels accept offsets that do not begin at 0.
            part = bags._replace(offsets=bags.offsets[first * num_samples : last * num_samples + 1])
            position = self.reserved_columns + self._columns[number][0]
            is_whole = lookup.fill(out, position, part)
            parts.append(part if is_whole else lookup.fill_fixed(out, position, self._parts(bags)[number]))
        return out[:, self.reserved_columns :], parts

    def update(self, gradients: torch.Tensor, parts: list[Bags]) -> None:
        for lookup, (begin, end), part in zip(self.lookups, self._columns, parts, strict=True):
            lookup.update(gradients[:, begin:end], part)


class _Rows(torch.autograd.Function):
    """The same as in cpu_tables: backward updates the tables."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        factors: torch.Tensor | None,
        dtype: torch.dtype,
        lookup: FusedLookup,
    ) -> torch.Tensor:
        rows, ctx.parts = lookup.look_up(Bags(indices, offsets, factors), dtype)
        ctx.lookup = lookup
        return rows

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[None, ...]:
        ctx.lookup.update(gradients, ctx.parts)
        return None, None, None, None, None, None
