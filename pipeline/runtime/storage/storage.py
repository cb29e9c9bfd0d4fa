"""Open, list, publish and remove files by path or URI (s3://...), by iopath's PathManager.

Imports only the standard library and iopath, because configs and the launcher read files by it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import posixpath
import shutil
import time
import uuid
import zlib
from collections.abc import Callable
from functools import cache
from typing import IO, Any, NamedTuple, TypeVar

from iopath.common.file_io import PathManager

from pipeline.runtime.errors import StorageError
from pipeline.runtime.storage.private import open_lock

CHUNK_BYTES = 1 << 20
Made = TypeVar("Made")
logger = logging.getLogger(__name__)  # runtime.logs imports this module


@cache
def path_manager() -> PathManager:
    """Return the only PathManager of the process. Register further handlers on it."""
    return PathManager()


def is_local(path: str) -> bool:
    """Return True if `path` is a plain path on this machine. Raises StorageError if no handler knows its scheme."""
    if "://" not in path:
        return True
    prefix = path.split("://", 1)[0] + "://"
    if prefix == "s3://" and prefix not in path_manager()._path_handlers:
        _register_s3()
    # Without a handler iopath falls back to native calls, which would make a folder named "gs:".
    if prefix not in path_manager()._path_handlers:
        raise StorageError(
            f"no storage handler for {prefix} in {path!r}; use a local path or s3://, "
            "or register an iopath handler with storage.path_manager().register_handler(...)"
        )
    return False


def _register_s3() -> None:
    from pipeline.runtime.storage.object_store import S3Handler

    try:
        path_manager().register_handler(S3Handler())
    except ImportError as error:
        raise StorageError(
            "s3:// paths need boto3: pip install 'torchrec-pipeline[s3]', or pip install boto3"
        ) from error


def _handler_of(path: str) -> Any:
    """Return iopath's handler of a remote path. It may have more methods than PathHandler."""
    return path_manager()._path_handlers[path.split("://", 1)[0] + "://"]


def join(folder: str, *names: str) -> str:
    return posixpath.join(folder, *names)


def dirname(path: str) -> str:
    return posixpath.dirname(path) or "."


def open_file(path: str, mode: str = "r") -> IO[Any]:
    """Open a file. Text is UTF-8, and line ends are not converted. A remote file appears when it is closed."""
    is_local(path)
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    return path_manager().open(path, mode, **text)


def open_raw(path: str) -> IO[bytes]:
    """Open a file without a buffer, to read parts of it with readinto()."""
    if is_local(path):
        return open(path, "rb", buffering=0)
    return open_file(path, "rb")


def exists(path: str) -> bool:
    is_local(path)
    return bool(path_manager().exists(path))


def is_file(path: str) -> bool:
    is_local(path)
    return bool(path_manager().isfile(path))


def is_folder(path: str) -> bool:
    """Return True if the folder exists. In an object store, a folder exists while it contains objects."""
    return os.path.isdir(path) if is_local(path) else bool(list_folder(path))


def list_folder(path: str) -> list[str]:
    """Return the names (not paths) in a folder, sorted; [] if the folder does not exist."""
    if is_local(path):
        return sorted(os.listdir(path)) if os.path.isdir(path) else []
    # S3's handler wants the slash, gives whole keys, and lists the folder's own marker ("a/b/").
    entries = path_manager().ls(path.rstrip("/") + "/")
    own_marker = [key for key in entries if key.endswith("/") and path.rstrip("/").endswith("/" + key.rstrip("/"))]
    return sorted({posixpath.basename(key.rstrip("/")) for key in entries if key not in own_marker})


def list_files(folder: str) -> list[tuple[str, int]]:
    """Return (path below the folder, bytes) of all files below it, sorted; [] if the folder does not exist."""
    if is_local(folder):
        paths = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]
        return sorted((os.path.relpath(path, folder), os.path.getsize(path)) for path in paths)
    handler = _handler_of(folder)
    if hasattr(handler, "files_below"):
        return sorted(handler.files_below(folder))
    found = []
    for name in list_folder(folder):
        path = join(folder, name)
        if is_file(path):
            found.append((name, size_bytes(path)))
        else:
            found += [(join(name, own), size) for own, size in list_files(path)]
    return sorted(found)


def make_folder(path: str) -> None:
    """Make a folder and its parents. In an object store this does nothing, because it has no folders."""
    if is_local(path):
        os.makedirs(path, exist_ok=True)


def remove(path: str) -> None:
    """Remove a file, or a folder with its content. A missing path is not an error."""
    if is_local(path):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.remove(path)
    elif is_file(path):
        path_manager().rm(path)
    else:
        for name in list_folder(path):
            remove(join(path, name))


def retry_once(task: Callable[[], Made], path: str) -> Made:
    """Run `task` again if the disk answers EIO. The second OSError names `path`."""
    try:
        return task()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        logger.warning("%s (%s): trying once more", os.strerror(errno.EIO), path)
    try:
        return task()
    except OSError as error:
        error.filename = error.filename or path
        raise


def rename(source: str, target: str) -> None:
    """Rename a local file or folder. A file replaces an existing file. NFS repeats a request whose
    response was lost. The repeated request fails with ENOENT although the rename is done.
    """
    inode = os.lstat(source).st_ino
    try:
        (os.rename if os.path.isdir(source) else os.replace)(source, target)
    except FileNotFoundError:
        if os.path.lexists(source) or not os.path.lexists(target) or os.lstat(target).st_ino != inode:
            raise


def move_file(source: str, destination: str) -> None:
    """Move a local file to `destination`, where it appears complete. Replaces an old file."""
    if is_local(destination):
        try:
            rename(source, destination)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            staged = f"{destination}.tmp"  # another file system: only a copy beside it can be renamed
            shutil.copyfile(source, staged)
            rename(staged, destination)
            os.remove(source)
        return
    upload_file(source, destination)
    os.remove(source)


