"""Read .metadata, which torch.distributed.checkpoint writes by pickle, without unpickling it.

plain_pickle.py reads the opcodes into plain values. The Metadata is then made from the few records that a checkpoint
of tensors has. Time and memory are bounded by the size of the file, because each record is converted once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from pipeline.checkpoint.plain_pickle import (
    MAX_TEXT,
    Converted,
    Name,
    Pairs,
    Record,
    int_of,
    interpret,
    refuse,
    shown,
    text_of,
    typed,
)

DCP = "torch.distributed.checkpoint.metadata"
DTYPES = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
MEMORY_FORMATS = {
    _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT: torch.contiguous_format,
    _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST: torch.channels_last,
    _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT: torch.preserve_format,
}
MAX_DIMENSIONS, MAX_PATH = 16, 64


def decode_metadata(content: bytes) -> Metadata:
    """Return the Metadata. Raises pickle.UnpicklingError if the content is damaged, or not the metadata of tensors."""
    try:
        return _Converter().metadata(interpret(content, _KNOWN))
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle may lead to any error
        raise pickle.UnpicklingError(f"it is damaged: {str(error)[:200]!r}") from None


_KNOWN = {
    Name("pathlib", "PosixPath"), Name("torch", "Size"), *(Name("torch", each) for each in DTYPES),
    Name("torch.serialization", "_get_layout"), Name("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    Name("builtins", "getattr"), *(Name(DCP, each) for each in (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
}  # fmt: skip


class _Converter:
    """Converts records to the objects of torch.distributed.checkpoint, each record once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Any] = {}

    def metadata(self, value: object) -> Metadata:
        state = self._state(value, "Metadata")
        tensors = {
            text_of(key): self._tensor(text_of(key), entry) for key, entry in typed(state["state_dict_metadata"], Pairs)
        }
        planner_data, storage_data = state.get("planner_data"), state.get("storage_data")
        meta = state.get("storage_meta")
        return Metadata(
            tensors,  # type: ignore[arg-type]
            planner_data=None if planner_data is None else self._paths(planner_data),
            storage_data=None if storage_data is None else self._places(storage_data),
            storage_meta=None if meta is None else self._once(self._meta, meta),
            version=_optional(text_of, state.get("version")),
        )

    def _once(self, make: Callable[[Any], Converted], value: object) -> Converted:
        """Convert a value once. All values stay in memory during the conversion, so an id names one value."""
        key = (make.__name__, id(value))
        if key not in self._made:
            self._made[key] = make(value)
        found: Converted = self._made[key]
        return found

    def _state(self, value: object, kind: str, module: str = DCP) -> dict[str, Any]:
        """Return the fields of a dataclass."""
        if not isinstance(value, Record) or value.kind != Name(module, kind) or value.arguments:
            raise refuse(f"it has {shown(value)} in the place of a {kind}")
        return {text_of(key): field for key, field in typed(value.state, Pairs)}

    def _tensor(self, name: str, value: object) -> TensorStorageMetadata:
        if isinstance(value, Record) and value.kind.name == "BytesStorageMetadata":
            raise pickle.UnpicklingError(f"{name} is a BytesStorageMetadata, not a tensor")
        state = self._state(value, "TensorStorageMetadata")
        return TensorStorageMetadata(
            self._once(self._properties, state["properties"]),
            self._once(self._size, state["size"]),
            self._once(self._chunks, state["chunks"]),
        )

    def _chunks(self, values: object) -> list[ChunkStorageMetadata]:
        return [self._once(self._chunk, each) for each in typed(values, list)]

    def _chunk(self, value: object) -> ChunkStorageMetadata:
        state = self._state(value, "ChunkStorageMetadata")
        offsets, sizes = self._once(self._size, state["offsets"]), self._once(self._size, state["sizes"])
        return ChunkStorageMetadata(offsets, sizes)

    def _size(self, value: object) -> torch.Size:
        if not isinstance(value, Record) or value.kind != Name("torch", "Size") or len(value.arguments) != 1:
            raise refuse(f"it has {shown(value)} in the place of a size")
        if len(numbers := typed(value.arguments[0], tuple)) > MAX_DIMENSIONS:
            raise refuse(f"it has a size of {len(numbers)} dimensions")
        return torch.Size([int_of(each) for each in numbers])

    def _properties(self, value: object) -> TensorProperties:
        if not isinstance(value, Record) or value.kind != Name(DCP, "TensorProperties") or value.arguments:
            raise refuse(f"it has {shown(value)} in the place of a tensor's properties")
        dtype, layout, requires_grad, memory_format, pin_memory = typed(value.state, tuple)
        if not isinstance(dtype, Name) or dtype.module != "torch" or dtype.name not in DTYPES:
            raise refuse(f"it has {shown(dtype)} in the place of a type of numbers")
        if (
            not isinstance(layout, Record)
            or layout.kind.name != "_get_layout"
            or layout.arguments != ("torch.strided",)
        ):
            raise refuse("it has a tensor that is not strided")
        return TensorProperties(
            getattr(torch, dtype.name),
            torch.strided,
            typed(requires_grad, bool),
            MEMORY_FORMATS[_memory_format(memory_format)],
            typed(pin_memory, bool),
        )

    def _paths(self, values: object) -> dict[str, tuple[str | int, ...]]:
        """Return the path of keys to each tensor."""
        return {text_of(key): self._once(self._path, path) for key, path in typed(values, Pairs)}

    def _path(self, value: object) -> tuple[str | int, ...]:
        if len(parts := typed(value, tuple)) > MAX_PATH:
            raise refuse(f"it has a path of {len(parts)} keys")
        return tuple(int_of(part) if type(part) is int else text_of(part) for part in parts)

    def _places(self, values: object) -> dict[MetadataIndex, _StorageInfo]:
        return {self._index(key): self._place(place) for key, place in typed(values, Pairs)}

    def _index(self, value: object) -> MetadataIndex:
        state = self._state(value, "MetadataIndex")
        offset = state.get("offset")
        return MetadataIndex(
            text_of(state["fqn"]),
            None if offset is None else self._once(self._size, offset),
            _optional(int_of, state.get("index")),
        )

    def _place(self, value: object) -> _StorageInfo:
        state = self._state(value, "_StorageInfo", "torch.distributed.checkpoint.filesystem")
        offset, length = int_of(state["offset"]), int_of(state["length"])
        if state.get("transform_descriptors") is not None or offset < 0 or length < 0:
            raise refuse(f"it has a tensor of {length} bytes at {offset}, or one that is transformed")
        return _StorageInfo(_path_text(state["relative_path"]), offset, length)

    def _meta(self, value: object) -> StorageMeta:
        state = self._state(value, "StorageMeta")
        if state.get("modules"):
            raise refuse("it names modules")
        return StorageMeta(
            _optional(_path_text, state.get("checkpoint_id")),
            _optional(text_of, state.get("save_id")),
            _optional(text_of, state.get("load_id")),
        )


