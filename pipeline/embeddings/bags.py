"""Work on the bags of a batch: hash, select and separate ids, leave empty bags out, pool rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from pipeline.data.read.streams import mix
from pipeline.embeddings.compression.kind import Bags
from pipeline.runtime.errors import ConfigError

# int8 communication needs multiples of 32 numbers, and a shard of a row has at least 4
MULTIPLE = 8


def hashed_to(num_rows: int, seed: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a seeded hash below num_rows of each id."""
    # The seed is mixed too; otherwise seeds 0 and 1 would swap neighbouring ids.
    words = mix(ids.view(np.uint64) ^ mix(np.array([seed], np.uint64)))
    # Scaling the upper half changes the probability of a row by at most 2**-32.
    return ((words >> np.uint64(32)) * np.uint64(num_rows) >> np.uint64(32)).view(np.int64)


def by_slot(bags: Bags, slots: list[int], what: str) -> Iterator[tuple[int, Bags]]:
    """Yield the first ids of all bags, the second ids, and so on. A bag that has ended is empty.

    Raises:
        ConfigError: a bag has more ids than there are slots.
    """
    if (longest := int(bags.lengths.max(initial=0))) > len(slots):
        raise ConfigError(
            f"{what} has a list of {longest} ids, and compression.max_ids_per_bag={len(slots)}; raise it, or use "
            "operation=add or concatenate, which pool first"
        )
    begins = np.cumsum(bags.lengths, dtype=np.int64) - bags.lengths
    for slot in slots:
        present = bags.lengths > slot
        positions = begins[present] + slot
        yield slot, Bags(bags.ids[positions], present.astype(np.int32), _at(bags.weights, positions))


def in_range(bags: Bags, first: int, end: int) -> Bags:
    """Keep the ids first .. end - 1 of each bag, counted from `first`."""
    inside = (bags.ids >= first) & (bags.ids < end)
    if len(bags.ids) == len(bags.lengths) and (bags.lengths == 1).all():
        return Bags(bags.ids[inside] - first, inside.astype(np.int32), _at(bags.weights, inside))
    samples = np.repeat(np.arange(len(bags.lengths)), bags.lengths)
    lengths = np.bincount(samples[inside], minlength=len(bags.lengths))
    return Bags(bags.ids[inside] - first, lengths.astype(np.int32), _at(bags.weights, inside))


def _at(weights: NDArray[np.float32] | None, chosen: NDArray[Any]) -> NDArray[np.float32] | None:
    return None if weights is None else weights[chosen]


def leave_out_empty_bags(features: KeyedJaggedTensor, names: Collection[str]) -> KeyedJaggedTensor:
    """Keep all ids. For each feature in `names` keep only bags with ids, after one empty bag, in
    multiples of MULTIPLE.

    A bag without ids has a pooled row of zeros, but TorchRec sends it and its gradient like any other. A
    KeyedJaggedTensor may have fewer bags of a feature than samples, and map samples to bags (TorchRec's "variable
    batch per feature"): all empty bags map to the first one. `lengths` become flat [sum of all features' bags];
    `inverse_indices` [keys, samples] hold the bag of each sample.
    """
    keys, num_samples = features.keys(), features.stride()
    lengths = features.lengths().view(len(keys), num_samples)
    every = torch.arange(num_samples, device=lengths.device)
    parts, bags = [], []
    for key, own in zip(keys, lengths, strict=True):
        if key in names:
            filled = own > 0
            kept = own[filled]
            parts.append(torch.cat([own.new_zeros(1), kept, own.new_zeros(-(len(kept) + 1) % MULTIPLE)]))
            bags.append(filled.cumsum(0) * filled)
        else:
            parts.append(own)
            bags.append(every)
    return KeyedJaggedTensor(
        keys,
        features.values(),
        features.weights_or_none(),
        lengths=torch.cat(parts),
        stride_per_key_per_rank=[[len(part)] for part in parts],
        length_per_key=features.length_per_key(),
        offset_per_key=features.offset_per_key(),
        inverse_indices=(keys, torch.stack(bags)),
    )


def sum_of_lengths(features: KeyedJaggedTensor, names: Sequence[str]) -> torch.Tensor:
    """Return [batch]: the number of ids of the features of every sample, also if empty bags are
    left out."""
    keys = features.keys()
    if not features.variable_stride_per_key():
        lengths = features.lengths().view(-1, features.stride())
        return lengths[[keys.index(name) for name in names]].sum(dim=0)
    by_key = dict(zip(keys, features.lengths().split(features.stride_per_key()), strict=True))
    bags = dict(zip(*features.inverse_indices(), strict=True))
    return torch.stack([by_key[name][bags[name]] for name in names]).sum(dim=0)


def pool_rows(rows: torch.Tensor, bags: JaggedTensor) -> torch.Tensor:
    """Pool rows [ids, D] of the ids in `bags`, one bag after the other, to sums [batch, D],
    weighted if ids have weights."""
    lengths, weights = bags.lengths(), bags.weights_or_none()
    if weights is not None:
        rows = rows * weights.unsqueeze(1)
    samples = torch.repeat_interleave(torch.arange(len(lengths), device=rows.device), lengths, output_size=len(rows))
    return rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, samples, rows)
