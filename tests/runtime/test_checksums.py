"""What is read is what was written, from any place to any other, or an error."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage import checksums
from pipeline.runtime.storage.checksums import ChecksummedWriter, VerifiedFile, damage


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000, 1037])
def test_every_part_reads_back_and_every_changed_byte_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 100)
    monkeypatch.setattr(checksums, "PIECE_BYTES", 7)
    content, path, generator = os.urandom(size), str(tmp_path / "x"), random.Random(0)
    with ChecksummedWriter(path) as writer:
        for begin in range(0, size, 33):
            writer.write(content[begin : begin + 33])
    entry = writer.entry()
    assert damage(path, entry) == "" and len(entry["crc32"]) == -(-size // 100)
    with VerifiedFile(path, entry) as file:
        assert file.read() == content
        for _ in range(50):
            begin = generator.randrange(size + 1)
            buffer = bytearray(generator.randrange(1, 400))
            file.seek(begin)
            assert bytes(buffer[: file.readinto(buffer)]) == content[begin : begin + len(buffer)]
    for place in range(0, size, 17):
        (tmp_path / "x").write_bytes(content[:place] + bytes([content[place] ^ 32]) + content[place + 1 :])
        assert "does not match its checksum" in damage(path, entry)
        with VerifiedFile(path, entry) as file, pytest.raises(DamagedError):
            file.seek(place)
            file.read(1)


def test_a_file_is_never_written_twice(tmp_path: Path) -> None:
    ChecksummedWriter(str(tmp_path / "x")).close()
    with pytest.raises(FileExistsError):
        ChecksummedWriter(str(tmp_path / "x"))
