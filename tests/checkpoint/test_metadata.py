"""Metadata of a step is read whichever Python 3.11 has written it, and names nothing that would run code."""

from __future__ import annotations

import pathlib
import pickle
import random
import resource
import struct
import time

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from pipeline.checkpoint.metadata_pickle import decode_metadata
from tests.support.examples import SEED

Format = dcp._MEM_FORMAT_ENCODING


class Named:
    """Pickled as getattr(a class, a name)."""

    def __init__(self, kind: object, name: str) -> None:
        self.asked = (kind, name)

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, self.asked


def metadata_with(memory_format: object) -> bytes:
    state = (torch.float32, torch.strided, False, memory_format, False)
    chunks = [dcp.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]
    entry = dcp.TensorStorageMetadata(_Properties(state), torch.Size([2]), chunks)
    return pickle.dumps(dcp.Metadata({"weight": entry}))


class _Properties:
    def __init__(self, state: tuple[object, ...]) -> None:
        self._state = state

    def __reduce__(self) -> tuple[object, ...]:
        return dcp.TensorProperties, (), self._state


def test_members_of_enumerations_are_read_as_python_up_to_3_11_3_writes_them() -> None:
    entry = decode_metadata(metadata_with(Named(Format, "TORCH_PRESERVE_FORMAT"))).state_dict_metadata["weight"]
    assert isinstance(entry, dcp.TensorStorageMetadata)
    assert entry.properties.memory_format == torch.preserve_format


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Format, "mro"), (Format, "__class__"), (dcp.Metadata, "__init__"), (Format.TORCH_PRESERVE_FORMAT, "name")],
    ids=["method", "attribute", "other_class", "member"],
)
def test_other_attributes_are_refused(kind: object, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="no member of an enumeration"):
        decode_metadata(metadata_with(Named(kind, name)))


def written(num_tensors: int = 3) -> dcp.Metadata:
    """As a save writes it."""
    tensors, places = {}, {}
    for number in range(num_tensors):
        key, size = f"model.table_{number}.weight", torch.Size([4, 8])
        chunks = [dcp.ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 8])) for row in (0, 2)]
        tensors[key] = dcp.TensorStorageMetadata(dcp.TensorProperties(torch.float32), size, chunks)
        for index, chunk in enumerate(chunks):
            place = _StorageInfo(f"__{index}_0.distcp", 256 + 100 * number, 100)
            places[dcp.MetadataIndex(key, chunk.offsets, index)] = place
    meta = dcp.StorageMeta(checkpoint_id="a save", save_id="step_00000003")
    paths = {key: ("model", number) for number, key in enumerate(tensors)}
    return dcp.Metadata(tensors, paths, places, meta, "1.0.0")  # type: ignore[arg-type]


def test_metadata_is_what_pickle_would_give() -> None:
    for protocol in (2, 3, 4, 5):
        found, wanted = decode_metadata(pickle.dumps(written(), protocol)), written()
        assert found == wanted
        assert [index.index for index in found.storage_data] == [index.index for index in wanted.storage_data]


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _change_of(kind: bytes, name: str) -> bytes:
    """BUILD with a state of slots, which pickle gives to setattr of the class itself."""
    return kind + b"N}" + _text(name) + _text("changed") + b"s\x86b"


def hostile_metadata() -> dict[str, bytes]:
    real = pickle.dumps(written(), protocol=2)
    names = [
        ("pathlib", "PosixPath", "name"),
        (dcp.__name__, "TensorStorageMetadata", "__init__"),
        ("torch.serialization", "_get_layout", "__defaults__"),
    ]
    found = {
        f"{name}.{attribute}": real[:2] + _change_of(_global(module, name), attribute) + b"0" + real[2:]
        for module, name, attribute in names
    }
    nested = b"K\x01K\x02\x86q\x000" + b"".join(
        b"h" + bytes([level]) + b"h" + bytes([level]) + b"\x86q" + bytes([level + 1]) + b"0" for level in range(60)
    )
    found["a key of 2^60 parts"] = real[:2] + nested + b"}h" + bytes([60]) + b"K\x01s."
    paths = _text("A" * 4000) + b"q\x000"
    for level in range(4):
        paths += _global("pathlib", "PosixPath") + b"(" + (b"h" + bytes([level])) * 100
        paths += b"tRq" + bytes([level + 1]) + b"0"
    found["a path of 40 GB"] = real[:2] + paths + b"h\x04."
    found["deep tuples"] = real[:2] + b"(" * 200_000 + b"t" * 200_000 + b"."
    found["2 GB of one number"] = real[:2] + b"\x8b" + struct.pack("<i", (1 << 31) - 1) + b"\0."
    found["2^60 bytes"] = real[:2] + b"\x8e" + struct.pack("<Q", 1 << 60) + b"."
    found["a memo of 2^31"] = real[:2] + b"Nr" + struct.pack("<I", (1 << 31) - 1) + b"0."
    return found


@pytest.mark.long
def test_hostile_metadata_is_refused_and_changes_no_class() -> None:
    kinds = (pathlib.PosixPath, dcp.TensorStorageMetadata, torch.serialization._get_layout)
    before = [dict(vars(kind)) for kind in kinds]
    defaults = torch.serialization._get_layout.__defaults__
    for what, content in hostile_metadata().items():
        with pytest.raises(pickle.UnpicklingError):
            decode_metadata(content)
            raise AssertionError(what)
    assert [dict(vars(kind)) for kind in kinds] == before
    assert torch.serialization._get_layout.__defaults__ is defaults


@pytest.mark.parametrize("count", [300, pytest.param(30_000, marks=pytest.mark.campaign)])
def test_mutated_metadata_is_read_or_refused(count: int) -> None:
    contents = [pickle.dumps(written(20), protocol) for protocol in (2, 4)]
    before, found, slowest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, {"read": 0, "refused": 0}, 0.0
    for seed in range(SEED, SEED + count):
        rng = random.Random(seed)
        changed = bytearray(contents[seed % 2])
        for _ in range(rng.choice([1, 1, 2, 8])):
            at = rng.randrange(len(changed))
            if rng.random() < 0.5:
                changed[at] = rng.choice(
                    b"(t\x85\x86R\x81bsue}]a.0h2jqr\x94\x93cX\x8c\x8a\x8bKMJ\x88N" + bytes([seed % 256])
                )
            elif rng.random() < 0.5:
                changed[at:at] = changed[(begin := rng.randrange(len(changed))) : begin + rng.randrange(40)]
            else:
                del changed[at : at + rng.randrange(8)]
        started = time.process_time()
        try:
            decode_metadata(bytes(changed))
            found["read"] += 1
        except pickle.UnpicklingError:
            found["refused"] += 1
        slowest = max(slowest, time.process_time() - started)
    more_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{count} mutations: {found}, slowest {slowest:.2f} CPU seconds, {more_mb:.0f} MB more")
    assert found["refused"] and more_mb < 256
