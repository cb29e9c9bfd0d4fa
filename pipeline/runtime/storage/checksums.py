"""Compute checksums of blocks while files are written, and verify them while files are read.

Each block of 8 MiB has its own CRC-32, so a rank that reads a part of a file verifies only this
part, and uses exactly the bytes that it verified. CRC-32 finds every flip of one, two or 32
neighbouring bits in a block, but anyone can make other bytes with the same CRC-32. If a key signs,
each block also has a BLAKE3 or SHA-256 digest. If a signature is required, or the digest is the
faster BLAKE3, blocks are verified by the digest. docs/adr/0068 compares the algorithms.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage import signature, storage
from pipeline.runtime.storage.block_sums import (
    BLOCK_BYTES,
    ZERO_BLOCK,
    BlockSums,
    FileEntry,
    counts_problem,
    digest_algorithm,
    digest_of,
    verifying_algorithm,
    zero_digest,
)
from pipeline.runtime.storage.seekable import PositionedReader

WAIT_BEFORE, WRITE, WAIT_AFTER = 1, 2, 4  # of sync_file_range(2)
UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP}
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def begin_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Start to write a part of a file to the disk. Raises OSError if the disk refuses bytes.

    Without this call the kernel starts to write late, and fsync waits for nearly the complete file.
    """
    _call(descriptor, offset, num_bytes, WRITE)


def wait_for_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Wait until these bytes are written to the disk. An fsync is still needed for the disk's cache."""
    _call(descriptor, offset, num_bytes, WAIT_BEFORE | WRITE | WAIT_AFTER)


def _call(descriptor: int, offset: int, num_bytes: int, flags: int) -> None:
    if _sync_file_range is None or not num_bytes:
        return
    if _sync_file_range(descriptor, offset, num_bytes, flags):
        number = ctypes.get_errno()
        if number not in UNSUPPORTED:
            raise OSError(number, os.strerror(number))


PIECE_BYTES = 64 << 20  # checksummed and written side by side
AHEAD_BLOCKS = 8  # that are written and not yet read back
SUMMING_THREADS = 2  # beside one that reads
CACHED_BLOCKS = 2  # torch.load reads the end of an item, then its beginning

ZEROS = bytes(1 << 20)


class ChecksummedWriter(io.RawIOBase):
    """Writes a new local file and computes the checksums of the written bytes. close() makes the
    bytes durable.

    Blocks go to the disk while later blocks are written, and a thread computes the checksums of
    large pieces. With `read_back` another thread reads each block when it is on the disk, and
    close() raises DamagedError if a block differs. `failure` is the first OSError: torch.save
    replaces it by another exception.
    """

    def __init__(self, path: str, read_back: bool = False) -> None:
        self.path, self.size_bytes = path, 0
        self.failure: OSError | None = None
        self._file = open(path, "x+b", buffering=0)  # noqa: SIM115  # closed by close()
        self._sums = BlockSums(BLOCK_BYTES)
        self._begun_bytes = 0
        self._summing: ThreadPoolExecutor | None = None
        self._read_back = _ReadBack(path, self._file.fileno()) if read_back else None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size_bytes

    def write(self, data: Any) -> int:
        """Write bytes. Raises OSError that names the file, the bytes to write and the bytes written so far."""
        view = memoryview(data).cast("B")
        wanted = len(view)
        for begin in range(0, wanted, PIECE_BYTES):
            piece = view[begin : begin + PIECE_BYTES]
            if len(piece) < BLOCK_BYTES:
                self._sums.add(piece)
                self._write(piece, wanted)
            else:
                self._summing = self._summing or ThreadPoolExecutor(1)
                adding = self._summing.submit(self._sums.add, piece)
                try:
                    self._write(piece, wanted)
                finally:
                    adding.result()
            if self._read_back is not None:
                self._read_back.check(self._sums.crcs)
        return wanted

    def write_zeros(self, num_bytes: int) -> None:
        """Write zeros. If the file system supports holes, they are a hole, which takes no space on the disk."""
        left = num_bytes
        while left:
            part = min(left, BLOCK_BYTES - self._sums.filled_bytes)
            if part == BLOCK_BYTES:
                if self._read_back is not None:
                    self._read_back.checked.add(len(self._sums.crcs))
                self._sums.add_zero_block()
            else:
                for begin in range(0, part, len(ZEROS)):
                    self._sums.add(memoryview(ZEROS)[: min(len(ZEROS), part - begin)])
            left -= part
        self.size_bytes += num_bytes
        os.ftruncate(self._file.fileno(), self.size_bytes)
        self._file.seek(self.size_bytes)

    def _write(self, piece: memoryview, wanted: int) -> None:
        while len(piece):
            try:
                written = self._file.write(piece[:BLOCK_BYTES])
                self.size_bytes += written
                if (unbegun := self.size_bytes - self._begun_bytes) >= BLOCK_BYTES:
                    begin_writeback(self._file.fileno(), self._begun_bytes, unbegun)
                    self._begun_bytes = self.size_bytes
            except OSError as error:
                raise self._failed(error, wanted) from None
            piece = piece[written:]

    def _failed(self, error: OSError, wanted: int) -> OSError:
        self.failure = self.failure or OSError(
            error.errno, f"{error.strerror} after {self.size_bytes:,} bytes, with {wanted:,} to write", self.path
        )  # fmt: skip
        return self.failure

    def entry(self) -> FileEntry:
        return self._sums.entry(self.size_bytes)

    def close(self) -> None:
        """Close the file. Raises DamagedError, after closing, if a block that was read back differs."""
        if self.closed:
            return
        try:
            if self.failure is None:
                if self._read_back is not None:
                    self._read_back.check(self.entry()["crc32"])
                os.fsync(self._file.fileno())
        finally:
            if self._summing is not None:
                self._summing.shutdown()
            problem = self._read_back.end(self.failure is None) if self._read_back is not None else None
            self._file.close()
            super().close()
        if problem is not None:
            raise problem


