"""Hold the dense values and ids that rows were scored with, until somebody asks for them.

The scorer hands over references and copies nothing. `features_of` cuts the rows of one request out
of a batch, in the thread of whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class Encoded(NamedTuple):
    """The rows `kept` of a batch, ascending; the other rows are bad. dense: [kept, num_dense] float32.
    ids: return values and offsets of all features, as in a KeyedJaggedTensor.
    """

    kept: NDArray[np.int64]
    dense: torch.Tensor
    ids: Callable[[], tuple[torch.Tensor, torch.Tensor]]


class EncodedSpan(NamedTuple):
    """The part [begin, end) of a batch."""

    parts: Sequence[Encoded]
    begin: int
    end: int


@dataclass(frozen=True)
class RowFeatures:
    """The encoded rows. kept: [n] numbers of the rows that could be read. dense: [n, num_dense]
    float32. batch: [n, 2] the number of rows that the layers read together, and the place of the row
    among them, because products of another number of rows may round otherwise. values, lengths: for each feature its ids of all rows one after the other, and [n] the
    number of ids of each row.
    """

    kept: NDArray[np.int64]
    dense: NDArray[np.float32]
    batch: NDArray[np.int64]
    values: list[NDArray[np.int64]]
    lengths: list[NDArray[np.int64]]


def features_of(spans: Sequence[EncodedSpan], num_features: int) -> RowFeatures:
    """Return the features of rows that were scored in one or several batches, in their order."""
    kept, dense, batch = [np.zeros(0, np.int64)], [], [np.zeros((0, 2), np.int64)]
    values: list[list[NDArray[np.int64]]] = []  # for each part: of each feature
    lengths: list[list[NDArray[np.int64]]] = []
    before = 0
    for span in _merged(spans):
        for part in span.parts:
            first, last = np.searchsorted(part.kept, (span.begin, span.end)).tolist()
            if first == last:
                continue
            kept.append(part.kept[first:last] - span.begin + before)
            dense.append(part.dense[first:last].numpy())
            own, offsets = (each.numpy() for each in part.ids())
            num_rows = len(part.kept)
            places = np.arange(first, last)
            batch.append(np.stack([np.full(len(places), num_rows), places], axis=1))
            if len(own) == num_features * num_rows and own.size and offsets[-1] == len(own) and _are_single(offsets):
                values.append(list(own.reshape(num_features, num_rows)[:, first:last]))
                lengths.append([np.ones(last - first, np.int64)] * num_features)
                continue
            ends = [offsets[each * num_rows + first : each * num_rows + last + 1] for each in range(num_features)]
            values.append([own[each[0] : each[-1]] for each in ends])
            lengths.append([np.diff(each) for each in ends])
        before += span.end - span.begin
    nothing = np.zeros(0, np.int64)
    return RowFeatures(
        np.concatenate(kept),
        np.concatenate(dense) if dense else np.zeros((0, 0), np.float32),
        np.concatenate(batch),
        [np.concatenate(each) for each in zip(*values, strict=True)] or [nothing] * num_features,
        [np.concatenate(each) for each in zip(*lengths, strict=True)] or [nothing] * num_features,
    )


def _are_single(offsets: NDArray[np.int64]) -> bool:
    """Return True if each bag has one id, which is so for most models."""
    return bool((offsets[1:] - offsets[:-1] == 1).all())


def _merged(spans: Sequence[EncodedSpan]) -> list[EncodedSpan]:
    """Join spans that follow each other in one batch."""
    merged: list[EncodedSpan] = []
    for span in spans:
        if merged and merged[-1].parts is span.parts and merged[-1].end == span.begin:
            span = EncodedSpan(span.parts, merged.pop().begin, span.end)
        merged.append(span)
    return merged
