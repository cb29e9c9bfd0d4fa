"""Find the rows of a decoded row group that must not be trained on, each with a reason.

Columns are checked by their minimum and maximum. Single rows are checked only if a column is wrong.
A wrong value stays unchanged, and a missing value becomes 0, because the caller drops the row or
refuses the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.data.dataset import GROUP_COLUMN, Dataset, Label, SparseFeature, weights_column
from pipeline.devices.cpu.kernel_pool import kernels

MAX_VALUE_CHARACTERS = 80


@dataclass(frozen=True)
class Lists:
    """The lists of one feature.

    Row i has ids[offsets[i]:offsets[i + 1]]. A weighted feature has one weight for each id.
    """

    ids: NDArray[np.integer]
    offsets: NDArray[np.int64]
    weights: NDArray[np.float32] | None = None

    def take(self, rows: NDArray[np.integer], present: NDArray[np.bool_] | None = None) -> Lists:
        """Return the lists of `rows`, one after the other.

        Rows that are not `present` get empty lists.
        """
        chosen = self.choose(rows, present)
        offsets = np.concatenate(([0], np.cumsum(chosen.lengths, dtype=np.int64)))
        ids = np.empty(offsets[-1], self.ids.dtype)
        chosen.copy_ids(ids)
        weights = None if self.weights is None else np.empty(offsets[-1], np.float32)
        if weights is not None:
            chosen.copy_weights(weights)
        return Lists(ids, offsets, weights)

    def choose(self, rows: NDArray[np.integer], present: NDArray[np.bool_] | None = None) -> ListRows:
        """Return the lists of `rows` without copying them. Rows that are not `present` get empty lists."""
        if present is None and (compiled := kernels("pipeline.devices.cpu.kernels.lists")) is not None:
            starts, lengths = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
            return ListRows(self, starts, lengths, compiled.find_lists(self.offsets, rows, starts, lengths))
        starts = np.take(self.offsets, rows)
        lengths = np.take(self.offsets[1:], rows)
        lengths -= starts
        if present is not None:
            lengths *= present
        return ListRows(self, starts, lengths, int(lengths.sum()))


class ListRows(NamedTuple):
    """Rows of `lists`, to be copied when their place in a batch is known. starts, lengths: [rows];
    num_ids: the sum of lengths."""

    lists: Lists
    starts: NDArray[np.int64]
    lengths: NDArray[np.integer]
    num_ids: int

    def copy_ids(self, into: NDArray[np.integer]) -> None:
        """Write the ids to `into` [sum of lengths], one list after the other."""
        self._copy(self.lists.ids, into)

    def copy_weights(self, into: NDArray[np.float32]) -> None:
        assert self.lists.weights is not None
        self._copy(self.lists.weights, into)

    def _copy(self, source: NDArray[Any], into: NDArray[Any]) -> None:
        if (compiled := kernels("pipeline.devices.cpu.kernels.lists")) is not None:
            compiled.copy_lists(read_only(source), self.starts, self.lengths, into)
            return
        # The index of the result's id k is the start of its list plus its position in the list.
        begins = np.cumsum(self.lengths) - self.lengths
        into[:] = source[np.arange(len(into)) + np.repeat(self.starts - begins, self.lengths)]


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view that cannot be written, as Arrow's arrays cannot: a kernel is compiled once for both."""
    view = array.view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class Columns:
    """The columns of a row group, with rows in file order.

    Features keep the data set's order within `one_hot` and `lists`. The versions that rows see of
    side tables follow the ids of `one_hot`.
    """

    dense: NDArray[np.float32]  # [num_dense, rows]
    one_hot: NDArray[np.signedinteger]  # [num_one_hot + side tables, rows]
    lists: list[Lists]
    labels: NDArray[np.float32]  # [rows], or [rows, label columns] if there are several
    groups: NDArray[np.int64] | None = None  # [rows], if they were read


def num_bytes(columns: Columns) -> int:
    """Return the size in memory."""
    lists = [part for each in columns.lists for part in (each.ids, each.offsets, each.weights)]
    arrays = [columns.dense, columns.one_hot, columns.labels, columns.groups, *lists]
    return sum(array.nbytes for array in arrays if array is not None)


