"""Serve compressed tables: split their ids and compose their rows as training does.

The parts are ordinary tables of an artifact. The settings of the tables and the parameters that
compose rows are one file: a line of JSON, then numbers. Nothing in the file is a pickle.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.data.read.batch import keyed_jagged_tensor
from pipeline.embeddings.collection import ComposedEmbeddings, Composition
from pipeline.embeddings.compression.kind import compressed, kind_of
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.embeddings.physical import physical_tables
from pipeline.embeddings.table import IDS_A_BUCKET, Table, width_of
from pipeline.runtime.errors import ServingError
from pipeline.serving.scoring.lookup import TableLookup

MAX_HEADER_BYTES, MAX_POSITIONS = 256 << 20, 1 << 16


@dataclass(frozen=True)
class RowMap:
    """Maps ids to rows for a table with managed collision, as when its training was saved. ids:
    hashed ids, int64, ascending. An id that is not in `ids` uses the last row of its bucket.
    """

    ids: NDArray[np.int64]
    rows: NDArray[np.int64]
    rows_a_bucket: int

    def problem(self, num_rows: int) -> str:
        """Return what makes the map invalid for a table with `num_rows` rows; "" if it is valid."""
        if not 1 <= self.rows_a_bucket <= num_rows:
            return f"has {self.rows_a_bucket} rows a bucket, and the table has {num_rows}"
        if len(self.ids) and (self.rows.min() < 0 or self.rows.max() >= num_rows):
            return f"has rows from {self.rows.min()} to {self.rows.max()}, and the table has {num_rows}"
        if (self.ids[1:] <= self.ids[:-1]).any():
            return "has ids that do not ascend"
        return ""

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows [n] of ids [n]."""
        shared = (ids // IDS_A_BUCKET + 1) * self.rows_a_bucket - 1
        if not len(self.ids):
            return shared
        positions = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[positions] == ids, self.rows[positions], shared)


def row_map(sorted_ids: NDArray[np.int64], rows: NDArray[np.int64], num_buckets: int) -> RowMap:
    """Make a map from a checkpoint's state, which has one bucket after the other. Rows of each
    bucket count from 0. If a bucket is not full, its last ids are the largest integer.
    """
    rows_a_bucket = len(sorted_ids) // num_buckets
    buckets = np.repeat(np.arange(num_buckets), rows_a_bucket)
    used = sorted_ids < IDS_A_BUCKET
    ids = buckets[used] * IDS_A_BUCKET + sorted_ids[used]
    return RowMap(ids, buckets[used] * rows_a_bucket + rows[used], rows_a_bucket)


