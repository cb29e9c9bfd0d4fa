"""Write whole blocks of a file past the page cache, several at once.

Through the page cache a block is copied into pages, which the kernel writes, and copied out of them to be compared: on two cores the
copies take longer than the disk. Here a block is copied once, into memory of its own that the disk takes it from. When the disk has
acknowledged it, that memory is checksummed; behind all blocks the first page of each is read from the disk and compared.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipeline.runtime.storage.writeback import reserve

NUM_WRITERS = 3  # one keeps most disks busy, a second hides its checksums; on shared storage three are better
PAGE_BYTES = mmap.PAGESIZE


class DirectBlocks:
    """Of the file at `path`, which exists; others may write its other blocks in other ways.

    Raises OSError where the file system has no O_DIRECT.
    """

    def __init__(self, path: str, block_bytes: int) -> None:
        self._path, self._block_bytes = path, block_bytes
        self._descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
        self._threads, self._local = ThreadPoolExecutor(NUM_WRITERS), threading.local()

    def write(self, begin: int, blocks: memoryview) -> tuple[list[str], str]:
        """Checksums of the blocks, which are on the disk then but for an fsync, and what does not read back: empty where all does.

        Raises OSError; there is no space for them, or the disk has refused a block.
        """
        reserve(self._descriptor, begin, len(blocks))  # writes that make a file longer would wait for each other
        offsets = range(0, len(blocks), self._block_bytes)
        parts = [blocks[offset : offset + self._block_bytes] for offset in offsets]
        positions = [begin + offset for offset in offsets]
        checksums = list(self._threads.map(self._write, parts, positions))
        # Behind the writes: between them a read waits for all that the disk has been given.
        are_there = self._threads.map(self._begins_with, positions, parts)
        wrong = [
            position
            for position, checksum, is_there in zip(positions, checksums, are_there, strict=True)
            if not checksum or not is_there
        ]
        if not wrong:
            return checksums, ""
        problem = f"{self._path} does not match its checksum in bytes {wrong[0]} to {wrong[0] + self._block_bytes}"
        return [f"{zlib.crc32(part):08x}" for part in parts], problem

    def _write(self, block: memoryview, begin: int) -> str:
        """Empty where the disk was given other bytes than those of the block."""
        checksum, (memory, _) = zlib.crc32(block), self._buffers()
        np.copyto(np.frombuffer(memory, np.uint8), np.frombuffer(block, np.uint8))  # without the interpreter's lock
        done = 0
        while done < len(memory):
            written = os.pwrite(self._descriptor, memory[done:], begin + done)
            if not written:
                raise OSError(errno.EIO, "the disk takes no more bytes", self._path)
            done += written
        return f"{checksum:08x}" if zlib.crc32(memory) == checksum else ""

    def _begins_with(self, begin: int, block: memoryview) -> bool:
        _, page = self._buffers()
        return os.preadv(self._descriptor, [page], begin) == len(page) and page == block[: len(page)]

    def _buffers(self) -> tuple[memoryview, memoryview]:
        """This thread's block and page; memory that is mapped begins with a page, as O_DIRECT asks."""
        if not hasattr(self._local, "buffers"):
            self._local.buffers = memoryview(mmap.mmap(-1, self._block_bytes)), memoryview(mmap.mmap(-1, PAGE_BYTES))
        found: tuple[memoryview, memoryview] = self._local.buffers
        return found

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._descriptor)


def direct_blocks(path: str, block_bytes: int) -> DirectBlocks | None:
    """None where the file system has no O_DIRECT, or does not read by it."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        blocks = DirectBlocks(path, block_bytes)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(blocks._descriptor, [page], 0)
    except OSError:
        blocks.close()
        return None
    return blocks
