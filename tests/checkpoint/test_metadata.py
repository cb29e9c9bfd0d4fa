"""Metadata of a step is read whichever Python 3.11 has written it, and names nothing that would run code."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp

from pipeline.checkpoint.metadata import decode_metadata

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
    entry = dcp.TensorStorageMetadata(_Properties(state), torch.Size([2]), chunks)  # type: ignore[arg-type]
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
