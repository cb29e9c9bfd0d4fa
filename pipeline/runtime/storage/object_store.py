"""Fix iopath's S3 handler: errors with path and bytes, retries, and no partial objects.

iopath 0.1.10 logs a failed upload and returns False, says that an object does not exist if the
store answers 403 or 503, uploads a partial object if the writing code raises, reads complete
objects into memory, and caches by key without the bucket.
"""

from __future__ import annotations

import io
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from types import TracebackType
from typing import IO, Any

from iopath.common.s3 import S3PathHandler

from pipeline.runtime.storage.seekable import PositionedReader

ATTEMPTS = 8  # of a request: with jitter and a doubling pause up to 20 s that outlasts a minute of 503
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 60  # without a byte
PART_BYTES, PARTS_AT_ONCE = 16 << 20, 4  # of an upload: what it holds in memory
CHUNK_BYTES = 1 << 20
NOT_FOUND = {"404", "NoSuchKey", "NotFound", "NoSuchBucket"}
TAKEN = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
WITHOUT_CONDITION = {"NotImplemented", "501"}


class S3Handler(S3PathHandler):
    """Handles s3://bucket/key. Methods raise OSError with the path; FileNotFoundError only for missing objects."""

    def __init__(self, attempts: int = ATTEMPTS) -> None:
        # profile: iopath's default names one ("saml") that other people's machines lack.
        super().__init__(
            profile=None,
            transfer_config_kwargs={
                "multipart_threshold": PART_BYTES, "multipart_chunksize": PART_BYTES, "max_concurrency": PARTS_AT_ONCE,
            },
        )  # fmt: skip
        self._attempts, self._lock = attempts, Lock()

    def _get_client(self, bucket: str) -> Any:
        """Return the client, which several threads may use. botocore retries 5xx, throttling and lost connections."""
        import boto3
        from botocore.config import Config

        with self._lock:
            if not hasattr(self, "client"):
                config = Config(
                    retries={"mode": "standard", "total_max_attempts": self._attempts},
                    connect_timeout=CONNECT_TIMEOUT_S,
                    read_timeout=READ_TIMEOUT_S,
                )
                self.client = boto3.Session().client("s3", config=config)
        return self.client

    def _local_cache_path(self, path: str) -> str:
        bucket, key = self._parse_uri(path)
        return os.path.join(os.path.dirname(super()._local_cache_path(f"s3://{bucket}/x")), bucket, key)

    def _head_object(self, path: str) -> dict[str, Any] | None:
        bucket, key = self._parse_uri(path)
        try:
            with explained(f"looking for {path}"):
                return dict(self._get_client(bucket).head_object(Bucket=bucket, Key=key))
        except FileNotFoundError:
            return None

    def size_and_etag(self, path: str) -> tuple[int, str]:
        """Return size and ETag of an object. Raises FileNotFoundError if it is missing."""
        head = self._head_object(path)
        if head is None:
            raise FileNotFoundError(f"{path} is not there")
        return int(head["ContentLength"]), str(head["ETag"])

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        bucket, key = self._parse_uri(path)
        if "w" in mode:
            upload = _Upload(self._get_client(bucket), bucket, key, path)
            return upload if "b" in mode else _TextUpload(upload)
        reader = _RangeReader(self._get_client(bucket), bucket, key, path, self._attempts)
        return reader if "b" in mode else io.TextIOWrapper(io.BufferedReader(reader), encoding="utf-8", newline="")  # type: ignore[return-value]

    def _copy_from_local(self, local_path: str, dst_path: str, overwrite: bool = False, **kwargs: Any) -> bool:
        bucket, key = self._parse_uri(dst_path)
        if not overwrite and self._exists(dst_path):
            raise FileExistsError(f"{dst_path} is already there")
        with explained(f"upload of {os.path.getsize(local_path):,} bytes to {dst_path}"):
            self._get_client(bucket).upload_file(local_path, bucket, key, Config=self.transfer_config)
        return True

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        with explained(f"download of {path}"):
            return str(super()._get_local_path(path, **kwargs))

    def _ls(self, path: str, **kwargs: Any) -> list[str]:
        """Yield complete keys, files first. iopath's method hides the status of the response."""
        bucket, prefix = self._parse_uri(path)
        keys: list[str] = []
        folders: list[str] = []
        with explained(f"listing {path}"):
            pages = self._get_client(bucket).get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=bucket, Prefix=prefix, Delimiter="/"):
                keys += [entry["Key"] for entry in page.get("Contents", [])]
                folders += [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
        return keys + folders

    def files_below(self, path: str) -> list[tuple[str, int]]:
        """Yield (key below `path`, bytes) of all objects. One request lists a thousand objects."""
        bucket, prefix = self._parse_uri(path.rstrip("/") + "/")
        with explained(f"listing {path}"):
            pages = self._get_client(bucket).get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
            found = [
                (entry["Key"][len(prefix) :], int(entry["Size"]))
                for page in pages
                for entry in page.get("Contents", [])
            ]
        return [(key, size) for key, size in found if key and not key.endswith("/")]

    def _rm(self, path: str, **kwargs: Any) -> None:
        with explained(f"removing {path}"):
            super()._rm(path, **kwargs)

    def put_once(self, path: str, content: bytes) -> bool:
        """Write an object that must not exist, in one conditional request.

        Returns False if the store does not support such requests. Raises FileExistsError if the
        object has other content.
        """
        from botocore.exceptions import ClientError

        bucket, key = self._parse_uri(path)
        with explained(f"upload of {len(content):,} bytes to {path}"):
            try:
                self._get_client(bucket).put_object(Bucket=bucket, Key=key, Body=content, IfNoneMatch="*")
            except ClientError as error:
                code = str(error.response["Error"].get("Code"))
                if code in WITHOUT_CONDITION:
                    return False
                if code not in TAKEN:
                    raise
                # Perhaps by the first attempt of this very request, whose answer was lost.
                with self._open(path, "rb") as file:
                    if file.read() != content:
                        raise FileExistsError(f"{path} is already there") from None
        return True

    def put_instead(self, path: str, expected: bytes | None, content: bytes) -> bool:
        """Replace an object with content `expected` (None: no object). Return False if it has other
        content. The request is conditional (If-Match). If the store does not support this, the
        object is written without condition.
        """
        from botocore.exceptions import ClientError

        if expected is None:
            try:
                if self.put_once(path, content):
                    return True
            except FileExistsError:
                return False
        bucket, key = self._parse_uri(path)
        found, tag = self._read_with_tag(path)
        if found != expected:
            return found == content
        target: dict[str, Any] = {"Bucket": bucket, "Key": key, "Body": content}
        with explained(f"upload of {len(content):,} bytes to {path}"):
            try:
                self._get_client(bucket).put_object(**target, **({"IfMatch": tag} if tag else {}))
            except ClientError as error:
                code = str(error.response["Error"].get("Code"))
                if code in WITHOUT_CONDITION:
                    self._get_client(bucket).put_object(**target)
                elif code in TAKEN:  # perhaps by the first attempt of this very request, whose answer was lost
                    return self._read_with_tag(path)[0] == content
                else:
                    raise
        return True

    def _read_with_tag(self, path: str) -> tuple[bytes | None, str]:
        bucket, key = self._parse_uri(path)
        try:
            with explained(f"reading {path}"):
                answer = self._get_client(bucket).get_object(Bucket=bucket, Key=key)
                return answer["Body"].read(), answer["ETag"]
        except FileNotFoundError:
            return None, ""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Convert what boto3 raises to OSError or FileNotFoundError with the message that `what` failed."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (ClientError, BotoCoreError, Boto3Error) as error:
        cause = error.__context__ if isinstance(error, Boto3Error) else error  # upload_file hides the answer in a text
        if not isinstance(cause, ClientError):
            raise OSError(f"{what} failed: {type(error).__name__}: {error}") from None
        found = cause.response.get("Error", {})
        status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
        kind = FileNotFoundError if str(found.get("Code")) in NOT_FOUND else OSError
        raise kind(f"{what} failed: {status} {found.get('Code')} {found.get('Message', '')}".rstrip()) from None


class _RangeReader(PositionedReader):
    """Reads parts of an object. If a response breaks off, the remaining bytes are requested again."""

    def __init__(self, client: Any, bucket: str, key: str, path: str, attempts: int) -> None:
        self._client, self._bucket, self._key, self._path, self._attempts = client, bucket, key, path, attempts
        with explained(f"looking for {path}"):
            head = client.head_object(Bucket=bucket, Key=key)
        self._size, self._etag, self._position = int(head["ContentLength"]), head["ETag"], 0

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or read the bytes that are left."""
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._size - self._position)]
        done = attempt = 0
        while done < len(view):
            try:
                done = self._fetch(view, done)
            except _BrokenOffError:
                attempt += 1
                if attempt == self._attempts:
                    raise
                time.sleep(random.random() * min(2 ** (attempt - 1), 20))
        self._position += done
        return done

    def _fetch(self, view: memoryview, done: int) -> int:
        """Read into `view` from byte `done` on. Return the bytes read; fewer if the response breaks off."""
        from urllib3.exceptions import HTTPError

        begin, end = self._position + done, self._position + len(view) - 1
        what = f"reading bytes {begin} to {end} of {self._path}"
        with explained(what):
            body = self._client.get_object(
                Bucket=self._bucket, Key=self._key, Range=f"bytes={begin}-{end}", IfMatch=self._etag
            )["Body"]
            first = done
            try:
                while done < len(view) and (chunk := body.read(min(CHUNK_BYTES, len(view) - done))):
                    view[done : done + len(chunk)] = chunk
                    done += len(chunk)
            except Exception as error:  # urllib3's, http.client's, the socket's or botocore's
                if done == first:
                    raise _BrokenOffError(f"{what} failed: {type(error).__name__}: {error}") from None
            finally:
                with suppress(HTTPError, OSError):
                    body.close()
        if done == first:
            raise _BrokenOffError(f"{what} failed: the answer is empty")
        return done


class _BrokenOffError(OSError):
    """The response came, but its body broke off. botocore does not retry this."""


class _Upload(io.BytesIO):
    """An object that is uploaded when it is closed, unless the code that wrote it raised an exception."""

    def __init__(self, client: Any, bucket: str, key: str, path: str) -> None:
        super().__init__()
        self._client, self._bucket, self._key, self._path = client, bucket, key, path
        self.is_wanted = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_wanted = kind is None
        self.close()

    def close(self) -> None:
        if self.closed:
            return
        content = self.getvalue()
        super().close()
        if self.is_wanted:
            with explained(f"upload of {len(content):,} bytes to {self._path}"):
                self._client.put_object(Bucket=self._bucket, Key=self._key, Body=content)


class _TextUpload(io.TextIOWrapper):
    def __init__(self, upload: _Upload) -> None:
        super().__init__(upload, encoding="utf-8", newline="")
        self._upload = upload

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._upload.is_wanted = kind is None
        self.close()
