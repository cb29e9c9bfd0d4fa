"""A packed file reads as the one that was not packed, from any place, and one that is not whole is damaged."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.checkpoint.owners import HEADER_BYTES
from pipeline.extras.differential import packed
from pipeline.extras.differential.packed import PackedFile, PackedWriter
from pipeline.runtime.errors import DamagedError

HEADER = b"h" * HEADER_BYTES


def _packed(content: bytes, at_once: int) -> bytes:
    file = io.BytesIO()
    file.write(HEADER)
    writer = PackedWriter(file)
    for first in range(0, len(content), at_once):
        assert writer.write(content[first : first + at_once]) == len(content[first : first + at_once])
    assert writer.tell() == HEADER_BYTES + len(content)
    writer.finish()
    return file.getvalue()


def _open(content: bytes) -> Any:
    return PackedFile(io.BytesIO(content), len(content), "file")


@pytest.mark.parametrize("size", [0, 1, 3, 4096, 5000, 12_289])
def test_a_packed_file_reads_as_the_one_that_was_not(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "BLOCK_BYTES", 4096)
    generator = np.random.default_rng(size)
    content = generator.normal(0, 0.01, -(-size // 4)).astype(np.float32).tobytes()[:size]
    kept = _packed(content, 1000)
    assert kept == _packed(content, 7) and _open(kept).read() == HEADER + content
    whole, file = HEADER + content, _open(kept)
    for begin in generator.integers(0, len(whole), 40).tolist():
        file.seek(begin)
        count = int(generator.integers(0, 6000))
        assert file.tell() == begin and file.read(count) == whole[begin : begin + count]


def test_numbers_become_smaller_and_tensors_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(3000, 16, generator=torch.Generator().manual_seed(0)) * 0.01
    file = io.BytesIO()
    torch.save(values, file)
    kept = _packed(file.getvalue(), 1 << 16)
    assert len(kept) < 0.9 * len(file.getvalue())
    stream = _open(kept)
    stream.seek(HEADER_BYTES)
    assert torch.equal(torch.load(io.BytesIO(stream.read()), weights_only=True), values)


def test_what_is_no_packed_file_is_damaged() -> None:
    kept = _packed(bytes(range(256)) * 40, 999)
    index = kept.rindex(b"[[")
    damaged = [b"", HEADER, HEADER + b"x" * 20, kept[:-1], kept[:index], kept[: index - 1] + kept[index:]]
    damaged += [kept[:index] + b"{" + kept[index + 1 :], kept[:index] + kept[index:].replace(b"[[", b"[9")]
    for content in damaged:
        with pytest.raises(DamagedError):
            _open(content).read()
    plane = _packed(bytes(20_000), 999)
    torn = plane[: HEADER_BYTES + 1] + b"\xff\xff" + plane[HEADER_BYTES + 3 :]
    with pytest.raises(DamagedError, match="unpacked"):
        _open(torn).read()
