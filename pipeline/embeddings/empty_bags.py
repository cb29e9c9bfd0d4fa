"""Turn features whose bags are often empty into ones without them, so that no bytes are sent for nothing.

Without ids a bag's pooled row is zero, yet TorchRec sends it, and its gradient, like any other. A KeyedJaggedTensor may
have fewer bags of a feature than there are samples, and say which of them is each sample's (TorchRec's "variable batch per
feature"): all that are empty become the first one.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

MULTIPLE = 8  # int8 on the wire goes by 32 numbers, and a shard of a row has 4 at least


def leave_out_empty_bags(features: KeyedJaggedTensor, names: Collection[str]) -> KeyedJaggedTensor:
    """The same ids; of each feature in `names` the bags that have any, after one that has none, in multiples of MULTIPLE.

    lengths become flat [sum of all features' bags]; inverse_indices [keys, samples] say which bag is a sample's.
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
