"""Encode and look up the features of a user once for all its items.

The result has the same bits as full rows. An id is looked up and pooled in the same way in any
batch, and the layers read the same numbers in the same batch. Repeating the user's pooled rows is a
copy of bytes. Encoding and looking up the same user again for each item would cost much more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from pipeline.data.raw.blocks import QuarantinedRow
from pipeline.runtime.errors import ServingError, did_you_mean
from pipeline.serving.scoring.lookup import with_empty_bags
from pipeline.serving.scoring.raw_rows import EncodedRows, RowEncoder
from pipeline.serving.scoring.scorer import MAX_DIVISIONS, ColumnLists, UserItems, as_table, names_of, schema_of


@dataclass(frozen=True)
class LayerInputs:
    """What the layers read: dense [n, num_dense] and pooled [n, width] float32, of the rows `kept`
    [n]. counts: as count_row_zero returns them. ids: return values and offsets of all features, as in
    a KeyedJaggedTensor; only a calibration reads them.
    """

    dense: torch.Tensor
    pooled: torch.Tensor
    kept: NDArray[np.int64]
    bad_rows: list[QuarantinedRow]
    counts: NDArray[np.int64]
    ids: Callable[[], tuple[torch.Tensor, torch.Tensor]]


def join_inputs(parts: Sequence[tuple[int, LayerInputs]]) -> LayerInputs:
    """Join inputs. Each has the number of rows, bad rows included, that it was made from."""
    begins = np.cumsum([0, *(num_rows for num_rows, _ in parts)]).tolist()
    each = [inputs for _, inputs in parts]
    bad = [
        QuarantinedRow(begin + row.line, row.reason, row.text)
        for begin, inputs in zip(begins, each, strict=False)
        for row in inputs.bad_rows
    ]
    return LayerInputs(
        torch.cat([inputs.dense for inputs in each]),
        torch.cat([inputs.pooled for inputs in each]),
        np.concatenate([begin + inputs.kept for begin, inputs in zip(begins, each, strict=False)]),
        bad,
        np.sum([inputs.counts for inputs in each], axis=0),
        lambda: _joined([(*inputs.ids(), len(inputs.kept)) for inputs in each]),
    )


def _joined(parts: Sequence[tuple[torch.Tensor, torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join (values, offsets, number of rows) of several batches to values and offsets of one batch."""
    split = [_by_feature(*part) for part in parts if part[2]]
    bags = [[torch.cat(each) for each in zip(*of_feature, strict=True)] for of_feature in zip(*split, strict=True)]
    return _as_ids([(values, lengths) for values, lengths in bags])


