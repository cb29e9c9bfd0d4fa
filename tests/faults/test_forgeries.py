"""Forge what a key signed, as someone can who may write to the folders but does not have the key: none is accepted.

The world is one run, one registry with two versions, the artifact of each, deltas and the pointers to
champion, pinned delta and canary, all signed. A reader that requires the signature reads everything once; then one thing is
forged, and a reader that starts with the numbers accepted before must refuse it.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime.errors import UserError
from pipeline.runtime.storage import signature
from pipeline.runtime.storage.checksums import checksums_of
from pipeline.runtime.storage.manifest import NUMBERS, SEAL, open_manifest, seal_manifest
from pipeline.runtime.storage.signature import Purpose, requiring, signing
from tests.faults.signed_world import World, make_world
from tests.runtime.test_signature import make_keys
from tests.support.crc32 import with_same_crc32
from tests.support.examples import SCALE, SEED

SEEDS_OF_A_CAMPAIGN = 5 * SCALE

Forgery = Callable[[World, Path, random.Random, str, str], None]


def _values(manifest: Path) -> dict[str, Any]:
    values = json.loads(manifest.read_text())
    return {key: value for key, value in values.items() if key not in ("sha256", "signature")}


def _with_signature(text: str, signed: str) -> str:
    """The text under the signature of the manifest `signed`."""
    seal, own = SEAL.match(text), SEAL.match(signed)
    assert seal and own and own["signature"]
    return f'{{\n "signature": "{own["signature"]}",\n "sha256": "{seal["sha256"]}",{text[seal.end() :]}'


def _change_file(manifest: Path, chosen: random.Random) -> tuple[str, bytes]:
    """Other bytes of the same length for one of the files; its name, and what it held."""
    name = chosen.choice(sorted(_values(manifest)["files"]))
    path = manifest.parent / name
    content = path.read_bytes()
    at = chosen.randrange(len(content) - 4)
    path.write_bytes(content[:at] + bytes([content[at] ^ chosen.randrange(1, 256)]) + content[at + 1 :])
    return name, content


def _reseal(manifest: Path, purpose: Purpose, key: str | None, keep: bool, algorithm: str = "") -> None:
    """Write the entries of all files again, and the manifest; `keep` keeps the old signature over it."""
    values, text = _values(manifest), manifest.read_text()
    with signing(key):
        values["files"] = {name: checksums_of(str(manifest.parent / name)) for name in values["files"]}
        if algorithm:
            values["files"] = {
                name: {**{k: v for k, v in entry.items() if k != "blake3"}, algorithm: ["0" * 64]}
                for name, entry in values["files"].items()
            }
        resealed = seal_manifest(values, purpose)
    manifest.write_text(_with_signature(resealed, text) if keep else resealed)


def same_crc32(world: World, manifest: Path, chosen: random.Random, own: str, other: str) -> None:
    name, content = _change_file(manifest, chosen)
    path = manifest.parent / name
    changed = path.read_bytes()
    path.write_bytes(with_same_crc32(changed, len(changed) - 4, content))


def unsigned(world: World, manifest: Path, chosen: random.Random, own: str, other: str) -> None:
    _change_file(manifest, chosen)
    _reseal(manifest, _purpose(world, manifest), None, keep=False)


def old_signature(world: World, manifest: Path, chosen: random.Random, own: str, other: str) -> None:
    _change_file(manifest, chosen)
    _reseal(manifest, _purpose(world, manifest), None, keep=True)


def other_key(world: World, manifest: Path, chosen: random.Random, own: str, other: str) -> None:
    _change_file(manifest, chosen)
    _reseal(manifest, _purpose(world, manifest), other, keep=False)


def other_algorithm(world: World, manifest: Path, chosen: random.Random, own: str, other: str) -> None:
    _reseal(manifest, _purpose(world, manifest), None, keep=True, algorithm="sha256")


def a_value(world: World, manifest: Path, chosen: random.Random, own: str, other: str) -> None:
    values, text = _values(manifest), manifest.read_text()
    values["planted"] = chosen.random()
    manifest.write_text(_with_signature(seal_manifest(values, _purpose(world, manifest)), text))


def flipped_signature(world: World, manifest: Path, chosen: random.Random, own: str, other: str) -> None:
    text = manifest.read_text()
    at = text.index('"signature": "') + 14 + chosen.randrange(128)
    manifest.write_text(text[:at] + f"{int(text[at], 16) ^ 1:x}" + text[at + 1 :])


def removed_signature(world: World, manifest: Path, chosen: random.Random, own: str, other: str) -> None:
    text = manifest.read_text()
    manifest.write_text("{\n " + text[text.index('"sha256"') :])


def earlier_release(world: World, manifest: Path, chosen: random.Random, own: str, other: str) -> None:
    """The key signs the SHA-256 alone, and files have only a CRC-32, as releases before did."""
    _change_file(manifest, chosen)
    _reseal(manifest, _purpose(world, manifest), None, keep=True)
    text = manifest.read_text()
    with signing(own):
        assert signature._private is not None
        signed = signature._private.sign(json.loads(text)["sha256"].encode()).hex()
    at = text.index('"signature": "') + 14
    manifest.write_text(text[:at] + signed + text[at + 128 :])


def other_purpose(world: World, manifest: Path, chosen: random.Random, own: str, other: str) -> None:
    """What the key signed as something else, with the right values."""
    _change_file(manifest, chosen)
    purpose = chosen.choice([each for each in Purpose if each != _purpose(world, manifest)])
    _reseal(manifest, purpose, own, keep=False)


def replayed(world: World, manifest: Path, chosen: random.Random, own: str, other: str) -> None:
    """The whole folder that was signed before, in the place of the newer one."""
    before = world.before[_purpose(world, manifest)].parent
    shutil.rmtree(manifest.parent)
    shutil.copytree(before, manifest.parent)


def longer_file(world: World, manifest: Path, chosen: random.Random, own: str, other: str) -> None:
    name = chosen.choice(sorted(_values(manifest)["files"]))
    with open(manifest.parent / name, "ab") as file:
        file.write(b"\0" * chosen.randrange(1, 9))


def _purpose(world: World, manifest: Path) -> Purpose:
    return next(purpose for purpose, path in world.manifests.items() if path == manifest)


OF_MANIFESTS: list[Forgery] = [
    same_crc32, unsigned, old_signature, other_key, other_algorithm, a_value, flipped_signature, removed_signature,
    earlier_release, other_purpose, replayed, longer_file,
]  # fmt: skip


def plain(world: World, pointer: Path, chosen: random.Random, own: str, other: str) -> None:
    pointer.write_text(json.dumps({**_values(pointer), "number": 2**40}))


def sealed(world: World, pointer: Path, chosen: random.Random, own: str, other: str) -> None:
    pointer.write_text(seal_manifest({**_values(pointer), "number": 2**40}, _pointer_purpose(world, pointer)))


def moved(world: World, pointer: Path, chosen: random.Random, own: str, other: str) -> None:
    """To the version or delta before, or to all keys, under the signature of the newer pointer."""
    values = _values(pointer) | {"version": "v000001", "sequence": 1, "share": 1.0}
    pointer.write_text(_with_signature(seal_manifest(values, _pointer_purpose(world, pointer)), pointer.read_text()))


def by_other_key(world: World, pointer: Path, chosen: random.Random, own: str, other: str) -> None:
    with signing(other):
        pointer.write_text(seal_manifest({**_values(pointer), "number": 2**40}, _pointer_purpose(world, pointer)))


def as_other_pointer(world: World, pointer: Path, chosen: random.Random, own: str, other: str) -> None:
    purpose = chosen.choice([each for each in Purpose if each != _pointer_purpose(world, pointer)])
    with signing(own):
        pointer.write_text(seal_manifest({**_values(pointer), "number": 2**40}, purpose))


def older(world: World, pointer: Path, chosen: random.Random, own: str, other: str) -> None:
    shutil.copy(world.folder / f"{pointer.stem}_1.json", pointer)


def removed(world: World, pointer: Path, chosen: random.Random, own: str, other: str) -> None:
    pointer.unlink()


def _pointer_purpose(world: World, pointer: Path) -> Purpose:
    return next(purpose for purpose, path in world.pointers.items() if path == pointer)


OF_POINTERS: list[Forgery] = [plain, sealed, moved, by_other_key, as_other_pointer, older, removed]


def newest_delta_removed(world: World, _: Path, chosen: random.Random, own: str, other: str) -> None:
    shutil.rmtree(world.newest / "deltas/00000002")


def registry_without_pointer(world: World, _: Path, chosen: random.Random, own: str, other: str) -> None:
    """An artifact that was signed before, in the place of the registry."""
    world.champion.unlink()
    shutil.copytree(world.registry / "versions/v000001/artifact", world.registry, dirs_exist_ok=True)


def artifact_renamed_to_its_version(world: World, _: Path, chosen: random.Random, own: str, other: str) -> None:
    """The artifact of the version before, with the version's own manifest and other deltas."""
    shutil.rmtree(world.newest / "artifact")
    shutil.copytree(world.registry / "versions/v000001/artifact", world.newest / "artifact")
    shutil.rmtree(world.newest / "deltas")


