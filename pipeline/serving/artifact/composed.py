"""Turn ids of compressed tables into those of their parts, and the parts' pooled rows into the tables': as training does it.

The parts are tables of an artifact as all others. What is beside them, the tables' settings and the parameters that
compose rows (cores, small networks, projections), is one file: a line of JSON, then numbers. Nothing in it is a pickle.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.data.read.batch import keyed_jagged_tensor
from pipeline.embeddings.collection import ComposedEmbeddings
from pipeline.embeddings.compression.composition import Composition
from pipeline.embeddings.compression.id_splitter import IdSplitter
from pipeline.embeddings.compression.partitions import Given, partitions_of
from pipeline.embeddings.compression.physical import physical_tables
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ServingError
from pipeline.serving.artifact.row_maps import RowMap
from pipeline.serving.scoring.lookup import TableLookup

MAX_HEADER_BYTES = 256 << 20


class ComposedTables:
    """`tables` are logical, `keys` the batch's features in its order; `parts` and `looked_up` what the collection holds."""

    def __init__(
        self,
        tables: Sequence[Table],
        keys: Sequence[str],
        composition: Composition | None = None,
        row_maps: Mapping[str, RowMap] | None = None,
    ) -> None:
        """`row_maps`: of the parts with managed collision. Raises ServingError where one is missing."""
        self.tables, self.keys, self.row_maps = list(tables), list(keys), dict(row_maps or {})
        self.parts = physical_tables(self.tables)
        managed = [part for part in self.parts if part.managed is not None]
        if sorted(part.name for part in managed) != sorted(self.row_maps):
            raise ServingError(
                f"tables {[part.name for part in managed]} want maps, there are those of {[*self.row_maps]}"
            )
        self._map_of = {feature: self.row_maps[part.name] for part in managed for feature in part.feature_names}
        self.composition = (composition or Composition(self.tables)).eval().requires_grad_(False)
        self._split = IdSplitter(self.tables)
        dims = {feature: part.embedding_dim for part in self.parts for feature in part.feature_names}
        nothing = torch.zeros(0, dtype=torch.int64)
        split = self._split(keyed_jagged_tensor(self.keys, nothing, torch.zeros(len(keys)), 1, [0] * len(keys)))
        self.looked_up = [key for key in split.keys() if key in dims]  # noqa: SIM118  # no dict
        self.dims = [dims[key] for key in self.looked_up]
        self._rows = {feature: table.num_embeddings for table in self.tables for feature in table.feature_names}

    def split(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Raises ServingError for an id outside its table, or a bag that is too long."""
        ends = features.offset_per_key()
        for key, (begin, end) in zip(features.keys(), pairwise(ends), strict=True):
            ids = features.values()[begin:end]
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self._rows[key]):
                raise ServingError(f"feature {key!r} has an id outside [0, {self._rows[key]})")
        return self._split(features)

    def ids_looked_up(self, split: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, offsets) of `looked_up`, as a TableLookup takes them."""
        ends, keys, batch = split.offset_per_key(), split.keys(), split.stride()
        places = [keys.index(key) for key in self.looked_up]
        lengths = split.lengths().view(len(keys), batch)[places].reshape(-1).long()
        parts = [split.values()[ends[place] : ends[place + 1]] for place in places]
        for number, key in enumerate(self.looked_up):
            if key in self._map_of:
                parts[number] = torch.from_numpy(self._map_of[key].rows_of(parts[number].numpy()))
        return torch.cat(parts), torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

    def compose(self, pooled: torch.Tensor, split: KeyedJaggedTensor) -> torch.Tensor:
        """[batch, sum of dims] of `looked_up` -> [batch, sum of the tables' dims] by `keys`."""
        with torch.no_grad():
            composed = self.composition(KeyedTensor(self.looked_up, self.dims, pooled), split).to_dict()
        return torch.cat([composed[key] for key in self.keys], dim=1)

    def pooled(self, lookup: TableLookup, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """As lookup.pooled, of ids by `keys`."""
        batch = (len(offsets) - 1) // len(self.keys)
        ends = offsets[::batch].tolist() if batch else [0] * (len(self.keys) + 1)
        counts = [end - begin for begin, end in pairwise(ends)]
        split = self.split(keyed_jagged_tensor(self.keys, values, offsets.diff(), batch, counts))
        return self.compose(lookup.pooled(*self.ids_looked_up(split)), split)

    def to_bytes(self) -> bytes:
        """The file's content."""
        numbers = {name: value.float() for name, value in self.composition.state_dict().items()}
        classes = [_classes(table) for table in self.tables]
        header = {
            "keys": self.keys,
            "tables": [asdict(_without_files(table)) for table in self.tables],
            "parameters": {name: list(value.shape) for name, value in numbers.items()},
            "classes": [list(one.shape) for one in classes],
            "row_maps": {name: [len(one.ids), one.rows_a_bucket] for name, one in self.row_maps.items()},
        }
        maps = [numbers.astype("<i8").tobytes() for one in self.row_maps.values() for numbers in (one.ids, one.rows)]
        body = [value.contiguous().numpy().astype("<f4").tobytes() for value in numbers.values()]
        given = [one.astype("<i8").tobytes() for one in classes]
        return b"".join([json.dumps(header).encode(), b"\n", *body, *given, *maps])

    @classmethod
    def from_bytes(cls, content: bytes) -> ComposedTables:
        """Raises ServingError for what to_bytes has not written."""
        line, _, body = content.partition(b"\n")
        if len(line) > MAX_HEADER_BYTES:
            raise ServingError("its header is too long")
        header = json.loads(line)
        tables = [decode(Table, values) for values in header["tables"]]
        taken = 4 * sum(int(np.prod(shape)) for shape in header["parameters"].values())
        rest = np.frombuffer(body, "<i8", offset=taken)
        rest = _fill_classes(tables, header["classes"], rest)
        found = cls(tables, [str(key) for key in header["keys"]], row_maps=_row_maps(header.get("row_maps", {}), rest))
        own = found.composition.state_dict()
        if {name: list(value.shape) for name, value in own.items()} != header["parameters"]:
            raise ServingError("its parameters are not those of its tables")
        values = torch.from_numpy(np.frombuffer(body[:taken], "<f4").copy())
        sizes = [value.numel() for value in own.values()]
        parts = values.split(sizes)
        found.composition.load_state_dict(
            {name: part.view_as(own[name]) for name, part in zip(own, parts, strict=True)}
        )
        return found


def composed_in(model: torch.nn.Module) -> tuple[str, ComposedEmbeddings] | None:
    """The path and module of a model's compressed tables, None where it has none."""
    return next(((name, one) for name, one in model.named_modules() if isinstance(one, ComposedEmbeddings)), None)


def _classes(table: Table) -> np.ndarray[Any, Any]:
    """[partitions, ids] of a table whose partitions are given by a file, which an artifact cannot point to; else empty."""
    if table.compression is None or table.compression.assignments_file is None:
        return np.zeros((0, 0), np.int64)
    return np.stack([np.asarray(one.classes, np.int64) for one in partitions_of(table) if isinstance(one, Given)])


def _without_files(table: Table) -> Table:
    if table.compression is None or table.compression.assignments_file is None:
        return table
    # Of one class each: a scheme that is given must be given something.
    return replace(table, compression=replace(table.compression, assignments_file=None, assignments=[[0]]))


def _fill_classes(tables: list[Table], shapes: list[list[int]], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """What of `numbers` lies behind the tables' classes."""
    for table, shape in zip(tables, shapes, strict=True):
        if count := int(np.prod(shape)):
            assert table.compression is not None
            table.compression.assignments = numbers[:count].reshape(shape).tolist()
            numbers = numbers[count:]
    return numbers


def _row_maps(sizes: dict[str, list[int]], numbers: NDArray[np.int64]) -> dict[str, RowMap]:
    if len(numbers) != sum(2 * count for count, _ in sizes.values()):
        raise ServingError("it is shorter or longer than its header says")
    found = {}
    for name, (count, rows_a_bucket) in sizes.items():
        found[name] = RowMap(numbers[:count].copy(), numbers[count : 2 * count].copy(), rows_a_bucket)
        numbers = numbers[2 * count :]
    return found


def decode(kind: Any, value: Any) -> Any:
    """Of what asdict gave of a dataclass of plain values, lists and dataclasses. Raises KeyError, TypeError, ServingError."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        known = {one.name for one in fields(kind)}
        return kind(**{name: decode(hints[name], part) for name, part in value.items() if name in known})
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [one for one in get_args(kind) if one is not types.NoneType]
        return None if value is None else decode(kinds[0], value)
    if get_origin(kind) is list:
        return [decode(get_args(kind)[0], part) for part in value]
    return value
