"""Make a batch's labels and sample weights from the label columns of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.data.dataset import Dataset
from pipeline.data.targets import Target

Floats = NDArray[np.float32]


class TargetValues(NamedTuple):
    """labels and weights are [batch] for one target, or [batch, targets]. `present` is [batch], or
    None if weights show which rows are present. `aside` is [batch, columns], None without columns.
    """

    labels: Floats
    weights: Floats
    present: NDArray[np.bool_] | None
    aside: Floats | None = None


class TargetColumns:
    """Computes labels and weights for `targets`, or without targets for the data set's main label.

    for_training: rows of a training split with sampled negatives get weights for training, in which
    the label's offset already corrects the sampling. Otherwise negatives have weight 1 / keep, as
    if all rows were measured. aside: label columns whose values the loss reads.
    """

    def __init__(
        self,
        dataset: Dataset,
        targets: Sequence[Target] | None,
        *,
        split: str,
        for_training: bool,
        aside: Sequence[str] = (),
    ) -> None:
        columns = dataset.label_columns
        self._aside = [columns.index(name) for name in aside]
        self._targets = list(targets) if targets else [Target(dataset.label)]
        self._positions = [columns.index(target.label or target.name) for target in self._targets]
        self._classes = {at: target.value for at, target in enumerate(self._targets) if target.value is not None}
        self._masks = [None if target.mask is None else columns.index(target.mask) for target in self._targets]
        self._weight = columns.index(dataset.weight_column) if dataset.weight_column else None
        sampling = dataset.negative_sampling if split == "train" else {}
        self._sampled = columns.index(sampling["label"]) if sampling else None
        self._negatives_count = [
            1.0 / sampling["keep"] if sampling and not (for_training and target.train_offset) else 1.0
            for target in self._targets
        ]
        self._is_plain = len(columns) == 1 and set(self._negatives_count) == {1.0} and not self._classes

    def __call__(self, values: Floats, present: NDArray[np.bool_]) -> TargetValues:
        """Compute labels and weights.

        `values`: [batch] of one label column, or [batch, columns]. Rows that are not `present`
        [batch] have 0.
        """
        if self._is_plain:
            return TargetValues(values, present.astype(np.float32), None)
        values = values.reshape(len(present), -1)
        labels = np.take(values, self._positions, axis=1)
        for position, value in self._classes.items():
            labels[:, position] = labels[:, position] == value
        weights = np.empty_like(labels)
        weights[:] = present[:, None]
        if self._weight is not None:
            weights *= values[:, self._weight, None]
        for position, (mask, count) in enumerate(zip(self._masks, self._negatives_count, strict=True)):
            if mask is not None:
                weights[:, position] *= values[:, mask] == 1.0
            if count != 1.0:
                weights[values[:, self._sampled] == 0.0, position] *= count
        aside = np.take(values, self._aside, axis=1) if self._aside else None
        if len(self._targets) == 1:
            labels, weights = labels[:, 0], weights[:, 0]
        return TargetValues(np.ascontiguousarray(labels), np.ascontiguousarray(weights), present, aside)
