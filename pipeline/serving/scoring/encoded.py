"""Hold the dense values and ids that rows were scored with, until somebody asks for them.

The scorer hands over references and copies nothing. `cut` takes the rows of requests out of their
batches with few calls, and `join` sorts them by feature, perhaps in another process.
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


class Cut(NamedTuple):
    """Rows of one batch that follow each other. kept: [n] numbers of the rows that could be read, among all
    rows that were cut out. batch_rows: the number of rows that the layers read together; place: of the first
    row among them. dense: [n, num_dense]. lengths: [num_features, n]. values: the ids of one feature after the other.
    """

    kept: NDArray[np.int64]
    batch_rows: int
    place: int
    dense: NDArray[np.float32]
    lengths: NDArray[np.int64]
    values: NDArray[np.int64]


@dataclass(frozen=True)
class RowFeatures:
    """The encoded rows. kept: [n] numbers of the rows that could be read. dense: [n, num_dense]
    float32. batch: [n, 2] the number of rows that the layers read together, and the place of the row
    among them, because products of another number of rows may round otherwise. values, lengths: for each
    feature its ids of all rows one after the other, and [n] the number of ids of each row.
    """

    kept: NDArray[np.int64]
    dense: NDArray[np.float32]
    batch: NDArray[np.int64]
    values: list[NDArray[np.int64]]
    lengths: list[NDArray[np.int64]]


def cut(spans: Sequence[EncodedSpan]) -> list[Cut]:
    """Return the rows of these parts of batches, in their order."""
    cuts, before = [], 0
    for span in _merged(spans):
        for part in span.parts:
            first, last = np.searchsorted(part.kept, (span.begin, span.end)).tolist()
            if first == last:
                continue
            num_rows = len(part.kept)
            values, offsets = (each.numpy() for each in part.ids())
            lengths = (offsets[1:] - offsets[:-1]).reshape(-1, num_rows)
            if last - first < num_rows:
                lengths = lengths[:, first:last]
                ends = zip(offsets[first:-1:num_rows].tolist(), offsets[last::num_rows].tolist(), strict=True)
                values = np.concatenate([values[:0], *(values[begin:end] for begin, end in ends)])
            dense = part.dense.numpy()[first:last]  # a slice by torch would let go of the interpreter's lock
            cuts.append(Cut(part.kept[first:last] + (before - span.begin), num_rows, first, dense, lengths, values))
        before += span.end - span.begin
    return cuts


def join(cuts: Sequence[Cut], num_features: int) -> RowFeatures:
    """Return cut rows sorted by feature."""
    kept, batch = [np.zeros(0, np.int64)], [np.zeros((0, 2), np.int64)]
    values: list[list[NDArray[np.int64]]] = []  # for each cut: of each feature
    for each in cuts:
        kept.append(each.kept)
        places = np.arange(each.place, each.place + len(each.kept))
        batch.append(np.stack([np.full(len(places), each.batch_rows), places], axis=1))
        values.append(np.split(each.values, each.lengths.sum(axis=1).cumsum()[:-1]) if num_features else [])
    nothing = np.zeros(0, np.int64)
    return RowFeatures(
        np.concatenate(kept),
        np.concatenate([each.dense for each in cuts]) if cuts else np.zeros((0, 0), np.float32),
        np.concatenate(batch),
        [np.concatenate(each) for each in zip(*values, strict=True)] or [nothing] * num_features,
        list(np.concatenate([each.lengths for each in cuts], axis=1)) if cuts else [nothing] * num_features,
    )


def features_of(spans: Sequence[EncodedSpan], num_features: int) -> RowFeatures:
    """Return the features of rows that were scored in one or several batches, in their order."""
    return join(cut(spans), num_features)


def _merged(spans: Sequence[EncodedSpan]) -> list[EncodedSpan]:
    """Join spans that follow each other in one batch."""
    merged: list[EncodedSpan] = []
    for span in spans:
        if merged and merged[-1].parts is span.parts and merged[-1].end == span.begin:
            span = EncodedSpan(span.parts, merged.pop().begin, span.end)
        merged.append(span)
    return merged
