"""Sign written manifests with an Ed25519 key, and accept only manifests that one of the required
keys has signed.

A checksum finds damage. A signature says who wrote a file. It covers the SHA-256 of a manifest, the
manifest's purpose and its number; the manifest holds a digest of each block of each file
(checksums.py). Keys are PEM files:

    openssl genpkey -algorithm ed25519 -out sign.pem
    openssl pkey -in sign.pem -pubout -out sign.pub

The keys are set for the whole process, because a verb has one key to sign with, and one list of
keys that it requires. docs/explain/threat_model.md says what is guaranteed against whom.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING

from pipeline.runtime.errors import ConfigError
from pipeline.runtime.storage import storage

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

CONTEXT = "torchrec-pipeline"
HOW_TO = (
    "`openssl genpkey -algorithm ed25519 -out sign.pem` makes one, and "
    "`openssl pkey -in sign.pem -pubout -out sign.pub` its public part"
)


class Purpose(StrEnum):
    """The purpose of a signed text. A text that was signed for another purpose is refused."""

    STEP = "step"
    ARTIFACT = "artifact"
    DELTA = "delta"
    VERSION = "version"
    CHAMPION = "champion"  # the pointer of a registry
    CANARY = "canary"  # the challenger of a registry that serves some requests
    PIN = "pin"  # the pointer of the deltas of an artifact


class _Accepted:
    """The highest number accepted for each path. If `path` is set, this local file stores the numbers."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._numbers = self._read()

    def _read(self) -> dict[str, int]:
        if self._path is None or not os.path.exists(self._path):
            return {}
        try:
            found = json.loads(storage.read_text(self._path))
        except (ValueError, OSError) as error:
            raise ConfigError(f"{self._path} cannot be read ({error}): restore it or remove it") from None
        if not isinstance(found, dict) or not all(type(number) is int for number in found.values()):
            raise ConfigError(f"{self._path} does not hold numbers of pointers: restore it or remove it")
        return found

    def newest(self, path: str) -> int | None:
        return self._numbers.get(_name_of(path))

    def add(self, path: str, number: int) -> None:
        newest = self._numbers.get(_name_of(path))
        if newest is not None and number <= newest:
            return
        self._numbers[_name_of(path)] = number
        if self._path is not None:
            # Another process may have written to the file.
            self._numbers |= {key: max(each, self._numbers.get(key, 0)) for key, each in self._read().items()}
            storage.publish_text(self._path, json.dumps(self._numbers, indent=1, sort_keys=True))


def _name_of(path: str) -> str:
    return os.path.realpath(path) if storage.is_local(path) else path


_private: Ed25519PrivateKey | None = None
_public: Sequence[Ed25519PublicKey] = ()
_accepted = _Accepted(None)


@contextmanager
def signing(path: str | None) -> Iterator[None]:
    """Sign every manifest and pointer with this key; None changes nothing. Raises ConfigError."""
    global _private
    before = _private
    _private = before if path is None else _private_key(path)
    try:
        yield
    finally:
        _private = before


@contextmanager
def requiring(paths: str | Sequence[str] | None, accepted: str | None = None) -> Iterator[None]:
    """Read only manifests and pointers that one of these keys has signed; None changes nothing.

    `accepted` is a local file with the numbers of accepted pointers, so that later processes also
    refuse older pointers. Raises ConfigError if a file does not hold a public Ed25519 key.
    """
    global _public, _accepted
    before = _public, _accepted
    if paths is not None:
        _public = [_public_key(path) for path in ([paths] if isinstance(paths, str) else paths)]
        _accepted = _Accepted(accepted)
    try:
        yield
    finally:
        _public, _accepted = before


def _private_key(path: str) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_content(path), password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"sign_key={path} does not hold a private key that can be read: {error}; {HOW_TO}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"sign_key={path} is not an Ed25519 key; {HOW_TO}")
    return key


def _public_key(path: str) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(_content(path))
    except ValueError as error:
        raise ConfigError(
            f"require_signature={path} does not hold a public key that can be read: {error}; {HOW_TO}"
        ) from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"require_signature={path} is not an Ed25519 key; {HOW_TO}")
    return key


def _content(path: str) -> bytes:
    if not storage.is_file(path):
        raise ConfigError(f"there is no key at {path}: give the path of a PEM file; {HOW_TO}")
    with storage.open_file(path, "rb") as file:
        content: bytes = file.read()
    return content


def is_signing() -> bool:
    return _private is not None


def is_required() -> bool:
    return bool(_public)


def signature_of(digest: str, purpose: Purpose, number: object) -> str:
    """Return the signature of a SHA-256 (hex digits) as 128 hex digits; "" if no key is set for signing."""
    return _private.sign(_statement(digest, purpose, number)).hex() if _private is not None else ""


def signature_problem(signature: str, digest: str, purpose: Purpose, number: object) -> str:
    """Return "" if no signature is required, or if a required key made this signature.

    Otherwise return a text that describes the problem.
    """
    if not _public:
        return ""
    if not signature:
        return "is not signed, and a signature is required"
    if _is_by_required_key(signature, _statement(digest, purpose, number)):
        return ""
    if _is_by_required_key(signature, digest.encode()):
        return (
            "was signed by an earlier release, whose signatures do not cover every byte: write it again with sign_key"
        )
    return f"is not signed as a {purpose} by a required key: was it signed by another key, or as something else?"


def accept(path: str, number: int) -> None:
    """Remember the number of a pointer that was read at `path` and is signed, if it is the highest so far."""
    if _public:
        _accepted.add(path, number)


def age_problem(path: str, number: int | None) -> str:
    """Return the problem if a higher number was accepted at `path` before; otherwise "". `number`
    None: `path` does not exist. Numbers are only remembered if a key is required.
    """
    newest = _accepted.newest(path) if _public else None
    if newest is None or (number is not None and number >= newest):
        return ""
    found = "is missing" if number is None else f"has number {number}"
    return f"{found}, and number {newest} was accepted before: restore the newer one, or write it again"


def next_number(number: int) -> int:
    """Return the number of a pointer that replaces the one with `number`.

    The number of a signed pointer is at least the time in seconds, so it is above all numbers
    accepted before.
    """
    return max(number + 1, int(time.time())) if is_signing() else number + 1


def _statement(digest: str, purpose: Purpose, number: object) -> bytes:
    return json.dumps([CONTEXT, purpose, number, digest]).encode()


def _is_by_required_key(signature: str, statement: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    for key in _public:
        try:
            key.verify(bytes.fromhex(signature), statement)
            return True
        except InvalidSignature:
            continue
    return False
