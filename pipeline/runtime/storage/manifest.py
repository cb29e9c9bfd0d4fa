"""Write and read manifest.json, which lists the files of a folder with sizes and checksums and is sealed by a SHA-256.

A checkpoint step, an artifact and a registry version are such folders. Each adds values of its own; "format_version" and
"files" (name -> FileEntry) mean the same in all three. The text opens with the SHA-256 of all that follows, so a changed
manifest is refused, not read. Where a key signs, a signature of that SHA-256 stands before it.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from pipeline.runtime.errors import DamagedError
from pipeline.runtime.json_values import finite
from pipeline.runtime.storage import signature, storage

MANIFEST = "manifest.json"
SEAL = re.compile(r'\{\n (?:"signature": "(?P<signature>[0-9a-f]{128})",\n )?"sha256": "(?P<sha256>[0-9a-f]{64})",')


def seal_manifest(values: dict[str, Any]) -> str:
    """The text of a manifest file; a number that is not finite is null."""
    text = json.dumps(finite(values), indent=1, allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    signed = signature.signature_of(digest)
    opening = f'"signature": "{signed}",\n ' if signed else ""
    return f'{{\n {opening}"sha256": "{digest}",{text[1:]}'


def sealed_digest(path: str) -> str:
    """The SHA-256 that a manifest file opens with. Raises DamagedError where it has none."""
    try:
        seal = SEAL.match(storage.read_text(path))
    except (FileNotFoundError, UnicodeDecodeError, IsADirectoryError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from None
    if seal is None:
        raise DamagedError(f"{path} does not match its checksum")
    return seal["sha256"]


def open_manifest(path: str, *format_versions: int) -> dict[str, Any]:
    """The values of the manifest file at `path`. Raises DamagedError for a changed file, or one of another release."""
    values = read_sealed(path)
    if problem := files_problem(values.get("files")):
        raise DamagedError(f"{path}: {problem}")
    if (found := values.get("format_version")) not in format_versions:
        known = " and ".join(map(str, format_versions))
        raise DamagedError(f"{path} has format_version {found}, this release reads {known}")
    return values


def read_sealed(path: str) -> dict[str, Any]:
    """The values that seal_manifest wrote. Raises DamagedError where the file is missing or not what was written."""
    try:
        text = storage.read_text(path)
    except (FileNotFoundError, UnicodeDecodeError, IsADirectoryError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from None
    seal = SEAL.match(text)
    if seal is None or hashlib.sha256(("{" + text[seal.end() :]).encode()).hexdigest() != seal["sha256"]:
        raise DamagedError(f"{path} does not match its checksum")
    if text_of := signature.problem(seal["sha256"], seal["signature"] or ""):
        raise DamagedError(f"{path} {text_of}")
    try:
        values: dict[str, Any] = json.loads(text)
    except (RecursionError, json.JSONDecodeError) as error:
        raise DamagedError(f"{path} cannot be read: {type(error).__name__}") from None
    del values["sha256"]
    values.pop("signature", None)
    return values


def files_problem(files: object) -> str:
    """Empty, or what no list of files has: its numbers are what memory is asked for."""
    if not isinstance(files, dict):
        return "it lists no files"
    for name, entry in files.items():
        about = entry if isinstance(entry, dict) else {}
        size, block, crcs = about.get("size_bytes"), about.get("block_bytes"), about.get("crc32")
        if type(size) is not int or type(block) is not int or size < 0 or block < 1:
            return f"file {name!r} has size_bytes={size} and block_bytes={block}"
        if not isinstance(crcs, list) or len(crcs) != -(-size // block):
            return f"file {name!r} of {size} bytes has not one checksum for each {block}"
    return ""
