"""What is read is what was written, from any place to any other, or an error."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import IO

import pytest

from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage import checksums
from pipeline.runtime.storage.checksums import ChecksummedWriter, VerifiedFile, damage


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000, 1037])
@pytest.mark.parametrize(
    ("piece", "read_back"), [(7, False), (7, True), (250, True)], ids=["small", "read-back", "large"]
)
def test_every_part_reads_back_and_every_changed_byte_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, piece: int, read_back: bool
) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 100)
    monkeypatch.setattr(checksums, "PIECE_BYTES", piece)
    content, path, generator = os.urandom(size), str(tmp_path / "x"), random.Random(0)
    with ChecksummedWriter(path, read_back) as writer:
        for begin in range(0, size, 33 if piece < 100 else 333):  # larger ones are summed beside the writes
            writer.write(content[begin : begin + (33 if piece < 100 else 333)])
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


def test_a_writer_that_reads_back_finds_bytes_that_are_not_those_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with (
        pytest.raises(DamagedError, match="does not read back"),
        ChecksummedWriter(str(path), read_back=True) as writer,
    ):
        writer.write(bytes(1000))
        with open(path, "r+b") as file:
            file.seek(500)
            file.write(b"!")


def test_a_piece_that_was_not_written_whole_is_no_read_back_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 100)
    with pytest.raises(OSError, match="after 200 bytes, with 1,000 to write"), ChecksummedWriter(str(tmp_path / "x"), read_back=True) as writer:  # fmt: skip
        writer.write(bytes(200))
        monkeypatch.setattr(writer, "_file", _Full(writer._file))
        writer.write(bytes(1000))


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice on its page cache")
def test_whole_blocks_of_a_file_that_is_read_once_leave_the_page_cache_and_no_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 100)
    path, content, dropped = str(tmp_path / "x"), os.urandom(1037), []
    with ChecksummedWriter(path) as writer:
        writer.write(content)

    def advise(descriptor: int, begin: int, num_bytes: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            dropped.append((begin, num_bytes))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    with VerifiedFile(path, writer.entry()) as file:
        assert file.read() == content and dropped == []
    with VerifiedFile(path, writer.entry(), keep_pages=False) as file:
        file.seek(50)  # the first block by the parts of it, the next ones at once, and the last is none that is whole
        assert file.read() == content[50:]
        assert sorted(dropped) == [(begin, 100) for begin in range(0, 1000, 100)]
        file.seek(0)
        assert file.read() == content


class _Full:
    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.fileno, self.close = file, file.fileno, file.close

    def write(self, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")