def upload_file(source: str, destination: str) -> None:
    """Copy a local file to an object store, where it appears complete. Replaces an old object."""
    # iopath 0.1.10 logs a failed S3 upload and returns False.
    if not path_manager().copy_from_local(source, destination, overwrite=True):
        raise OSError(f"upload of {source} to {destination} failed; iopath's log above says why")


def local_path(path: str) -> str:
    """Return a path that native code can open. A remote file is first downloaded into iopath's cache."""
    return str(path_manager().get_local_path(path)) if not is_local(path) else path


def size_bytes(path: str) -> int:
    if is_local(path):
        return os.path.getsize(path)
    with open_file(path, "rb") as file:
        return file.seek(0, os.SEEK_END)


def most_unpacked_bytes(size_bytes: int) -> int:
    """Return the maximum memory for unpacking a vocabulary's file of `size_bytes`."""
    return max(256 << 20, 32 * size_bytes)


def sha256_of(path: str) -> str:
    digest = hashlib.sha256()
    with open_file(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def read_text(path: str) -> str:
    with open_file(path) as file:
        return str(file.read())


def publish_text(path: str, text: str) -> None:
    """Write a file so that after a crash either the old file or the complete new file exists."""
    publish_bytes(path, text.encode())


def publish_bytes(path: str, content: bytes) -> None:
    """Write bytes in the same way as publish_text."""
    if not is_local(path):
        with open_file(path, "wb") as file:  # an object appears at once, with all its bytes
            file.write(content)
        return
    retry_once(lambda: _publish_local(path, content), path)


def _publish_local(path: str, content: bytes) -> None:
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, exist_ok=True)
    staged = os.path.join(folder, f".{os.path.basename(path)}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open_file(staged, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        rename(staged, path)
    except BaseException:
        remove(staged)
        raise
    sync_folder(folder)


def publish_once(path: str, text: str) -> None:
    """Write a file that must not exist. Raises FileExistsError if it exists with other content."""
    if is_local(path):
        staged = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        publish_text(staged, text)
        try:
            os.link(staged, path)  # fails where there is one, whoever made it in the meantime
        except FileExistsError:
            if not os.path.samefile(staged, path):  # else NFS has sent a request again that was done
                raise
        finally:
            os.remove(staged)
        sync_folder(dirname(path))
        return
    handler = _handler_of(path)
    if hasattr(handler, "put_once") and handler.put_once(path, text.encode()):
        return
    if exists(path) and read_text(path) != text:
        raise FileExistsError(f"{path} is already there")
    publish_text(path, text)
    if read_text(path) != text:
        raise FileExistsError(f"{path} was written by somebody else at the same time")


def swap_text(path: str, expected: str | None, text: str) -> bool:
    """Replace a file whose text is `expected` (None: no file). Return False if the file has another
    text.

    Readers see either the old or the new text. If several writers on any hosts try this, one writer
    succeeds.
    """
    if not is_local(path):
        handler = _handler_of(path)
        if hasattr(handler, "put_instead"):
            return bool(handler.put_instead(path, None if expected is None else expected.encode(), text.encode()))
        return _swap(path, expected, text)
    os.makedirs(dirname(path), exist_ok=True)
    with open_lock(f"{path}.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process
        return _swap(path, expected, text)


def _swap(path: str, expected: str | None, text: str) -> bool:
    if (read_text(path) if exists(path) else None) != expected:
        return False
    publish_text(path, text)
    return True


def sync_folder(folder: str) -> None:
    """Make the names in a local folder durable. POSIX requires this after a rename."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unpack_zlib(content: bytes, most_bytes: int) -> bytes:
    """Return the unpacked bytes. Raise ValueError unless `content` is one zlib stream of at most `most_bytes`."""
    stream = zlib.decompressobj()
    try:
        unpacked = stream.decompress(content, most_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(unpacked) > most_bytes:
        raise ValueError(f"{len(content)} bytes unpack to more than {most_bytes}")
    if not stream.eof or stream.unused_data:
        raise ValueError(f"{len(content)} bytes are not one whole zlib stream")
    return unpacked


class Stamp(NamedTuple):
    """The size and version of a file. Equal stamps mean equal bytes, unless clocks are set back. A
    local file has a modification time and an inode, an S3 object has an ETag, and other files
    have only a size.
    """

    size_bytes: int
    modified_ns: int = 0
    inode: int = 0
    etag: str = ""


def stamp_of(path: str) -> Stamp:
    """Return the stamp of a file. Raises FileNotFoundError if the file is missing."""
    if is_local(path):
        status = os.stat(path)
        return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)
    handler = _handler_of(path)
    if hasattr(handler, "size_and_etag"):
        size, etag = handler.size_and_etag(path)
        return Stamp(size, etag=etag)
    return Stamp(size_bytes(path))


def difference(then: Stamp, now: Stamp) -> str:
    """Return a text with numbers that says what changed; "" if the stamps are equal."""
    found = []
    if now.size_bytes != then.size_bytes:
        found.append(f"it had {then.size_bytes:,} bytes and has {now.size_bytes:,}")
    if now.modified_ns != then.modified_ns:
        found.append(f"it was modified at {_clock(then.modified_ns)} and again at {_clock(now.modified_ns)}")
    if now.inode != then.inode:
        found.append(f"another file has its name (inode {then.inode}, now {now.inode})")
    if now.etag != then.etag:
        found.append(f"its ETag was {then.etag} and is {now.etag}")
    return ", ".join(found)


def _clock(modified_ns: int) -> str:
    seconds, rest = divmod(modified_ns, 1_000_000_000)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(seconds))}.{rest // 1000:06d}"