class Faults:
    """Collects bad rows as row -> reason. If a row has several reasons, the first one is kept."""

    def __init__(self, table: pa.Table) -> None:
        self.reasons: dict[int, str] = {}
        self._table = table

    def note(self, rows: NDArray[np.integer], column: str, wanted: str) -> None:
        values = self._table.column(column)
        for row in rows.tolist():
            if row not in self.reasons:
                value = values[row].as_py()
                shown = "missing" if value is None else f"{repr(value)[:MAX_VALUE_CHARACTERS]}, not {wanted}"
                self.reasons[row] = f"{column!r} is {shown}"


def check_columns(table: pa.Table, dataset: Dataset) -> tuple[Columns, dict[int, str]]:
    """Return the columns of a row group, and row -> reason for bad rows.

    It makes few calls on full matrices. Each numpy call releases the GIL, and acquiring it again
    during training costs more than the work on one column.
    """
    faults = Faults(table)
    labels = _matrix(table, dataset.label_columns, pa.float32(), faults)
    for label, values in zip(dataset.all_labels, labels, strict=False):
        _check_label(label, values, faults)
    if dataset.weight_column is not None:
        sound = (labels[-1] >= 0) & np.isfinite(labels[-1])
        if not sound.all():
            faults.note(
                np.flatnonzero(~sound), dataset.weight_column, "a finite number of 0 at least, the row's weight"
            )
    labels = np.ascontiguousarray(labels.T) if label_shape(dataset) else labels[0]
    dense = _matrix(table, dataset.dense_features, pa.float32(), faults)
    _check_finite(dense, dataset.dense_features, faults)
    limits = {feature.name: feature.cardinality for feature in dataset.sparse_features if not feature.multi_hot}
    limits |= {side.index: side.num_versions for side in dataset.side_tables}
    id_type = pa.int32() if all(limit <= 2**31 for limit in limits.values()) else pa.int64()
    one_hot = _matrix(table, list(limits), id_type, faults)
    _check_ids(one_hot, limits, faults)
    bags = [feature for feature in dataset.sparse_features if feature.multi_hot]
    lists = [_weighted(_lists(table, feature, faults), table, feature, faults) for feature in bags]
    _check_sequences(bags, lists, faults)
    has_groups = GROUP_COLUMN in table.schema.names
    groups = _matrix(table, [GROUP_COLUMN], pa.int64(), faults)[0] if has_groups else None
    return Columns(dense, one_hot, lists, labels, groups), faults.reasons


def label_shape(dataset: Dataset) -> tuple[int, ...]:
    """Return the shape of the label columns of one row: () for one number, or (count,)."""
    count = len(dataset.label_columns)
    return () if count == 1 else (count,)


def _check_label(label: Label, values: NDArray[np.float32], faults: Faults) -> None:
    """Check `values` [rows] of a label."""
    if label.kind == "binary":
        known, wanted = (values == 0) | (values == 1), "0 or 1"
    elif label.kind == "regression":
        known, wanted = np.isfinite(values), "a finite 32-bit number"
    else:
        last = (label.num_buckets or 0) - 1
        known = (values >= 0) & (values <= last) & (np.floor(values) == values)
        wanted = f"a whole number from 0 to {last}"
    if not known.all():
        faults.note(np.flatnonzero(~known), label.name, wanted)


def _check_finite(dense: NDArray[np.float32], names: list[str], faults: Faults) -> None:
    """Find NaN and infinite values. They would make all dense weights NaN within one step."""
    finite = np.isfinite(dense)
    if not finite.all():
        for i in np.flatnonzero(~finite.all(axis=1)):
            faults.note(np.flatnonzero(~finite[i]), names[i], "a finite 32-bit number")


def _check_ids(ids: NDArray[np.signedinteger], limits: dict[str, int], faults: Faults) -> None:
    """Find ids outside [0, limit of the column). TorchRec would train row 0 instead of reporting an error."""
    if not ids.size:
        return
    names, first_outside = list(limits), list(limits.values())
    outside = (ids.min(axis=1) < 0) | (ids.max(axis=1) >= np.array(first_outside))
    for i in np.flatnonzero(outside):
        wrong = (ids[i] < 0) | (ids[i] >= first_outside[i])
        faults.note(np.flatnonzero(wrong), names[i], f"an id within [0, {first_outside[i]})")


