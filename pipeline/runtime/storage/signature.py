"""Sign manifests with an Ed25519 key, and take only those that a key has signed.

A checksum finds damage; a signature vouches for who wrote a manifest, and by its checksums for every file that it lists. Keys are PEM
files: openssl genpkey -algorithm ed25519 -out sign.pem; openssl pkey -in sign.pem -pubout -out sign.pub. What is set holds for
the process, as a verb has one key to sign with and one that it requires.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.runtime.errors import ConfigError
from pipeline.runtime.storage import storage

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_private: Ed25519PrivateKey | None = None
_public: Ed25519PublicKey | None = None


@contextmanager
def signing(path: str | None) -> Iterator[None]:
    """While it lasts every manifest is signed with this key; None changes nothing.

    Raises:
        ConfigError: a file that holds no private Ed25519 key.
    """
    global _private
    before = _private
    _private = before if path is None else _private_key(path)
    try:
        yield
    finally:
        _private = before


@contextmanager
def requiring(path: str | None) -> Iterator[None]:
    """While it lasts only manifests that this key vouches for are read; None changes nothing.

    Raises:
        ConfigError: a file that holds no public Ed25519 key.
    """
    global _public
    before = _public
    _public = before if path is None else _public_key(path)
    try:
        yield
    finally:
        _public = before


def _private_key(path: str) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_content(path), password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"sign_key={path} holds no private key that can be read: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"sign_key={path} is a key of another kind: make one by openssl genpkey -algorithm ed25519")
    return key


def _public_key(path: str) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(_content(path))
    except ValueError as error:
        raise ConfigError(f"require_signature={path} holds no public key that can be read: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(
            f"require_signature={path} is a key of another kind than Ed25519; `openssl genpkey -algorithm ed25519 -out sign.pem` "
            "makes one, and `openssl pkey -in sign.pem -pubout -out sign.pub` its public part"
        )
    return key


def _content(path: str) -> bytes:
    if not storage.is_file(path):
        raise ConfigError(f"there is no key at {path}: give the path of a PEM file (docs/do/serving.md makes a pair)")
    with storage.open_file(path, "rb") as file:
        content: bytes = file.read()
    return content


def signature_of(digest: str) -> str:
    """Of a manifest's SHA-256, 128 hex digits; empty where nothing signs."""
    return _private.sign(digest.encode()).hex() if _private is not None else ""


def problem(digest: str, signature: str) -> str:
    """Empty where no signature is required, or it is that of the key."""
    if _public is None:
        return ""
    if not signature:
        return "is not signed, and a signature is required"
    from cryptography.exceptions import InvalidSignature

    try:
        _public.verify(bytes.fromhex(signature), digest.encode())
    except InvalidSignature:
        return "is signed by another key than the one that is required"
    return ""
