"""Checkpoints, artifacts and registry versions of earlier releases are read and written byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.checkpoint import steps
from pipeline.retraining.registry import Registry
from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage.checksums import damage
from pipeline.runtime.storage.manifest import MANIFEST, open_manifest, read_sealed, seal_manifest
from pipeline.runtime.storage.signature import Purpose
from pipeline.serving.artifact import manifest as artifacts

# manifests/ holds what release 0.1.0 wrote, when each of the three had a writer of its own.
GOLDEN = Path(__file__).parent / "manifests"


def _folder(path: Path, kind: str, files: dict[str, bytes]) -> str:
    path.mkdir(parents=True)
    shutil.copy(GOLDEN / f"{kind}.json", path / MANIFEST)
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    return str(path)


@pytest.mark.parametrize("kind", ["step", "version", "artifact"])
def test_a_manifest_of_an_earlier_release_is_written_again_byte_for_byte(kind: str) -> None:
    path = GOLDEN / f"{kind}.json"
    assert seal_manifest(read_sealed(str(path), Purpose(kind)), Purpose(kind)) == path.read_text()


def test_a_step_of_an_earlier_release_verifies(tmp_path: Path) -> None:
    path = _folder(tmp_path / "step_00000007", "step", {"__0_0.distcp": b"weights"})
    manifest = steps.read_manifest(path)
    assert (steps.list_steps(str(tmp_path)), manifest["step"]) == ([7], 7)
    assert damage(steps.file_path(path, manifest, "__0_0.distcp"), manifest["files"]["__0_0.distcp"]) == ""


def test_a_registry_version_of_an_earlier_release_verifies(tmp_path: Path) -> None:
    _folder(tmp_path / "versions" / "v000001", "version", {"config.yaml": b"weights"})
    registry = Registry(str(tmp_path))
    version = registry.version("v000001")
    assert version.lineage == {"window": "w1", "parent": None}
    assert registry.verify(version) == ("", 7)


def test_an_artifact_of_an_earlier_release_is_read_with_its_version(tmp_path: Path) -> None:
    path = _folder(tmp_path / "artifact", "artifact", {"tables/00000.rows": b"rows" * 4, "dense.pt2": b"weights"})
    manifest = artifacts.read_manifest(path)
    assert manifest.version == json.loads((GOLDEN / "artifact.json").read_text())["version"]
    assert manifest.to_text() == (GOLDEN / "artifact.json").read_text()
    assert [damage(f"{path}/{name}", entry) for name, entry in manifest.files.items()] == ["", ""]


@pytest.mark.parametrize("kind", ["step", "version", "artifact"])
def test_a_manifest_of_a_later_format_is_refused(tmp_path: Path, kind: str) -> None:
    values = read_sealed(str(GOLDEN / f"{kind}.json"), None)
    path = tmp_path / MANIFEST
    path.write_text(seal_manifest({**values, "format_version": 9}, Purpose(kind)))
    with pytest.raises(DamagedError, match="has format_version 9, this release reads"):
        open_manifest(str(path), Purpose(kind), values["format_version"])
    values_without = {name: value for name, value in values.items() if name != "format_version"}
    path.write_text(seal_manifest(values_without, Purpose(kind)))
    with pytest.raises(DamagedError, match="has format_version None"):
        open_manifest(str(path), Purpose(kind), values["format_version"])


@pytest.mark.parametrize("kind", ["step", "version", "artifact"])
def test_a_manifest_with_any_changed_byte_is_refused(tmp_path: Path, kind: str) -> None:
    text = (GOLDEN / f"{kind}.json").read_bytes()
    path = tmp_path / MANIFEST
    for position in range(len(text)):
        path.write_bytes(text[:position] + bytes([text[position] ^ 1]) + text[position + 1 :])
        with pytest.raises(DamagedError):
            read_sealed(str(path), None)
