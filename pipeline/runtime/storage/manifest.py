"""Write and read manifest.json, which lists the files of a folder and is sealed by a SHA-256.

A checkpoint step, an artifact, a delta and a registry version are such folders. Each adds values of
its own; "format_version" and "files" (name -> FileEntry) mean the same in all of them. The text
begins with the SHA-256 of all following text, so a changed manifest is refused. If a key is set for
signing, the signature is before the SHA-256 (signature.py). A signed pointer is sealed in the same
way.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from pipeline.runtime.errors import ConfigError, DamagedError
from pipeline.runtime.json_values import finite
from pipeline.runtime.storage import signature, storage
from pipeline.runtime.storage.block_sums import entry_problem
from pipeline.runtime.storage.signature import Purpose

MAX_NAME_BYTES = 1024
FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]")  # control characters; on Windows \ separates parts


def name_problem(name: object) -> str:
    """Return "" if `name` is a relative path below a folder, otherwise what is wrong with the name."""
    if not isinstance(name, str):
        return f"is a {type(name).__name__}, not a name"
    if not name or len(name.encode(errors="replace")) > MAX_NAME_BYTES:
        return f"has {len(name)} characters: a name has 1 to {MAX_NAME_BYTES} bytes"
    if FORBIDDEN.search(name) or "://" in name:
        return "has a control character, a backslash or '://' in its name"
    if wrong := [part for part in name.split("/") if part in ("", ".", "..")]:
        return f"leads out of its folder: a part of its name is {wrong[0]!r}"
    return ""


def path_below(folder: str, name: object, source: str) -> str:
    """Return the path of `name` below `folder`. Raises DamagedError if it leads elsewhere."""
    if problem := name_problem(name):
        raise DamagedError(f"{source}: {str(name)[:100]!r} {problem}")
    return storage.join(folder, str(name))


MANIFEST = "manifest.json"
SEAL = re.compile(r'\{\n (?:"signature": "(?P<signature>[0-9a-f]{128})",\n )?"sha256": "(?P<sha256>[0-9a-f]{64})",')
# The value that orders what is signed for a purpose; an artifact has no order.
NUMBERS = {
    Purpose.STEP: "step",
    Purpose.DELTA: "sequence",
    Purpose.VERSION: "version",
    Purpose.CHAMPION: "number",
    Purpose.PIN: "number",
    Purpose.CANARY: "number",
}


def seal_manifest(values: dict[str, Any], purpose: Purpose) -> str:
    """Return the text of a manifest file. Numbers that are not finite are written as null."""
    text = json.dumps(finite(values), indent=1, allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    signed = signature.signature_of(digest, purpose, values.get(NUMBERS.get(purpose, "")))
    opening = f'"signature": "{signed}",\n ' if signed else ""
    return f'{{\n {opening}"sha256": "{digest}",{text[1:]}'


def sealed_digest(path: str) -> str:
    """Return the SHA-256 at the beginning of a manifest file. Raises DamagedError if there is none."""
    seal = SEAL.match(_text_of(path))
    if seal is None:
        raise DamagedError(f"{path} does not match its checksum")
    return seal["sha256"]


def open_manifest(path: str, purpose: Purpose, *format_versions: int) -> dict[str, Any]:
    """Return the values of the manifest file at `path`.

    Raises DamagedError: the file was changed, is of another release, or lists invalid files.
    """
    values = read_sealed(path, purpose)
    if problem := files_problem(values.get("files")):
        raise DamagedError(f"{path}: {problem}")
    attempt = values.get("attempt")  # the folder below a step or delta that has its files
    if attempt not in (None, "") and (problem := name_problem(attempt)):
        raise DamagedError(f"{path}: attempt {str(attempt)[:100]!r} {problem}")
    if (found := values.get("format_version")) not in format_versions:
        known = " and ".join(map(str, format_versions))
        raise DamagedError(f"{path} has format_version {str(found)[:100]}, this release reads {known}")
    return values


def read_sealed(path: str, purpose: Purpose | None) -> dict[str, Any]:
    """Return the values that seal_manifest wrote. `purpose` None ignores the signature.

    Raises DamagedError: the file is missing, was changed, or is not signed as required.
    """
    return unseal(_text_of(path), path, purpose)


def unseal(text: str, path: str, purpose: Purpose | None) -> dict[str, Any]:
    """Return the values of a sealed text, which was read from `path`. Raises DamagedError as read_sealed() does."""
    seal = SEAL.match(text)
    if seal is None or hashlib.sha256(("{" + text[seal.end() :]).encode()).hexdigest() != seal["sha256"]:
        raise DamagedError(f"{path} does not match its checksum")
    try:
        values: dict[str, Any] = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise DamagedError(f"{path} cannot be read: {type(error).__name__}") from None
    del values["sha256"]
    values.pop("signature", None)
    if purpose is not None:
        number = values.get(NUMBERS.get(purpose, ""))
        if problem := signature.signature_problem(seal["signature"] or "", seal["sha256"], purpose, number):
            raise DamagedError(f"{path} {problem}")
    return values


def pointer_text(values: dict[str, Any], purpose: Purpose) -> str:
    """Return the text of a pointer, a small file that gets replaced. It is sealed, and signed if a key is set."""
    return seal_manifest(values, purpose) if signature.is_signing() else json.dumps(values, indent=1)


def parse_pointer(text: str, path: str, purpose: Purpose) -> dict[str, Any]:
    """Return the values of a pointer that was read from `path`.

    Raises DamagedError: the pointer was not written by pointer_text(), is not signed as required,
    or is older than a pointer that was accepted before.
    """
    if SEAL.match(text):
        values = unseal(text, path, purpose)
    elif signature.is_required():
        raise DamagedError(f"{path} is not signed, and a signature is required")
    else:
        try:
            values = json.loads(text)
        except (RecursionError, ValueError) as error:
            raise DamagedError(f"{path} is damaged ({error})") from None
    if not isinstance(values, dict):
        raise DamagedError(f"{path} is damaged: it holds a {type(values).__name__}")
    number = values.get("number")
    if signature.is_required():
        if type(number) is not int:
            raise DamagedError(f"{path} has number {str(number)[:100]!r}")
        if problem := signature.age_problem(path, number):
            raise DamagedError(f"{path} {problem}")
        signature.accept(path, number)
    return values


def check_still_signed(path: str) -> None:
    """Raise ConfigError if the pointer at `path` is signed, but no key is set to sign the next pointer."""
    try:
        seal = SEAL.match(storage.read_text(path))
    except (FileNotFoundError, UnicodeDecodeError):
        return
    if seal is not None and seal["signature"] and not signature.is_signing():
        raise ConfigError(f"{path} is signed, and those who require it would refuse another one: set sign_key")


def check_not_removed(path: str) -> None:
    """Raise DamagedError if the pointer is missing now, but this process or an earlier one has read it."""
    if problem := signature.age_problem(path, None):
        raise DamagedError(f"{path} {problem}")


def _text_of(path: str) -> str:
    try:
        return storage.read_text(path)
    except (FileNotFoundError, UnicodeDecodeError, IsADirectoryError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from None


def files_problem(files: object) -> str:
    """Return what is wrong with a list of files; "" if nothing is wrong."""
    if not isinstance(files, dict):
        return "it lists no files"
    for name, entry in files.items():
        if problem := name_problem(name) or entry_problem(entry):
            return f"file {str(name)[:100]!r} {problem}"
    return ""
