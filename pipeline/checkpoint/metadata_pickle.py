"""Read .metadata, which torch.distributed.checkpoint writes by pickle, without unpickling it.

The opcodes of the pickle are read from a list and build plain values: numbers, texts, tuples, lists, pairs of
dicts, and records of what a class was called with. No class of the file is looked up, called or changed. The
Metadata is then made from the few records that a checkpoint of tensors has. Time and memory are bounded by the size
of the file, because each record is converted once.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

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

DCP = "torch.distributed.checkpoint.metadata"
DTYPES = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
MEMORY_FORMATS = {
    _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT: torch.contiguous_format,
    _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST: torch.channels_last,
    _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT: torch.preserve_format,
}
MAX_TEXT, MAX_DIMENSIONS, MAX_PATH, MAX_INT = 4096, 16, 64, 1 << 63
PUSHED = {"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"}  # their argument is the value
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}

Converted = TypeVar("Converted")


class Name(NamedTuple):
    """What the file calls something that can be imported. It is compared, never imported."""

    module: str
    name: str


class Record:
    """A call of `kind` by `arguments`, with the state that was given to the result."""

    def __init__(self, kind: Name, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments, self.state = kind, arguments, None


class Pairs(list[tuple[Any, Any]]):
    """A dict whose keys are not hashed."""


def decode_metadata(content: bytes) -> Metadata:
    """Raises pickle.UnpicklingError for content that is damaged, or is not the metadata of tensors."""
    try:
        return _Converter().metadata(_interpret(content))
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle may lead to any error
        raise pickle.UnpicklingError(f"it is damaged: {str(error)[:200]!r}") from None


def _refuse(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"{what}, which no checkpoint of this pipeline does")


def _interpret(content: bytes) -> object:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def above_mark() -> list[Any]:
        begin = marks.pop()
        found = stack[begin:]
        del stack[begin:]
        return found

    for opcode, value, _ in pickletools.genops(content):
        name, argument = opcode.name, cast(Any, value)
        if name in PUSHED:
            if isinstance(argument, str) and len(argument) > MAX_TEXT:
                raise _refuse(f"it has a text of {len(argument)} letters")
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in TUPLES:
            count = TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(tuple(above_mark()))
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append(Pairs() if name == "EMPTY_DICT" else [])
        elif name in ("APPEND", "APPENDS"):
            values = above_mark() if name == "APPENDS" else [stack.pop()]
            _typed(stack[-1], list).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = above_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            _typed(stack[-1], Pairs).extend(zip(values[::2], values[1::2], strict=True))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            parts = argument.split(" ", 1) if name == "GLOBAL" else [stack.pop(-2), stack.pop()]
            stack.append(_known(Name(*(_typed(part, str) for part in parts))))
        elif name in ("NEWOBJ", "REDUCE"):
            arguments, kind = _typed(stack.pop(), tuple), stack.pop()
            stack.append(Record(_typed(kind, Name), arguments))
        elif name == "BUILD":
            state = stack.pop()
            if _typed(stack[-1], Record).state is not None:
                raise _refuse("it changes an object twice")
            stack[-1].state = state
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise _refuse(f"it has the opcode {name}")
    raise pickle.UnpicklingError("it ends too soon")


def _typed(value: Any, kind: type[Converted]) -> Converted:
    if type(value) is not kind:
        raise _refuse(f"it has a {type(value).__name__} in the place of a {kind.__name__}")
    return value


_KNOWN = {
    Name("pathlib", "PosixPath"), Name("torch", "Size"), *(Name("torch", each) for each in DTYPES),
    Name("torch.serialization", "_get_layout"), Name("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    Name("builtins", "getattr"), *(Name(DCP, each) for each in (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
}  # fmt: skip


def _known(name: Name) -> Name:
    if name not in _KNOWN:
        raise _refuse(f"it names {name.module}.{name.name}")
    return name


class _Converter:
    """Makes DCP's objects of records, each once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Any] = {}

    def metadata(self, value: object) -> Metadata:
        state = self._state(value, "Metadata")
        tensors = {
            _text(key): self._tensor(_text(key), entry) for key, entry in _typed(state["state_dict_metadata"], Pairs)
        }
        planner_data, storage_data = state.get("planner_data"), state.get("storage_data")
        meta = state.get("storage_meta")
        return Metadata(
            tensors,  # type: ignore[arg-type]
            planner_data=None if planner_data is None else self._paths(planner_data),
            storage_data=None if storage_data is None else self._places(storage_data),
            storage_meta=None if meta is None else self._once(self._meta, meta),
            version=_optional(_text, state.get("version")),
        )

    def _once(self, make: Callable[[Any], Converted], value: object) -> Converted:
        """All values stay in memory while they are converted, so that an id is one value."""
        key = (make.__name__, id(value))
        if key not in self._made:
            self._made[key] = make(value)
        found: Converted = self._made[key]
        return found

    def _state(self, value: object, kind: str, module: str = DCP) -> dict[str, Any]:
        """The fields of a dataclass."""
        if not isinstance(value, Record) or value.kind != Name(module, kind) or value.arguments:
            raise _refuse(f"it has {_shown(value)} in the place of a {kind}")
        return {_text(key): field for key, field in _typed(value.state, Pairs)}

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
        return [self._once(self._chunk, each) for each in _typed(values, list)]

    def _chunk(self, value: object) -> ChunkStorageMetadata:
        state = self._state(value, "ChunkStorageMetadata")
        offsets, sizes = self._once(self._size, state["offsets"]), self._once(self._size, state["sizes"])
        return ChunkStorageMetadata(offsets, sizes)

    def _size(self, value: object) -> torch.Size:
        if not isinstance(value, Record) or value.kind != Name("torch", "Size") or len(value.arguments) != 1:
            raise _refuse(f"it has {_shown(value)} in the place of a size")
        if len(numbers := _typed(value.arguments[0], tuple)) > MAX_DIMENSIONS:
            raise _refuse(f"it has a size of {len(numbers)} dimensions")
        return torch.Size([_int(each) for each in numbers])

    def _properties(self, value: object) -> TensorProperties:
        if not isinstance(value, Record) or value.kind != Name(DCP, "TensorProperties") or value.arguments:
            raise _refuse(f"it has {_shown(value)} in the place of a tensor's properties")
        dtype, layout, requires_grad, memory_format, pin_memory = _typed(value.state, tuple)
        if not isinstance(dtype, Name) or dtype.module != "torch" or dtype.name not in DTYPES:
            raise _refuse(f"it has {_shown(dtype)} in the place of a type of numbers")
        if (
            not isinstance(layout, Record)
            or layout.kind.name != "_get_layout"
            or layout.arguments != ("torch.strided",)
        ):
            raise _refuse("it has a tensor that is not strided")
        return TensorProperties(
            getattr(torch, dtype.name),
            torch.strided,
            _typed(requires_grad, bool),
            MEMORY_FORMATS[_memory_format(memory_format)],
            _typed(pin_memory, bool),
        )

    def _paths(self, values: object) -> dict[str, tuple[str | int, ...]]:
        """The keys on the way to each tensor."""
        return {_text(key): self._once(self._path, path) for key, path in _typed(values, Pairs)}

    def _path(self, value: object) -> tuple[str | int, ...]:
        if len(parts := _typed(value, tuple)) > MAX_PATH:
            raise _refuse(f"it has a path of {len(parts)} keys")
        return tuple(_int(part) if type(part) is int else _text(part) for part in parts)

    def _places(self, values: object) -> dict[MetadataIndex, _StorageInfo]:
        return {self._index(key): self._place(place) for key, place in _typed(values, Pairs)}

    def _index(self, value: object) -> MetadataIndex:
        state = self._state(value, "MetadataIndex")
        offset = state.get("offset")
        return MetadataIndex(
            _text(state["fqn"]),
            None if offset is None else self._once(self._size, offset),
            _optional(_int, state.get("index")),
        )

    def _place(self, value: object) -> _StorageInfo:
        state = self._state(value, "_StorageInfo", "torch.distributed.checkpoint.filesystem")
        offset, length = _int(state["offset"]), _int(state["length"])
        if state.get("transform_descriptors") is not None or offset < 0 or length < 0:
            raise _refuse(f"it has a tensor of {length} bytes at {offset}, or one that is transformed")
        return _StorageInfo(_path_text(state["relative_path"]), offset, length)

    def _meta(self, value: object) -> StorageMeta:
        state = self._state(value, "StorageMeta")
        if state.get("modules"):
            raise _refuse("it names modules")
        return StorageMeta(
            _optional(_path_text, state.get("checkpoint_id")),
            _optional(_text, state.get("save_id")),
            _optional(_text, state.get("load_id")),
        )


