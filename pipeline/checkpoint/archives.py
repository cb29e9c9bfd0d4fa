"""Read a tensor's archive of torch.save without torch.load: check all sizes first, then read its values.

torch.load allocates what the archive asks for, and its unpickler accepts more than tensors. Here the directory of the
zip file, the pickle of the tensor and the sizes in it are compared with the archive's own size, and with what .metadata
says, before memory is allocated.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pipeline.checkpoint.plain_pickle import PERSISTENT, Name, Record, int_of, interpret, typed
from pipeline.runtime.storage.seekable import PositionedReader

MAX_DIRECTORY_BYTES = 1 << 16  # of the zip file; the archive of a tensor has some ten members
MAX_PICKLE_BYTES = 4096
LOCAL_HEADER = struct.Struct("<4s2xHH16xHH")  # signature, flags, compression, lengths of name and extra field
STORAGES = {
    "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64, "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16,
    "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
REBUILD, HOOKS = Name("torch._utils", "_rebuild_tensor_v2"), Name("collections", "OrderedDict")
KNOWN = {REBUILD, HOOKS, *(Name("torch", name) for name in STORAGES)}


class StoredValues(NamedTuple):
    """The offset of a tensor's storage in the file, and the size and strides of the tensor in that storage."""

    begin: int
    num_values: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int

    def is_plain(self) -> bool:
        """Return True if all values are stored in order, and the tensor starts at the first value."""
        expected = list(torch.empty(self.sizes, device="meta").stride())
        wrong = [size for size, one, two in zip(self.sizes, self.strides, expected, strict=True) if one != two]
        return not self.first and all(size < 2 for size in wrong)


class _Part(PositionedReader):
    """Limits reads to a part of a file. No read is larger than MAX_DIRECTORY_BYTES."""

    def __init__(self, file: io.IOBase, begin: int, size: int) -> None:
        self._file, self._begin, self._size, self._position = file, begin, size, 0

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if len(view) > MAX_DIRECTORY_BYTES:
            raise RuntimeError(f"its zip file asks for {len(view)} bytes at once")
        count = _fill(self._file, self._begin + self._position, view[: max(0, self._size - self._position)])
        self._position += count
        return count


def find_values(
    file: io.IOBase, begin: int, size: int, sizes: Sequence[int] | None, dtype: torch.dtype
) -> StoredValues:
    """Find the tensor whose archive has `size` bytes of `file` from `begin` on.

    Raises RuntimeError unless it is one tensor of `dtype` and `sizes` (None: any) whose values are in the archive.
    """
    try:
        content, first, num_bytes = _members(file, begin, size)
        found = _stored_values(interpret(content, KNOWN), first, num_bytes)
    except (RuntimeError, OSError):
        raise
    except Exception as error:  # zipfile and a damaged pickle may raise any error
        raise RuntimeError(f"its archive is damaged: {str(error)[:200]}") from None
    if found.dtype != dtype or (sizes is not None and found.sizes != tuple(sizes)):
        raise RuntimeError(
            f"its archive holds {found.dtype} of shape {list(found.sizes)}, not {dtype} of shape {list(sizes or ())}"
        )
    return found


def values_offset(file: io.IOBase, begin: int, size: int, sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Return the offset in `file` of a tensor's values. Raises RuntimeError as find_values does."""
    found = find_values(file, begin, size, sizes, dtype)
    if not found.is_plain():
        raise RuntimeError("its values do not lie one after the other")
    return found.begin


def read_tensor(
    file: io.IOBase, begin: int, size: int, sizes: Sequence[int] | None, dtype: torch.dtype
) -> torch.Tensor:
    """Read the tensor. Raises RuntimeError as find_values does, or if the file ends too early."""
    found = find_values(file, begin, size, sizes, dtype)
    flat = torch.empty(found.num_values, dtype=dtype)
    values = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
    if _fill(file, found.begin, values) != len(values):
        raise RuntimeError(f"its file ends before its {len(values)} bytes")
    return flat.as_strided(found.sizes, found.strides, found.first)


def _members(file: io.IOBase, begin: int, size: int) -> tuple[bytes, int, int]:
    """Return the tensor's pickle, and the offset in `file` and the size of its values."""
    with zipfile.ZipFile(_Part(file, begin, size)) as archive:
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
    places = []
    for name in ("data.pkl", "data/0"):
        member = members[name]
        header = _content(file, begin + member.header_offset, LOCAL_HEADER.size)
        signature, flags, compression, name_bytes, extra_bytes = LOCAL_HEADER.unpack(header)
        first = member.header_offset + LOCAL_HEADER.size + name_bytes + extra_bytes
        if signature != b"PK\x03\x04" or member.compress_type or compression or flags & 1:
            raise RuntimeError(f"its archive holds {name} compressed, encrypted or nowhere")
        if first + member.file_size > size:
            raise RuntimeError(f"its archive of {size} bytes names {member.file_size} bytes at {first}")
        places.append((begin + first, member.file_size))
    return _content(file, *places[0]), *places[1]


def _stored_values(value: object, begin: int, num_bytes: int) -> StoredValues:
    storage, first, sizes, strides, _, _ = _call(value, REBUILD, 6)
    kind, storage_type, key, device, count = _call(storage, PERSISTENT, 5)
    if (kind, key, device) != ("storage", "0", "cpu") or not isinstance(storage_type, Name):
        raise RuntimeError(f"its archive keeps {str(kind)[:20]} {str(key)[:20]} of {str(device)[:20]}")
    dtype = STORAGES[storage_type.name]
    found = StoredValues(begin, int_of(count), dtype, _numbers(sizes), _numbers(strides), int_of(first))
    last = found.first + sum((size - 1) * stride for size, stride in zip(found.sizes, found.strides, strict=True))
    num_values = math.prod(found.sizes)
    if found.num_values < 0 or found.num_values * dtype.itemsize > num_bytes:
        raise RuntimeError(f"its archive has {num_bytes} bytes for {found.num_values} values of {dtype}")
    if found.first < 0 or num_values > found.num_values or (num_values and last >= found.num_values):
        raise RuntimeError(
            f"its archive has {found.num_values} values, and a tensor of {list(found.sizes)} uses others"
        )
    return found


def _call(value: object, kind: Name, num_arguments: int) -> tuple[Any, ...]:
    if not isinstance(value, Record) or value.kind != kind or len(value.arguments) != num_arguments:
        raise RuntimeError("its archive holds something else than a tensor")
    return value.arguments


def _numbers(value: object) -> tuple[int, ...]:
    numbers = tuple(int_of(each) for each in typed(value, tuple))
    if len(numbers) > 16 or min(numbers, default=0) < 0:
        raise pickle.UnpicklingError(f"it has the size {str(numbers)[:80]}")
    return numbers


def _content(file: io.IOBase, begin: int, size: int) -> bytes:
    if size > MAX_PICKLE_BYTES:
        raise RuntimeError(f"its archive describes a tensor by {size} bytes")
    content = bytearray(size)
    if _fill(file, begin, memoryview(content)) != size:
        raise RuntimeError("its archive ends too early")
    return bytes(content)


def _fill(file: io.IOBase, begin: int, view: memoryview) -> int:
    """Read bytes of `file` from `begin` on into `view`. Return how many, fewer only at the end of the file."""
    file.seek(begin)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done