OF_FOLDERS: list[Forgery] = [newest_delta_removed, registry_without_pointer, artifact_renamed_to_its_version]

# (what is forged, how, seed); the default suite tries each way about once
CASES = (
    [
        (purpose, way, seed)
        for seed in range(SEED, SEED + SEEDS_OF_A_CAMPAIGN)
        for purpose in World(Path()).manifests
        for way in OF_MANIFESTS
    ]
    + [
        (pointer, way, seed)
        for seed in range(SEED, SEED + 2 * SCALE)
        for pointer in World(Path()).pointers
        for way in OF_POINTERS
    ]
    + [(Purpose.VERSION, way, 0) for way in OF_FOLDERS]
)
DEFAULT = CASES[:48:5] + CASES[-45:-24:3] + CASES[-3:]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("keys")
    return {name: make_keys(folder, name) for name in ("own", "other")}


@pytest.fixture(scope="module")
def signed_world(keys: dict[str, tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("signed"), keys["own"][0])


def _try(case: Any, world: World, keys: dict[str, tuple[str, str]], folder: Path) -> None:
    what, way, seed = case
    copy, accepted = World(Path(shutil.copytree(world.folder, folder / "copy"))), str(folder / "accepted.json")
    required = [keys["own"][1]]
    with requiring(required, accepted):
        honest = copy.read()
    assert honest["version"] == "v000002" and honest["canary"].share == 0.2 and len(honest) == 8
    way(copy, copy.pointers.get(what) or copy.manifests[what], random.Random(seed), keys["own"][0], keys["other"][0])
    with ExitStack() as stack:
        stack.enter_context(requiring(required, accepted))
        stack.enter_context(pytest.raises(UserError))
        copy.read()


@pytest.mark.parametrize("case", DEFAULT, ids=lambda case: f"{case[0]}-{case[1].__name__}")
def test_a_forgery_is_refused(case: Any, signed_world: World, keys: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    _try(case, signed_world, keys, tmp_path)


@pytest.mark.campaign
def test_two_hundred_forgeries_are_refused(
    signed_world: World, keys: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    assert len(CASES) >= 200
    for number, case in enumerate(CASES):
        _try(case, signed_world, keys, tmp_path / str(number))


def test_everything_is_read_without_a_required_signature(signed_world: World) -> None:
    assert signed_world.read()["version"] == "v000002"
    assert NUMBERS.keys() | {Purpose.ARTIFACT} == set(Purpose)
    open_manifest(str(signed_world.manifests[Purpose.STEP]), Purpose.STEP, 2)
