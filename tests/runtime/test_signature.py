"""Manifests that are signed with a key: read by everybody, and alone where a signature is required."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from pipeline.runtime.errors import ConfigError, DamagedError
from pipeline.runtime.storage.manifest import read_sealed, seal_manifest
from pipeline.runtime.storage.signature import requiring, signing
from tests.support.messages import names


def make_keys(folder: Path, name: str) -> tuple[str, str]:
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return str(private), str(public)


def test_a_signature_is_required_of_what_was_written_and_by_whom(tmp_path: Path) -> None:
    (own, public), (other, _) = make_keys(tmp_path, "own"), make_keys(tmp_path, "other")
    values, path = {"step": 3, "files": {}}, tmp_path / "manifest.json"
    unsigned = seal_manifest(values)
    with signing(own):
        signed = seal_manifest(values)
        with signing(other):
            foreign = seal_manifest(values)
        with signing(None):
            assert seal_manifest(values) == signed
    assert seal_manifest(values) == unsigned
    for text in (unsigned, signed, foreign):
        path.write_text(text)
        assert read_sealed(str(path)) == values and json.loads(text)["step"] == 3
    with requiring(public):
        path.write_text(signed)
        assert read_sealed(str(path)) == values
        for text, what in ((unsigned, "not signed"), (foreign, "another key")):
            path.write_text(text)
            with pytest.raises(DamagedError, match=what):
                read_sealed(str(path))
        # Changed, its checksum made anew, and the old signature kept.
        changed = seal_manifest(values | {"step": 4})
        path.write_text(signed[: signed.index('"sha256"')] + changed[changed.index('"sha256"') :])
        with pytest.raises(DamagedError, match="another key"):
            read_sealed(str(path))


def test_what_is_no_key_is_named(tmp_path: Path) -> None:
    private, public = make_keys(tmp_path, "own")
    for given, asked in ((public, signing), (private, requiring), (str(tmp_path / "absent"), signing)):
        with pytest.raises(ConfigError, match=names(given)), asked(given):
            pass
