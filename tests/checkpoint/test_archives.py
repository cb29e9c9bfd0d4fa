"""A tensor's archive is read as torch.load reads it, and whatever else it asks for is refused before memory is taken."""

from __future__ import annotations

import io
import random
import tracemalloc
import zipfile
from typing import Any

import pytest
import torch

from pipeline.checkpoint.archives import read_tensor, values_offset
from tests.support.examples import SEED

BEFORE, BEHIND = b"owner" * 50, b"next" * 50
TENSORS: list[torch.Tensor] = [
    torch.arange(6.0).view(2, 3), torch.tensor(3, dtype=torch.int64), torch.zeros(0, 4), torch.zeros(2, 0, 3),
    torch.arange(12).view(3, 4).t(), torch.arange(8.0)[2:5], torch.ones(1, 3)[:, :1],
    *(torch.arange(5).to(kind) for kind in (torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int16,
                                            torch.int8, torch.uint8, torch.bool)),
]  # fmt: skip


def saved(tensor: Any, with_sums: bool = True) -> bytes:
    file, before = io.BytesIO(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(with_sums)
    torch.save(tensor, file)
    torch.serialization.set_crc32_options(before)
    return file.getvalue()


def read(archive: bytes, like: torch.Tensor, checks_sizes: bool = True) -> torch.Tensor:
    file = io.BytesIO(BEFORE + archive + BEHIND)
    return read_tensor(file, len(BEFORE), len(archive), like.shape if checks_sizes else None, like.dtype)


@pytest.mark.parametrize("number", range(len(TENSORS)))
def test_a_tensor_is_what_torch_load_gives(number: int) -> None:
    tensor = TENSORS[number]
    for with_sums in (True, False):
        archive = saved(tensor, with_sums)
        found, wanted = read(archive, tensor), torch.load(io.BytesIO(archive), weights_only=True)
        assert torch.equal(found, wanted) and (found.dtype, found.stride()) == (wanted.dtype, wanted.stride())
    file = io.BytesIO(BEFORE + archive)
    if tensor.is_contiguous() and not tensor.storage_offset():
        begin = values_offset(file, len(BEFORE), len(archive), tensor.shape, tensor.dtype)
        values = file.getvalue()[begin : begin + tensor.nbytes]
        assert values == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif tensor.numel() > 1:
        with pytest.raises(RuntimeError, match="one after the other"):
            values_offset(file, len(BEFORE), len(archive), tensor.shape, tensor.dtype)


def changed(archive: bytes, change: dict[bytes, bytes], **keywords: Any) -> bytes:
    """The archive with texts of its pickle replaced, or its members compressed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as before, zipfile.ZipFile(out, "w", **keywords) as after:
        for member in before.infolist():
            content = before.read(member)
            for old, new in change.items():
                assert member.filename != "archive/data.pkl" or old in content
                content = content.replace(old, new) if member.filename == "archive/data.pkl" else content
            after.writestr(member.filename, content)
    return out.getvalue()


SIX = b"X\x03\x00\x00\x00cpuq\x04K\x06"  # the number of values in the pickle of six
BAD: dict[str, bytes] = {
    "compressed": changed(saved(torch.zeros(6)), {}, compression=zipfile.ZIP_DEFLATED),
    "more values than bytes": changed(saved(torch.zeros(6)), {SIX: SIX[:-1] + b"\x07"}),
    "2^40 values": changed(saved(torch.zeros(6)), {SIX: SIX[:-2] + b"\x8a\x06\x00\x00\x00\x00\x00\x01"}),
    "one value as 2^40": changed(
        saved(torch.zeros(6)), {b"K\x06\x85": b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85", b"K\x01\x85": b"K\x00\x85"}
    ),
    "another type": saved(torch.zeros(6, dtype=torch.int64)),
    "a list": saved([torch.zeros(6)]),
    "a number": saved(6),
    "a parameter": saved(torch.nn.Parameter(torch.zeros(6))),
    "another function": changed(saved(torch.zeros(6)), {b"_rebuild_tensor_v2": b"_rebuild_tensor_v3"}),
    "a device": changed(saved(torch.zeros(6)), {b"X\x03\x00\x00\x00cpu": b"X\x04\x00\x00\x00cuda"}),
    "nothing": b"",
    "no archive": b"\x00" * 1000,
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("checks_sizes", [True, False])
def test_an_archive_of_anything_else_is_refused_before_memory_is_taken(what: str, checks_sizes: bool) -> None:
    tracemalloc.start()
    with pytest.raises(RuntimeError):
        read(BAD[what], torch.zeros(6), checks_sizes)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.campaign)])
def test_a_mutated_archive_is_refused_or_gives_a_tensor_of_its_shape(count: int) -> None:
    tensor, refused = torch.arange(6.0).view(2, 3), 0
    archive = saved(tensor)
    used = [at for at in range(len(archive)) if archive[at] not in b"Z\x00" or at > 1000]
    for seed in range(SEED, SEED + count):
        chosen, content = random.Random(seed), bytearray(archive)
        for _ in range(chosen.randrange(1, 4)):
            at = chosen.choice(used)
            content[at] = chosen.choice((content[at] ^ 1 << chosen.randrange(8), 0, 255, chosen.randrange(256)))
        try:
            found = read(bytes(content), tensor)
        except RuntimeError:
            refused += 1
        else:
            assert found.shape == (2, 3) and found.dtype == torch.float32
    assert count // 20 < refused < count