def _path_text(value: object) -> str:
    """Return the path as text. `value` is a text, or a record of pathlib.PosixPath."""
    if not isinstance(value, Record) or value.kind != Name("pathlib", "PosixPath"):
        return text_of(value)
    text = "/".join(text_of(part) for part in value.arguments[:MAX_PATH])
    if len(value.arguments) > MAX_PATH or len(text) > MAX_TEXT:
        raise refuse("it has a path of too many parts")
    return text


def _optional(read: Callable[[object], Converted], value: object) -> Converted | None:
    return None if value is None else read(value)


def _memory_format(value: object) -> _MEM_FORMAT_ENCODING:
    """Return a memory format from its number, or from getattr(class, name), as Python up to 3.11.3 pickles an enum."""
    kind = Name(DCP, "_MEM_FORMAT_ENCODING")
    if isinstance(value, Record) and value.kind == kind and len(value.arguments) == 1:
        return _MEM_FORMAT_ENCODING(int_of(value.arguments[0]))
    if isinstance(value, Record) and value.kind.name == "getattr" and len(value.arguments) == 2:
        owner, name = value.arguments
        if owner == kind and type(name) is str and name in _MEM_FORMAT_ENCODING.__members__:
            return _MEM_FORMAT_ENCODING[name]
    raise pickle.UnpicklingError(f"it has {shown(value)} that is no member of an enumeration")
