"""A step leaves out rows that are as they began: holes in its file, bits in its manifest, and the same values for every reader."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.checkpoint import stored_rows
from pipeline.checkpoint.stored_rows import NORMAL, UNIFORM, FirstWeights, SampledPiece, held_groups, pack
from pipeline.runtime.storage.checksums import BLOCK_BYTES, ChecksummedWriter, VerifiedFile, checksums_of, damage

FIRST = FirstWeights(UNIFORM, 0x123456789ABCDEF, 2.0**-26, 12, 5, 4)


@pytest.mark.long
@pytest.mark.parametrize(
    "first", [FIRST, replace(FIRST, kind=NORMAL, unit=0.1), FirstWeights()], ids=["uniform", "normal", "zeros"]
)
def test_rows_are_the_same_without_numba(first: FirstWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, slots = np.array([0, 3, 977]), np.array([2, 0, 1])
    compiled, plain = np.empty((3, 8), np.float32), np.empty((3, 8), np.float32)
    first.sample(rows, slots, compiled)
    monkeypatch.setattr(stored_rows, "find_spec", lambda name: None)
    first.sample(rows, slots, plain)
    assert np.array_equal(compiled, plain) and (bool(first.kind) == compiled.any())


def test_a_group_is_stored_where_one_of_its_rows_has_changed() -> None:
    changed = np.zeros(100, np.bool_)
    changed[[3, 50, 51, 99]] = True
    bits = np.packbits(changed, bitorder="little")
    assert np.flatnonzero(held_groups(bits, 0, 100, 10)).tolist() == [0, 5, 9]
    assert np.flatnonzero(held_groups(bits, 45, 50, 10)).tolist() == [0]
    assert held_groups(bits, 45, 55, 10).tolist() == [True, False, False, False, False, True]


def _piece(content: bytes = b"", offsets: tuple[int, int] = (100, 4)) -> SampledPiece:
    return SampledPiece(
        "weight", offsets, (95, 8), 10, replace(FIRST, row=offsets[0], column=offsets[1]), "f", 0, len(content)
    )


@pytest.mark.parametrize(
    "box", [(100, 4, 95, 8), (0, 0, 300, 12), (133, 6, 20, 3), (190, 0, 40, 5), (0, 0, 50, 12)], ids=str
)
def test_any_box_of_a_tensor_gets_the_rows_that_are_left_out_and_keeps_the_others(
    box: tuple[int, int, int, int],
) -> None:
    stored = np.arange(10) % 3 == 0
    piece = _piece()
    row, column, num_rows, num_columns = box
    whole = np.full((300, 12), 7.0, np.float32)
    absent = np.flatnonzero(np.repeat(~stored, 10)[:95]) + 100
    sampled = np.empty((len(absent), 12), np.float32)
    replace(FIRST, row=0, column=0).sample(absent, np.arange(len(absent)), sampled)
    whole[absent, 4:12] = sampled[:, 4:12]
    values = torch.full((num_rows, num_columns), 7.0)
    piece.overlay(stored, (row, column), values)
    assert np.array_equal(values.numpy(), whole[row : row + num_rows, column : column + num_columns])


def test_bits_come_back_and_other_bytes_are_refused() -> None:
    stored = np.arange(10) % 3 == 0
    content = pack(stored)
    piece = SampledPiece.of(_piece(content).entry())
    assert piece == _piece(content) and np.array_equal(piece.unpack(content), stored)
    for more in (100, 10**7):
        with pytest.raises(ValueError, match="unpack to more than 2"):
            piece.unpack(pack(np.ones(more, np.bool_)))
    with pytest.raises(ValueError, match="1 bytes of bits for 10 groups"):
        piece.unpack(pack(np.ones(7, np.bool_)))
    with pytest.raises(ValueError, match="incorrect header"):
        piece.unpack(b"no zlib")


@pytest.mark.parametrize("byte", [b"", b"x"], ids=["intact", "changed"])
def test_a_file_with_holes_verifies_and_a_byte_in_a_hole_is_found(tmp_path: Path, byte: bytes) -> None:
    path = str(tmp_path / "file")
    with ChecksummedWriter(path) as writer:
        writer.write(b"begin")
        writer.write_zeros(3 * BLOCK_BYTES)
        writer.write(b"end")
        writer.write_zeros(2 * BLOCK_BYTES)
    entry = writer.entry()
    assert entry == checksums_of(path) and entry["size_bytes"] == 5 * BLOCK_BYTES + 8
    assert os.stat(path).st_blocks * 512 < BLOCK_BYTES
    with open(path, "r+b") as file:
        file.seek(BLOCK_BYTES + 17)
        file.write(byte)
    with VerifiedFile(path, entry) as verified:
        assert verified.read(7) == b"begin\0\0"
        verified.seek(3 * BLOCK_BYTES + 5)
        assert verified.read(4) == b"end\0"
    expected = f"{path} does not match its checksum in bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES}" if byte else ""
    assert damage(path, entry) == expected
