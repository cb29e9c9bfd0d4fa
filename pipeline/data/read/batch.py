"""Define the Batch that a model reads: dense features, a KeyedJaggedTensor and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

# Every rank must use the same dtype: ids with another dtype arrive as garbage without an error.
ID_DTYPE = torch.int64
LENGTH_DTYPE = torch.int32
# (ids of a training batch, epoch, step) -> the ids with additional rows (training.readers.extra_rows_of)
ExtraRows = Callable[[KeyedJaggedTensor, int, int], KeyedJaggedTensor]


@dataclass
class Batch(Pipelineable):
    """The samples of one step on one rank.

    dense_features: [batch, num_dense] float32
    sparse_features: keys in the data set's order, int64 values, int32 lengths [num_features * batch];
        float32 weights of all values if a feature of the data is weighted. A training batch may have
        more rows here than elsewhere (ExtraRows)
    labels: [batch] float32; [batch, targets] for a job that learns several (data.targets)
    sample_weights: same shape as labels; 0 for rows that do not count: the padding of an evaluation
        batch, quarantined rows (dense 0, label 0, no ids), and rows that a label's mask excludes
    present: [batch] bool, rows that are neither padding nor quarantined; None: sample weight above 0
    groups: [batch] int64, of data with data.group_column in an evaluation, and in training if the loss or the
        order of rows needs it; 0 for a missing group. No model reads it
    aside: [batch, columns] float32, columns that the loss reads (config.training.LossConfig.columns)
    """

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor
    sample_weights: torch.Tensor
    groups: torch.Tensor | None = None
    present: torch.Tensor | None = None
    aside: torch.Tensor | None = None

    @property
    def is_present(self) -> torch.Tensor:
        """Return [batch] bool: True for rows that are neither padding nor quarantined."""
        return self.sample_weights > 0 if self.present is None else self.present

    @property
    def _optional(self) -> tuple[torch.Tensor | None, ...]:
        return self.groups, self.present, self.aside

    @property
    def batch_size(self) -> int:
        """Return the number of rows on this rank, including padding."""
        return self.labels.shape[0]

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.dense_features.to(device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.sample_weights.to(device, non_blocking=non_blocking),
            *(None if each is None else each.to(device, non_blocking=non_blocking) for each in self._optional),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Call record_stream on all tensors that to() moves. A KeyedJaggedTensor's strides stay on the host."""
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        inverse = self.sparse_features.inverse_indices_or_none()  # TorchRec does not record these
        if inverse is not None:
            inverse[1].record_stream(stream)
        self.labels.record_stream(stream)
        self.sample_weights.record_stream(stream)
        for each in self._optional:
            if each is not None:
                each.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(
            self.dense_features.pin_memory(),
            self.sparse_features.pin_memory(),
            self.labels.pin_memory(),
            self.sample_weights.pin_memory(),
            *(None if each is None else each.pin_memory() for each in self._optional),
        )


def keyed_jagged_tensor(
    keys: list[str],
    values: torch.Tensor,
    lengths: torch.Tensor,
    batch_size: int,
    length_per_key: list[int],
    weights: torch.Tensor | None = None,
) -> KeyedJaggedTensor:
    """Return a KeyedJaggedTensor that stores its sizes per key on the host, so they need not be
    read from the device.

    values, weights: [sum(length_per_key)], one feature after the other; lengths: [len(keys) *
    batch_size].
    """
    return KeyedJaggedTensor(
        keys=keys,
        values=values.to(ID_DTYPE),
        weights=weights,
        lengths=lengths.to(LENGTH_DTYPE),
        stride=batch_size,
        length_per_key=length_per_key,
        offset_per_key=[0, *accumulate(length_per_key)],
    )


def with_features(features: KeyedJaggedTensor, replaced: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
    """Return the ids in which the features of `replaced` are replaced."""
    parts = [replaced.get(name, feature) for name, feature in features.to_dict().items()]
    weights = [own for part in parts if (own := part.weights_or_none()) is not None]
    return keyed_jagged_tensor(
        list(features.keys()),
        torch.cat([part.values() for part in parts]),
        torch.cat([part.lengths() for part in parts]),
        features.stride(),
        [len(part.values()) for part in parts],
        torch.cat(weights) if weights else None,
    )


def first_ids(feature: JaggedTensor) -> NDArray[np.int64]:
    """Return [rows]: the first id of each bag, or 0 for an empty bag."""
    lengths, values = feature.lengths().cpu().numpy(), feature.values().cpu().numpy()
    starts = np.cumsum(lengths) - lengths
    ids: NDArray[np.int64] = np.where(lengths > 0, np.append(values, 0)[np.minimum(starts, len(values))], 0)
    return ids