class ComposedTables:
    """`tables` are the model's tables, `keys` the batch's features. `looked_up` are the features of `parts`."""

    def __init__(
        self,
        tables: Sequence[Table],
        keys: Sequence[str],
        composition: Composition | None = None,
        row_maps: Mapping[str, RowMap] | None = None,
    ) -> None:
        """`row_maps`: maps of the parts with managed collision. Raises ServingError if a map is missing."""
        self.tables, self.keys, self.row_maps = list(tables), list(keys), dict(row_maps or {})
        self.parts = physical_tables(self.tables)
        managed = [part for part in self.parts if part.managed is not None]
        if sorted(part.name for part in managed) != sorted(self.row_maps):
            raise ServingError(
                f"tables {[part.name for part in managed]} need maps, but there are maps of {[*self.row_maps]}"
            )
        for part in managed:
            if problem := self.row_maps[part.name].problem(part.num_embeddings):
                raise ServingError(f"the map of table {part.name!r} {problem}")
        self._map_of = {feature: self.row_maps[part.name] for part in managed for feature in part.feature_names}
        self.composition = (composition or Composition(self.tables)).eval().requires_grad_(False)
        self._split = IdSplitter(self.tables)
        dims = {feature: part.embedding_dim for part in self.parts for feature in part.feature_names}
        nothing = torch.zeros(0, dtype=torch.int64)
        split = self._split(keyed_jagged_tensor(self.keys, nothing, torch.zeros(len(keys)), 1, [0] * len(keys)))
        self.looked_up = [key for key in split.keys() if key in dims]  # noqa: SIM118  # no dict
        self.dims = [dims[key] for key in self.looked_up]
        self._rows = {feature: table.num_embeddings for table in self.tables for feature in table.feature_names}

    @property
    def dims_of_keys(self) -> dict[str, int]:
        """Return the number of columns of each of `keys` in the result of pooled()."""
        return {feature: width_of(table, feature) for table in self.tables for feature in table.feature_names}

    def depends_on_others(self) -> list[set[str]]:
        """Return groups of features: the rows of one feature depend on the ids of a second one."""
        searched = [each for table in self.tables for each in table.positions if each.search_in and each.search_for]
        return [{each.feature, str(each.search_in), str(each.search_for)} for each in searched]

    @property
    def computed(self) -> set[str]:
        """Return the features whose rows are products with dense parameters."""
        kinds = [(table, table.compression is not None and compressed(table)) for table in self.tables]
        return {name for table, kind in kinds if kind and kind.initial_parameters() for name in table.feature_names}

    def part(self, features: Sequence[str]) -> ComposedTables | None:
        """Return the same for some features; None if one of their tables is compressed."""
        used = [table for table in self.tables if not set(features).isdisjoint(table.feature_names)]
        if any(table.compression is not None for table in used):
            return None
        return ComposedTables(
            [_table_of(table, features) for table in used], [key for key in self.keys if key in features]
        )

    def split(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Convert features to ids of the parts. Raises ServingError for ids outside their table and too long bags."""
        ends = features.offset_per_key()
        for key, (begin, end) in zip(features.keys(), pairwise(ends), strict=True):
            ids = features.values()[begin:end]
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self._rows[key]):
                raise ServingError(f"feature {key!r} has an id outside [0, {self._rows[key]})")
        return self._split(features)

    def ids_looked_up(self, split: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return (values, offsets, weights) of the features `looked_up`, in the form that TableLookup needs."""
        ends, keys, batch = split.offset_per_key(), split.keys(), split.stride()
        positions = [keys.index(key) for key in self.looked_up]
        lengths = split.lengths().view(len(keys), batch)[positions].reshape(-1).long()
        spans, weights = [slice(ends[position], ends[position + 1]) for position in positions], split.weights_or_none()
        parts = [split.values()[span] for span in spans]
        for number, key in enumerate(self.looked_up):
            if key in self._map_of:
                parts[number] = torch.from_numpy(self._map_of[key].rows_of(parts[number].numpy()))
        own = None if weights is None else torch.cat([weights[span] for span in spans])
        return torch.cat(parts), torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), own

    def compose(self, pooled: torch.Tensor, split: KeyedJaggedTensor) -> torch.Tensor:
        """Convert pooled rows of `looked_up` [batch, sum of dims] to those of `keys` [batch, sum of tables' dims]."""
        with torch.no_grad():
            composed = self.composition(KeyedTensor(self.looked_up, self.dims, pooled), split).to_dict()
        return torch.cat([composed[key] for key in self.keys], dim=1)

    def pooled(
        self, lookup: TableLookup, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return pooled rows for ids of the features `keys`, as lookup.pooled does for ordinary tables."""
        batch = (len(offsets) - 1) // len(self.keys)
        ends = offsets[::batch].tolist() if batch else [0] * (len(self.keys) + 1)
        counts = [end - begin for begin, end in pairwise(ends)]
        split = self.split(keyed_jagged_tensor(self.keys, values, offsets.diff(), batch, counts, weights))
        return self.compose(lookup.pooled(*self.ids_looked_up(split)), split)

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        numbers = {name: value.float() for name, value in self.composition.state_dict().items()}
        tables, in_files = zip(*(_without_files(table) for table in self.tables), strict=True)
        header = {
            "keys": self.keys,
            "tables": tables,
            "parameters": {name: list(value.shape) for name, value in numbers.items()},
            "classes": [list(each.shape) for each in in_files],
            "row_maps": {name: [len(each.ids), each.rows_a_bucket] for name, each in self.row_maps.items()},
        }
        maps = [numbers.astype("<i8").tobytes() for each in self.row_maps.values() for numbers in (each.ids, each.rows)]
        body = [value.contiguous().numpy().astype("<f4").tobytes() for value in numbers.values()]
        integers = [each.astype("<i8").tobytes() for each in in_files]
        return b"".join([json.dumps(header).encode(), b"\n", *body, *integers, *maps])

    @classmethod
    def from_bytes(cls, content: bytes) -> ComposedTables:
        """Read the content of the file. Raises ServingError if to_bytes() has not written it."""
        line, _, body = content.partition(b"\n")
        if len(line) > MAX_HEADER_BYTES:
            raise ServingError("its header is too long")
        header = json.loads(line)
        shapes, row_maps = header["parameters"], header.get("row_maps", {})
        taken = 4 * sum(map(_count, shapes.values()))
        integers = sum(map(_count, header["classes"])) + sum(2 * _count([count]) for count, _ in row_maps.values())
        if len(body) != taken + 8 * integers:
            raise ServingError("it is shorter or longer than its header says")
        tables = [decode(Table, values) for values in header["tables"]]
        if sum(each.num_positions for table in tables for each in table.positions) > MAX_POSITIONS:
            raise ServingError(f"it has more than {MAX_POSITIONS} positions of sequences")
        tables, numbers = _restore_files(tables, header["classes"], np.frombuffer(body, "<i8", offset=taken))
        with torch.device("meta"):  # no memory is taken before the shapes are compared
            wanted = {name: list(value.shape) for name, value in Composition(tables).state_dict().items()}
        if wanted != shapes:
            raise ServingError("its parameters are not those of its tables")
        found = cls(tables, [str(key) for key in header["keys"]], row_maps=_row_maps(row_maps, numbers))
        own = found.composition.state_dict()
        values = torch.from_numpy(np.frombuffer(body[:taken], "<f4").copy())
        sizes = [value.numel() for value in own.values()]
        parts = values.split(sizes)
        found.composition.load_state_dict(
            {name: part.view_as(own[name]) for name, part in zip(own, parts, strict=True)}
        )
        return found


def _table_of(table: Table, features: Sequence[str]) -> Table:
    """Return the table for some of its features."""
    kept = [number for number, name in enumerate(table.feature_names) if name in features]
    return replace(
        table,
        feature_names=[table.feature_names[number] for number in kept],
        pooling_factors=[table.pooling_factors[number] for number in kept],
        max_ids=[table.max_ids[number] for number in kept] if table.max_ids else [],
        positions=[each for each in table.positions if each.feature in features],
    )


def composed_in(model: torch.nn.Module) -> tuple[str, ComposedEmbeddings] | None:
    """Return the path and module of a model's compressed tables; None if it has no compressed tables."""
    return next(((name, part) for name, part in model.named_modules() if isinstance(part, ComposedEmbeddings)), None)


def _without_files(table: Table) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """Return the table as plain values for an artifact, and the integers in the files that its settings name."""
    values = asdict(table)
    if table.compression is None:
        return values, np.zeros((0, 0), np.int64)
    config, integers = compressed(table).embed_files()
    rows = [np.asarray(row, np.int64) for row in integers]
    return {**values, "compression": config.to_dict()}, np.stack(rows) if rows else np.zeros((0, 0), np.int64)


def _restore_files(
    tables: list[Table], shapes: list[list[int]], integers: NDArray[np.int64]
) -> tuple[list[Table], NDArray[np.int64]]:
    """Return the tables with the integers of their files, and the integers that are left over."""
    restored = []
    for table, shape in zip(tables, shapes, strict=True):
        config, count = table.compression, _count(shape)
        if count and config is not None:
            config = kind_of(config).restore_files(config, integers[:count].reshape(shape).tolist())
            integers = integers[count:]
        restored.append(replace(table, compression=config))
    return restored, integers


def _count(shape: list[int]) -> int:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ServingError(f"it has numbers of the shape {str(shape)[:100]}")
    return math.prod(shape)


def _row_maps(sizes: dict[str, list[int]], numbers: NDArray[np.int64]) -> dict[str, RowMap]:
    found = {}
    for name, (count, rows_a_bucket) in sizes.items():
        found[name] = RowMap(numbers[:count].copy(), numbers[count : 2 * count].copy(), rows_a_bucket)
        numbers = numbers[2 * count :]
    return found


def decode(kind: Any, value: Any) -> Any:
    """Rebuild an object of type `kind` from the output of asdict. Raises KeyError, TypeError, ServingError."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        known = {each.name for each in fields(kind)}
        return kind(**{name: decode(hints[name], part) for name, part in value.items() if name in known})
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [part for part in get_args(kind) if part is not types.NoneType]
        return None if value is None else decode(kinds[0], value)
    if get_origin(kind) is list:
        return [decode(get_args(kind)[0], part) for part in value]
    return value