class _ReadBack:
    """Reads the blocks of a file that is being written, in a thread, each when it is on the disk.
    Pages that were read leave the page cache. Otherwise a checkpoint would evict pages that
    other programs use.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  # closed by end(); looking for holes moves its position
        self._checks: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1)
        self._block = bytearray()
        self.checked: set[int] = set()  # blocks of which no byte was written

    def check(self, checksums: list[str]) -> None:
        """Read all blocks so far that were not read yet. Wait while many blocks are not yet read."""
        for index in range(len(self._checks), len(checksums)):
            if index in self.checked:
                self._checks.append(Future())
                self._checks[-1].set_result(None)
            else:
                self._checks.append(self._thread.submit(self._check, index, checksums[index]))
        if len(self._checks) > AHEAD_BLOCKS:
            self._checks[-AHEAD_BLOCKS].exception()

    def _check(self, index: int, checksum: str) -> None:
        begin = index * BLOCK_BYTES
        wait_for_writeback(self._descriptor, begin, BLOCK_BYTES)
        size = min(BLOCK_BYTES, os.fstat(self._descriptor).st_size - begin)
        self._block = self._block or bytearray(size)
        block = memoryview(self._block)[:size]
        found = _read_data(self._file.fileno(), block, begin)
        if found != size or f"{zlib.crc32(block):08x}" != checksum:
            raise DamagedError(
                f"what was written does not read back: {self._path} does not match its checksum in bytes {begin} to {begin + size}"
            )
        _drop_pages(self._descriptor, begin, size)

    def end(self, is_whole: bool) -> Exception | None:
        """Wait for all checks, and return the first error. If not `is_whole`, the rest is not checked."""
        self._thread.shutdown(cancel_futures=not is_whole)
        self._file.close()
        raised = [each.exception() for each in self._checks] if is_whole else []
        return next((error for error in raised if isinstance(error, Exception)), None)


class VerifiedFile(PositionedReader):
    """Reads a file and verifies it by its entry. Raises DamagedError instead of returning bytes
    that differ.

    keep_pages=False: pages of complete blocks leave the cache as soon as they are read, for files
    that are not read again soon.
    """

    def __init__(self, path: str, entry: FileEntry, keep_pages: bool = True) -> None:
        self.path, self._entry, self._position, self._keep_pages = path, entry, 0, keep_pages
        self._size, self._block_bytes = int(entry["size_bytes"]), int(entry["block_bytes"])
        self._blocks: OrderedDict[int, bytearray] = OrderedDict()
        if problem := counts_problem(entry):
            raise DamagedError(f"{path} {problem}")
        if problem := size_problem(path, entry):
            raise DamagedError(problem)
        self._algorithm = verifying_algorithm(entry)
        self._file: IO[bytes] = storage.open_raw(path)
        self._is_local = storage.is_local(path)
        if self._is_local and hasattr(os, "posix_fadvise"):
            # The kernel then reads twice as far ahead, which from a disk takes half the time.
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._size - self._position)]
        done = 0
        while done < len(view):
            index, within = divmod(self._position, self._block_bytes)
            whole = (len(view) - done) // self._block_bytes
            if within == 0 and whole and index not in self._blocks:
                count = self._read_blocks(index, view[done : done + whole * self._block_bytes])
            else:
                part = memoryview(self._block(index))[within : within + len(view) - done]
                view[done : done + len(part)] = part
                count = len(part)
            done += count
            self._position += count
        return done

    def _block(self, index: int) -> bytearray:
        if index in self._blocks:
            self._blocks.move_to_end(index)
            return self._blocks[index]
        begin = index * self._block_bytes
        block = bytearray(min(self._block_bytes, self._size - begin))
        self._read_blocks(index, memoryview(block))
        self._blocks[index] = block
        while len(self._blocks) > CACHED_BLOCKS:
            self._blocks.popitem(last=False)
        return block

    def _read_blocks(self, first: int, target: memoryview) -> int:
        """Fill `target` with complete blocks from block `first` on. The bytes are verified before they are returned."""
        blocks = [target[begin : begin + self._block_bytes] for begin in range(0, len(target), self._block_bytes)]
        if len(blocks) == 1:
            if not self._is_hole(first):
                self._read_again(first, blocks[0])
                self._verify(first, blocks[0])
            else:
                _fill_with_zeros(blocks[0])
            return len(target)
        with ThreadPoolExecutor(SUMMING_THREADS) as threads:  # beside the reads, which go on in the file's order
            checks = []
            for index, block in enumerate(blocks, first):
                if self._is_hole(index):
                    _fill_with_zeros(block)
                    continue
                self._read_again(index, block)
                checks.append(threads.submit(self._verify, index, block))
            for check in checks:
                check.result()
        return len(target)

    def _read_again(self, index: int, block: memoryview) -> None:
        storage.retry_once(lambda: self._read_block(index, block), self.path)

    def _read_block(self, index: int, block: memoryview) -> None:
        begin = index * self._block_bytes
        filled = _read_data(self._file.fileno(), block, begin) if self._is_local else 0
        self._file.seek(begin + filled)
        while filled < len(block):
            count = self._file.readinto(block[filled:])  # type: ignore[attr-defined]
            if not count:
                raise DamagedError(f"{self.path} ends before byte {self._size}")
            filled += count
        if self._is_local and not self._keep_pages and len(block) == self._block_bytes:
            _drop_pages(self._file.fileno(), begin, len(block))

    def verify(self) -> None:
        """Read the complete file except holes. Raises DamagedError if a block differs."""
        size, most = self._block_bytes, 4
        buffer = memoryview(bytearray(min(most * size, max(self._size, 1))))
        index, last = 0, len(self._entry["crc32"])
        while index < last:
            if self._is_hole(index):
                index += 1
                continue
            end = min(index + most, last)
            self._read_blocks(index, buffer[: min(end * size, self._size) - index * size])
            index = end

    def _is_hole(self, index: int) -> bool:
        """Return True if a block should be all zeros, and the file system says that it is a hole."""
        begin = index * BLOCK_BYTES
        is_zero = self._entry["crc32"][index] == ZERO_BLOCK and begin + BLOCK_BYTES <= self._size
        if self._algorithm:
            is_zero = is_zero and self._entry[self._algorithm][index] == zero_digest(self._algorithm)
        if not (self._is_local and is_zero and self._block_bytes == BLOCK_BYTES):
            return False
        try:
            return os.lseek(self._file.fileno(), begin, os.SEEK_DATA) >= begin + BLOCK_BYTES
        except OSError as error:  # ENXIO: nothing was written from here to the end
            return error.errno == errno.ENXIO

    def _verify(self, index: int, block: memoryview) -> None:
        if self._algorithm:
            is_same = digest_of(self._algorithm, block) == self._entry[self._algorithm][index]
        else:
            is_same = f"{zlib.crc32(block):08x}" == self._entry["crc32"][index]
        if not is_same:
            begin = index * self._block_bytes
            raise DamagedError(f"{self.path} does not match its checksum in bytes {begin} to {begin + len(block)}")

    def close(self) -> None:
        if not self.closed:
            if hasattr(self, "_file"):
                self._file.close()
            self._blocks.clear()
            super().close()


def _read_data(descriptor: int, block: memoryview, begin: int) -> int:
    """Fill `block` from byte `begin` of a file; holes are zeros. Return the number of bytes that were read."""
    done = 0
    while done < len(block):
        position = begin + done
        data = _seek(descriptor, position, os.SEEK_DATA, begin + len(block))
        if data > position:
            end = min(data, begin + len(block))
            if end > os.fstat(descriptor).st_size:
                break
            _fill_with_zeros(block[done : end - begin])
            done = end - begin
            continue
        end = min(_seek(descriptor, position, os.SEEK_HOLE, begin + len(block)), begin + len(block))
        count = os.preadv(descriptor, [block[done : end - begin]], position)
        if not count:
            break
        done += count
    return done


def _seek(descriptor: int, position: int, whence: int, otherwise: int) -> int:
    """Return the position of the next data (or hole, by `whence`) from `position` on; `otherwise` if there is none."""
    try:
        return os.lseek(descriptor, position, whence)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return otherwise
        return position if whence == os.SEEK_DATA else otherwise  # a file system that does not say


def _drop_pages(descriptor: int, begin: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, begin, num_bytes, os.POSIX_FADV_DONTNEED)


def _fill_with_zeros(block: memoryview) -> None:
    for begin in range(0, len(block), len(ZEROS)):
        block[begin : begin + len(ZEROS)] = ZEROS[: len(block) - begin]


def checksums_of(path: str) -> FileEntry:
    """Return the entry of an existing local file."""
    sums = BlockSums(BLOCK_BYTES)
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(BLOCK_BYTES), b""):
            sums.add(memoryview(block))
        return sums.entry(file.tell())


def same_bytes(path: str, entry: FileEntry, wanted: FileEntry) -> bool:
    """Return True if the file at `path` has the bytes that `wanted` describes. `entry` was made from this file."""
    keys = ["size_bytes", "block_bytes", "crc32"]
    if any(entry[key] != wanted[key] for key in keys):
        return False
    algorithm = digest_algorithm(wanted)
    if algorithm and algorithm in entry:
        return bool(entry[algorithm] == wanted[algorithm])
    return not signature.is_required() or not damage(path, wanted)


def copy_file(source: str, target: str) -> FileEntry:
    """Copy a local file to a new file, and make it durable. Return the entry of the copied bytes."""
    with open(source, "rb") as file, ChecksummedWriter(target) as writer:
        while piece := file.read(BLOCK_BYTES):
            writer.write(piece)
    return writer.entry()


def read_verified(path: str, entry: FileEntry) -> bytes:
    """Return the content of a small file. Raises DamagedError if it differs from its entry."""
    with VerifiedFile(path, entry) as file:
        return file.read()


def size_problem(path: str, entry: FileEntry) -> str:
    """Return "" if a file (local or remote) has the size in its entry, otherwise what is wrong."""
    if not storage.is_file(path):
        return f"{path} is missing"
    found = storage.size_bytes(path)
    return "" if found == entry["size_bytes"] else f"{path} has {found} bytes, its manifest says {entry['size_bytes']}"


def damage(path: str, entry: FileEntry) -> str:
    """Return "" if a file has the size and checksums in its entry, otherwise what is wrong. Reads the complete file."""
    try:
        with VerifiedFile(path, entry) as file:
            file.verify()
    except (DamagedError, OSError, KeyError, TypeError, ValueError) as error:
        return str(error) or repr(error)
    return ""


def write_blocks(path: str, blocks: Iterable[Any]) -> FileEntry:
    """Write buffers, one after the other, to a new file. Return its checksums."""
    with ChecksummedWriter(path) as writer:
        for block in blocks:
            writer.write(block)
        writer.close()
        return writer.entry()