def _check_sequences(features: list[SparseFeature], lists: list[Lists], faults: Faults) -> None:
    """Find lists with wrong lengths.

    A list may not be longer than the model's positions, and must be as long as the sequence that it
    describes.
    """
    lengths = {feature.name: np.diff(each.offsets) for feature, each in zip(features, lists, strict=True)}
    for feature in features:
        if (sequence := feature.sequence) is None:
            continue
        own = lengths[feature.name]
        if own.max(initial=0) > sequence.max_length:
            wanted = f"a list of {sequence.max_length} ids at most"
            faults.note(np.flatnonzero(own > sequence.max_length), feature.name, wanted)
        if sequence.beside is not None and (uneven := own != lengths[sequence.beside]).any():
            faults.note(np.flatnonzero(uneven), feature.name, f"a list as long as {sequence.beside!r}")


def _matrix(table: pa.Table, names: list[str], type_: pa.DataType, faults: Faults) -> NDArray:
    """Return [names, rows]. An id too large for `type_` makes the type wider, so that _check_ids finds it."""
    if not names:
        return np.empty((0, table.num_rows), type_.to_pandas_dtype())
    columns = [_values(table.column(name), name, faults) for name in names]
    if pa.types.is_integer(type_) and any(column.type != type_ for column in columns):
        type_ = pa.int64()
    columns = [column if column.type == type_ else column.cast(type_, safe=False) for column in columns]
    return pa.concat_arrays(columns).to_numpy(zero_copy_only=True).reshape(len(names), -1)


def _values(column: pa.ChunkedArray, name: str, faults: Faults) -> pa.Array:
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if array.null_count:
        faults.note(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)), name, "a value")
        array = array.fill_null(0)
    return array


def _weighted(lists: Lists, table: pa.Table, feature: SparseFeature, faults: Faults) -> Lists:
    """Return the lists with weights if the feature is weighted. Bad rows get weights 0."""
    if not feature.weighted:
        return lists
    name, lengths = weights_column(feature.name), np.diff(lists.offsets)
    array = table.column(name).combine_chunks()
    counts = np.asarray(pc.fill_null(pc.list_value_length(array), -1)).astype(np.int64)
    uneven = counts != lengths
    numbers = np.asarray(array.flatten().cast(pa.float32()).fill_null(np.nan))
    weights = np.zeros(len(lists.ids), np.float32)
    if not uneven.any():
        weights[lists.offsets[0] : lists.offsets[-1]] = numbers
    else:
        faults.note(np.flatnonzero(uneven), name, f"a list as long as {feature.name!r}")
        own, kept = np.repeat(~uneven, np.maximum(counts, 0)), np.repeat(~uneven, lengths)
        weights[lists.offsets[0] : lists.offsets[-1]][kept] = numbers[own]
    finite = np.isfinite(weights)
    if not finite.all():
        rows = np.searchsorted(lists.offsets, np.flatnonzero(~finite), side="right") - 1
        faults.note(np.unique(rows), name, "a list of finite numbers")
    return Lists(lists.ids, lists.offsets, weights)


def _lists(table: pa.Table, feature: SparseFeature, faults: Faults) -> Lists:
    column = table.column(feature.name)
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    wanted = f"a list of ids within [0, {feature.cardinality})"
    if array.null_count:
        faults.note(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)), feature.name, wanted)
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.values  # all values, although the offsets may start after the first one
    wrong = np.zeros(0, np.bool_)
    if values.null_count:
        wrong = values.is_null().to_numpy(zero_copy_only=False)
        values = values.fill_null(0)
    ids = values.to_numpy() if values.type != pa.uint64() else values.cast(pa.int64(), safe=False).to_numpy()
    used = ids[offsets[0] : offsets[-1]]
    if wrong.any() or (used.size and (used.min() < 0 or used.max() >= feature.cardinality)):
        wrong = (ids < 0) | (ids >= feature.cardinality) | (wrong if wrong.size else False)
        positions = np.flatnonzero(wrong)
        positions = positions[(positions >= offsets[0]) & (positions < offsets[-1])]
        # Take the last row that starts at or before the id, because empty lists also start and end
        # there.
        faults.note(np.unique(np.searchsorted(offsets, positions, side="right") - 1), feature.name, wanted)
    return Lists(ids, offsets)