def _text(value: object) -> str:
    return _typed(value, str)


def _int(value: object) -> int:
    if type(value) is not int or not -MAX_INT <= value < MAX_INT:
        raise _refuse(f"it has {_shown(value)} in the place of a whole number")
    return value


def _path_text(value: object) -> str:
    """A text, or a path of texts."""
    if not isinstance(value, Record) or value.kind != Name("pathlib", "PosixPath"):
        return _text(value)
    text = "/".join(_text(part) for part in value.arguments[:MAX_PATH])
    if len(value.arguments) > MAX_PATH or len(text) > MAX_TEXT:
        raise _refuse("it has a path of too many parts")
    return text


def _optional(read: Callable[[object], Converted], value: object) -> Converted | None:
    return None if value is None else read(value)


def _memory_format(value: object) -> _MEM_FORMAT_ENCODING:
    """By its number, or as Python up to 3.11.3 pickles a member of an enumeration: getattr(its class, its name)."""
    kind = Name(DCP, "_MEM_FORMAT_ENCODING")
    if isinstance(value, Record) and value.kind == kind and len(value.arguments) == 1:
        return _MEM_FORMAT_ENCODING(_int(value.arguments[0]))
    if isinstance(value, Record) and value.kind.name == "getattr" and len(value.arguments) == 2:
        owner, name = value.arguments
        if owner == kind and type(name) is str and name in _MEM_FORMAT_ENCODING.__members__:
            return _MEM_FORMAT_ENCODING[name]
    raise pickle.UnpicklingError(f"it has {_shown(value)} that is no member of an enumeration")


def _shown(value: object) -> str:
    if isinstance(value, Record):
        return f"a call of {value.kind.name}"
    return repr(value)[:80] if isinstance(value, str | int | Name) or value is None else f"a {type(value).__name__}"
