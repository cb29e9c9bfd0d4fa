"""Manifests that a key signed: everybody reads them, and if a signature is required only they are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from pipeline.runtime.errors import ConfigError, DamagedError, check_keys
from pipeline.runtime.storage import block_sums, signature
from pipeline.runtime.storage.checksums import ChecksummedWriter, damage, read_verified
from pipeline.runtime.storage.manifest import open_manifest, read_sealed, seal_manifest
from pipeline.runtime.storage.signature import Purpose, requiring, signing
from tests.support.crc32 import with_same_crc32
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
    unsigned = seal_manifest(values, Purpose.STEP)
    with signing(own):
        signed = seal_manifest(values, Purpose.STEP)
        of_a_delta = seal_manifest(values, Purpose.DELTA)
        with signing(other):
            foreign = seal_manifest(values, Purpose.STEP)
        with signing(None):
            assert seal_manifest(values, Purpose.STEP) == signed
    assert seal_manifest(values, Purpose.STEP) == unsigned
    for text in (unsigned, signed, foreign):
        path.write_text(text)
        assert read_sealed(str(path), Purpose.STEP) == values and json.loads(text)["step"] == 3
    # Changed, its checksum written again, and the old signature kept.
    changed = seal_manifest(values | {"step": 4}, Purpose.STEP)
    changed = signed[: signed.index('"sha256"')] + changed[changed.index('"sha256"') :]
    with requiring(public):
        path.write_text(signed)
        assert read_sealed(str(path), Purpose.STEP) == values
        refused = {unsigned: "not signed", foreign: "another key", changed: "another key", of_a_delta: "as a step"}
        for text, what in refused.items():
            path.write_text(text)
            with pytest.raises(DamagedError, match=what):
                read_sealed(str(path), Purpose.STEP)


def test_any_of_several_required_keys_may_have_signed(tmp_path: Path) -> None:
    keys = [make_keys(tmp_path, name) for name in ("old", "new", "other")]
    path = tmp_path / "manifest.json"
    for private, _ in keys:
        with signing(private):
            path.write_text(seal_manifest({"step": 1}, Purpose.STEP))
        with requiring([public for _, public in keys[:2]]):
            if private == keys[2][0]:
                with pytest.raises(DamagedError, match="required key"):
                    read_sealed(str(path), Purpose.STEP)
            else:
                assert read_sealed(str(path), Purpose.STEP) == {"step": 1}


def test_a_signature_of_an_earlier_release_is_refused_and_its_file_read_if_none_is_required(tmp_path: Path) -> None:
    private, public = make_keys(tmp_path, "own")
    path, text = tmp_path / "manifest.json", seal_manifest({"step": 1}, Purpose.STEP)
    with signing(private):
        assert signature._private is not None
        signed = signature._private.sign(json.loads(text)["sha256"].encode()).hex()
    path.write_text(text.replace("{\n ", f'{{\n "signature": "{signed}",\n ', 1))
    assert read_sealed(str(path), Purpose.STEP) == {"step": 1}
    with requiring(public), pytest.raises(DamagedError, match=names("earlier release sign_key")):
        read_sealed(str(path), Purpose.STEP)


@pytest.mark.parametrize("algorithm", block_sums.ALGORITHMS)
def test_other_bytes_with_the_same_crc32_are_refused(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("blake3") if algorithm == "blake3" else None
    monkeypatch.setattr(block_sums, "written_algorithm", lambda: algorithm)
    private, public = make_keys(tmp_path, "own")
    path, content = tmp_path / "rows", bytes(range(256)) * 100
    with signing(private):
        with ChecksummedWriter(str(path)) as writer:
            writer.write(content)
            writer.write_zeros(2 * block_sums.BLOCK_BYTES)
        entry = writer.entry()
    with requiring(public):
        assert damage(str(path), entry) == ""
        forged = with_same_crc32(content[:-8] + b"forgedxx", len(content) - 4, content)
        path.write_bytes(forged + bytes(2 * block_sums.BLOCK_BYTES))
        with pytest.raises(DamagedError, match="bytes 0 to"):
            read_verified(str(path), entry)
    # Without a required signature the slower SHA-256 is not computed, and the CRC-32 is right.
    assert bool(damage(str(path), entry)) == (algorithm == "blake3")


def test_an_entry_without_a_digest_is_refused_if_a_signature_is_required(tmp_path: Path) -> None:
    private, public = make_keys(tmp_path, "own")
    entry, path = {"size_bytes": 3, "block_bytes": 8, "crc32": ["00000000"]}, tmp_path / "manifest.json"
    with signing(private):
        path.write_text(seal_manifest({"format_version": 1, "files": {"rows": entry}}, Purpose.ARTIFACT))
    assert open_manifest(str(path), Purpose.ARTIFACT, 1)["files"] == {"rows": entry}
    with requiring(public), pytest.raises(DamagedError, match=names("rows digest sign_key")):
        open_manifest(str(path), Purpose.ARTIFACT, 1)


def test_what_is_no_key_is_named(tmp_path: Path) -> None:
    private, public = make_keys(tmp_path, "own")
    for given, asked in ((public, signing), (private, requiring), (str(tmp_path / "absent"), signing)):
        with pytest.raises(ConfigError, match=names(given)), asked(given):
            pass
    for value in (3, [], [""], ["a.pub", 3], {"a": "b"}):
        with pytest.raises(ConfigError, match=r"require_signature.*\[a.pub,b.pub\]"):
            check_keys("require_signature", value)
