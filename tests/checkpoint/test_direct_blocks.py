"""Large pieces of a save go past the page cache, to the same file and checksums, and what the disk did not take is noticed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pipeline.checkpoint import direct_blocks as module
from pipeline.checkpoint.direct_blocks import direct_blocks
from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage import checksums
from pipeline.runtime.storage.checksums import ChecksummedWriter, damage
from tests.support.messages import names

BLOCK = 8192


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(checksums, "PIECE_BYTES", 4 * BLOCK)
    (tmp_path / "probe").write_bytes(b"1")
    blocks = direct_blocks(str(tmp_path / "probe"), BLOCK)
    if blocks is None:
        pytest.skip("this file system has no O_DIRECT")
    blocks.close()
    return str(tmp_path / "file")


@pytest.mark.parametrize("head", [0, 100, BLOCK, BLOCK + 1])
def test_the_file_and_its_checksums_are_those_of_a_write_through_the_page_cache(path: str, head: int) -> None:
    parts = [os.urandom(head), os.urandom(5 * BLOCK + 77), os.urandom(10), os.urandom(4 * BLOCK), b"end"]
    entries = []
    for name, direct in (("", None), (".direct", direct_blocks)):
        with ChecksummedWriter(path + name, read_back=True, direct=direct) as writer:
            for part in parts:
                writer.write(part)
        entries.append(writer.entry())
        assert Path(path + name).read_bytes() == b"".join(parts)
        assert damage(path + name, writer.entry()) == ""
    assert entries[0] == entries[1]


def test_bytes_that_the_disk_did_not_take_are_found(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lossy:
        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def pwrite(self, descriptor: int, data: memoryview, begin: int) -> int:
            return len(data) if begin == 2 * BLOCK else os.pwrite(descriptor, data, begin)

    monkeypatch.setattr(module, "os", Lossy())
    with (
        pytest.raises(DamagedError, match=f"does not read back.* {2 * BLOCK} to {3 * BLOCK}"),
        ChecksummedWriter(path, read_back=True, direct=direct_blocks) as writer,
    ):
        writer.write(os.urandom(5 * BLOCK))
    assert writer.closed and len(writer.entry()["crc32"]) == 5


def test_a_full_disk_is_told_before_any_of_the_blocks_is_written(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, begin: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "reserve", full)
    with (
        pytest.raises(OSError, match=names(f"{BLOCK:,} {5 * BLOCK:,}")),
        ChecksummedWriter(path, read_back=True, direct=direct_blocks) as writer,
    ):
        writer.write(bytes(100))
        writer.write(os.urandom(5 * BLOCK))
    assert writer.failure is not None and writer.failure.errno == errno.ENOSPC


def test_a_file_system_without_direct_writes_gets_them_through_the_page_cache(path: str) -> None:
    content = os.urandom(5 * BLOCK)
    with ChecksummedWriter(path, read_back=True, direct=lambda path, block_bytes: None) as writer:
        writer.write(content)
    assert Path(path).read_bytes() == content