def _by_feature(values: torch.Tensor, offsets: torch.Tensor, num_rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (values, lengths) of each feature."""
    ends = offsets[::num_rows].tolist()
    lengths = offsets.diff().view(-1, num_rows)
    return [(values[begin:end], own) for (begin, end), own in zip(pairwise(ends), lengths, strict=True)]


def _as_ids(bags: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and offsets of all features."""
    nothing = torch.zeros(1, dtype=torch.int64)
    lengths = torch.cat([nothing, *(lengths for _, lengths in bags)])
    return torch.cat([nothing[:0], *(values for values, _ in bags)]), lengths.cumsum(0)


class UserFeatures:
    """Makes the inputs of the layers for UserItems. Only one thread may call it.

    dims: feature -> its pooled columns, in the order of the layers' input. linked: groups of
    features that must be looked up together. computed: features whose rows are products, which may
    round otherwise in another batch; they are looked up for each item. lookup_of: names of features
    -> their lookup; None: all features are looked up, with empty bags for the other features.
    """

    def __init__(
        self,
        encoder: RowEncoder,
        dims: Mapping[str, int],
        linked: Iterable[set[str]],
        computed: Collection[str],
        lookup_of: Callable[[Sequence[str]], Callable[..., torch.Tensor] | None],
    ) -> None:
        self._encoder, self._dims, self._computed = encoder, dict(dims), set(computed)
        self._lookup_of = lookup_of
        sequences = [each for each in encoder.schema.features if each.sequence is not None]
        beside = [{each.name, each.sequence.beside} for each in sequences if each.sequence and each.sequence.beside]
        self._linked = [*linked, *beside]
        schema = encoder.schema
        self._sources = {each.name: set(schema.of_features([each.name], ()).columns) for each in schema.features}
        self._dense_sources = {name: set(schema.of_features((), [name]).columns) for name in schema.dense}
        self._divide = lru_cache(MAX_DIVISIONS)(self._divide_by)

    def inputs(
        self, rows: UserItems, pooled: Callable[..., torch.Tensor], count: Callable[..., NDArray[np.int64]]
    ) -> LayerInputs:
        """pooled: ids of all features in the form of a KeyedJaggedTensor -> their rows. count: count_row_zero."""
        self._check_names(rows)
        # not other names, which would fill the cache
        division = self._divide(frozenset(self._encoder.raw_names).intersection(names_of(rows.items)))
        user, items = division.encode(rows)
        if user.bad_rows:
            bad = [QuarantinedRow(line, user.bad_rows[0].reason, "") for line in range(1, rows.num_rows + 1)]
            return self.nothing(bad)
        num_rows = len(items.kept)
        if not num_rows:
            return self.nothing(items.bad_rows)
        dense = torch.empty(num_rows, len(self._encoder.schema.dense))
        dense[:, division.user_dense], dense[:, division.item_dense] = user.dense, items.dense
        rows_of_user, counts_of_user, ids_of_user = self._look_up(user, 1, division.user_features, pooled, count)
        result, counts, ids = self._look_up(items, num_rows, division.item_features, pooled, count, division)
        for span in division.user_spans:
            result[:, span] = rows_of_user[:, span]
        counts = num_rows * counts_of_user + counts

        def all_ids() -> tuple[torch.Tensor, torch.Tensor]:
            pairs = zip(_by_feature(*ids_of_user, 1), _by_feature(*ids, num_rows), strict=True)
            # A feature is of the user or of the items, so one of the two has no ids.
            return _as_ids(
                [
                    (torch.cat([of_item, own.repeat(num_rows)]), lengths + count)
                    for (own, count), (of_item, lengths) in pairs
                ]
            )

        return LayerInputs(dense, result, items.kept, items.bad_rows, counts, all_ids)

    def nothing(self, bad_rows: list[QuarantinedRow]) -> LayerInputs:
        """Return the inputs of no rows."""
        shapes = (0, len(self._encoder.schema.dense)), (0, sum(self._dims.values()))
        counts = np.zeros((2, len(self._dims)), np.int64)
        return LayerInputs(
            torch.empty(shapes[0]), torch.empty(shapes[1]), counts[0, :0], bad_rows, counts, lambda: _as_ids([])
        )

    def _look_up(
        self,
        encoded: EncodedRows,
        num_rows: int,
        features: list[str],
        pooled: Callable[..., torch.Tensor],
        count: Callable[..., NDArray[np.int64]],
        division: Division | None = None,
    ) -> tuple[torch.Tensor, NDArray[np.int64], tuple[torch.Tensor, torch.Tensor]]:
        """Return the pooled rows of `features` in the columns of all features, the counts, and the
        ids with empty bags of all other features.

        division: `features` are its items' features.
        """
        width, keys = sum(self._dims.values()), list(self._dims)
        if not features:
            ids = torch.zeros(0, dtype=torch.int64), torch.zeros(len(keys) * num_rows + 1, dtype=torch.int64)
            return torch.empty(num_rows, width), np.zeros((2, len(keys)), np.int64), ids
        own = encoded.values, encoded.offsets, self._weights_of(encoded)
        values, offsets, weights = with_empty_bags(*own, num_rows, features, keys)
        counts = count(values.numpy(), offsets.numpy(), num_rows)
        if division is None or division.lookup is None:
            return pooled(values, offsets, weights), counts, (values, offsets)
        result, looked_up, begin = torch.empty(num_rows, width), division.lookup(*own), 0
        for span in division.item_spans:
            end = begin + span.stop - span.start
            result[:, span] = looked_up[:, begin:end]
            begin = end
        return result, counts, (values, offsets)

    def _weights_of(self, encoded: EncodedRows) -> torch.Tensor | None:
        """Return weights if any feature of the artifact has weights."""
        if encoded.weights is None and any(feature.weighted for feature in self._encoder.schema.features):
            return torch.ones(len(encoded.values))
        return encoded.weights

    def _check_names(self, rows: UserItems) -> None:
        given = {*names_of(rows.user), *names_of(rows.items)}
        if missing := [name for name in self._encoder.raw_names if name not in given]:
            listed = ", ".join(f"{name!r}{did_you_mean(name, sorted(given))}" for name in missing[:5])
            raise ServingError(
                f"user and items lack {len(missing)} of {len(self._encoder.raw_names)} columns: {listed}"
            )

    def _divide_by(self, item_columns: frozenset[str]) -> Division:
        of_items = {name for name, columns in self._sources.items() if columns & item_columns} | self._computed
        before = -1
        while before != len(of_items):
            before = len(of_items)
            for group in self._linked:
                if group & of_items:
                    of_items |= group
        dense = {name for name, columns in self._dense_sources.items() if columns & item_columns}
        division = Division(self._encoder, self._dims, of_items, dense)
        if division.item_features and division.user_features:
            division.lookup = self._lookup_of(division.item_features)
        return division


class Division:
    """One division of the features into features of the user and features of the items."""

    def __init__(
        self, encoder: RowEncoder, dims: Mapping[str, int], of_items: Collection[str], dense_of_items: Collection[str]
    ) -> None:
        schema = encoder.schema
        self.item_features = [each.name for each in schema.features if each.name in of_items]
        self.user_features = [each.name for each in schema.features if each.name not in of_items]
        self.item_dense = [number for number, name in enumerate(schema.dense) if name in dense_of_items]
        self.user_dense = [number for number, name in enumerate(schema.dense) if name not in dense_of_items]
        self._user, self._items = (
            encoder.part(features, [schema.dense[number] for number in dense])
            for features, dense in ((self.user_features, self.user_dense), (self.item_features, self.item_dense))
        )
        self.user_spans, self.item_spans = _spans(dims, self.user_features), _spans(dims, self.item_features)
        self.lookup: Callable[..., torch.Tensor] | None = None  # of the items' features

    def encode(self, rows: UserItems) -> tuple[EncodedRows, EncodedRows]:
        return _encode(self._user, rows, 1), _encode(self._items, rows, rows.num_rows)


def _encode(encoder: RowEncoder, rows: UserItems, num_rows: int) -> EncodedRows:
    """Encode the columns that `encoder` reads. A column of the user is repeated for all rows."""
    names = encoder.raw_names
    if not names:
        nothing = torch.zeros(0, dtype=torch.int64)
        return EncodedRows(
            torch.empty(num_rows, 0), nothing, torch.zeros(1, dtype=torch.int64), np.arange(num_rows), []
        )
    if isinstance(rows.user, ColumnLists) and isinstance(rows.items, ColumnLists):
        columns = {
            name: column
            for part in (rows.user, rows.items)
            for name, column in zip(part.schema.names, part.columns, strict=True)
        }
        repeated = [list(columns[name]) * (num_rows // len(columns[name])) for name in names]
        return encoder.encode(ColumnLists(schema_of(encoder.layout.columns), repeated, num_rows))
    user, items = as_table(rows.user), as_table(rows.items)
    user = user.select([name for name in names if name not in items.column_names])
    if num_rows > 1 and user.num_columns:
        user = user.take(pa.array(np.zeros(num_rows, np.int64)))
    chosen = [items[name] if name in items.column_names else user[name] for name in names]
    return encoder.encode(pa.table(chosen, names=names))


def _spans(dims: Mapping[str, int], features: Collection[str]) -> list[slice]:
    """Return the columns of the features, with as few slices as possible."""
    spans: list[slice] = []
    end = 0
    for name, dim in dims.items():
        begin, end = end, end + dim
        if name in features:
            if spans and spans[-1].stop == begin:
                begin = spans.pop().start
            spans.append(slice(begin, end))
    return spans
