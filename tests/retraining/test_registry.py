"""A registry keeps immutable versions, points to one of them atomically, and goes back in seconds."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pipeline.retraining.registry import PinnedError, Pointer, Registry, RegistryError, Version
from pipeline.runtime.errors import DamagedError
from tests.support.messages import names
from tests.support.object_store import BUCKET, FaultyProxy, store

__all__ = ["store"]


@pytest.fixture(params=["local", "s3"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    if request.param == "local":
        return Registry(str(tmp_path / "registry"))
    request.getfixturevalue("store")
    return Registry(f"s3://{BUCKET}/registry")


def _publish(registry: Registry, folder: Path, parent: str | None = None, content: bytes = b"weights") -> Version:
    source = folder / "source"
    source.write_bytes(content)
    name = registry.next_name()
    files = {"checkpoint/step_00000001/a.distcp": str(source), "config.yaml": str(source)}
    lineage = {"window": "", "parent": parent, "candidate": name, "created_at": "", "metrics": {}}
    return registry.publish(name, files, lineage)


def test_a_version_is_found_as_it_was_published(registry: Registry, tmp_path: Path) -> None:
    assert registry.champion() is None
    version = _publish(registry, tmp_path)
    assert registry.names() == ["v000001"]
    found = registry.version("v000001")
    assert (found.lineage, found.artifact) == (version.lineage, None)
    assert found.checkpoint == f"{registry.path}/versions/v000001/checkpoint/step_00000001"
    assert registry.verify(found) == ("", 2 * len(b"weights"))
    with pytest.raises(RegistryError, match=names("v000002 v000001")):
        registry.version("v000002")


def test_a_version_is_never_written_again(registry: Registry, tmp_path: Path) -> None:
    _publish(registry, tmp_path)
    with pytest.raises(FileExistsError):
        registry.publish("v000001", {}, {})


def test_the_pointer_moves_from_what_was_expected_alone(registry: Registry, tmp_path: Path) -> None:
    first, second = _publish(registry, tmp_path), _publish(registry, tmp_path, "v000001")
    pointer = registry.promote(first, None)
    assert (pointer.version, pointer.previous, pointer.number) == ("v000001", None, 1)
    assert registry.promote(first, None) == pointer  # done before
    with pytest.raises(RegistryError, match=names("v000001")):
        registry.promote(second, None)
    moved = registry.promote(second, pointer)
    assert (moved.version, moved.previous) == ("v000002", "v000001")
    champion = registry.champion()
    assert champion is not None and champion.name == "v000002"


def test_a_rollback_pins_and_unpin_lets_go(registry: Registry, tmp_path: Path) -> None:
    first, second = _publish(registry, tmp_path), _publish(registry, tmp_path, "v000001")
    pointer = registry.promote(second, registry.promote(first, None))
    assert registry.predecessor() == "v000001"
    pinned = registry.pin("v000001", "calibration fell")
    assert (pinned.version, pinned.previous, pinned.pinned) == ("v000001", "v000002", True)
    with pytest.raises(PinnedError, match=names("v000001")):
        registry.promote(second, pointer)
    assert registry.predecessor() == "v000002"  # the first version has no parent
    assert not registry.unpin().pinned
    assert registry.unpin() == registry.pointer()


def test_one_of_many_promotions_at_once_succeeds(registry: Registry, tmp_path: Path) -> None:
    start = registry.promote(_publish(registry, tmp_path), None)
    versions = [_publish(registry, tmp_path) for _ in range(6)]
    won: list[Pointer] = []
    refused: list[RegistryError] = []
    barrier = threading.Barrier(len(versions))

    def promote(version: Version) -> None:
        barrier.wait()
        try:
            won.append(registry.promote(version, start))
        except RegistryError as error:
            refused.append(error)

    threads = [threading.Thread(target=promote, args=(version,)) for version in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 5)
    assert registry.pointer() == won[0]


def test_pruning_keeps_the_newest_the_champion_and_its_predecessor(registry: Registry, tmp_path: Path) -> None:
    for parent in (None, "v000001", "v000002", "v000003", "v000004", "v000005"):
        _publish(registry, tmp_path, parent)
    registry.promote(registry.version("v000003"), None)
    assert registry.prune(2) == ["v000001", "v000004"]
    assert registry.names() == ["v000002", "v000003", "v000005", "v000006"]
    assert registry.next_name() == "v000007"


def test_damage_is_found_by_size_and_by_checksum(tmp_path: Path) -> None:
    registry = Registry(str(tmp_path / "registry"))
    version = _publish(registry, tmp_path)
    file = Path(version.path) / "config.yaml"
    file.write_bytes(b"weighty")
    assert "does not match its checksum" in registry.verify(version)[0]
    file.write_bytes(b"weight")
    assert "has 6 bytes, its manifest says 7" in registry.verify(version, budget_s=0.0)[0]
    file.unlink()
    assert "is missing" in registry.verify(version)[0]
    manifest = Path(version.path) / "manifest.json"
    manifest.write_text(manifest.read_text().replace("config", "konfig"))
    with pytest.raises(DamagedError):
        registry.version("v000001")


@pytest.mark.long
def test_half_a_version_is_none_and_is_removed(registry: Registry, tmp_path: Path, store: FaultyProxy) -> None:
    version = _publish(registry, tmp_path)
    from pipeline.runtime.storage import storage

    half = storage.join(
        registry.path, "versions", ".attempt-v000002-abc" if storage.is_local(registry.path) else "v000002"
    )
    storage.publish_text(storage.join(half, "config.yaml"), "half")
    assert registry.names() == [version.name]
    registry.prune(2)
    assert storage.list_folder(storage.join(registry.path, "versions")) == ["v000001"]
