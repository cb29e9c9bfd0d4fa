"""A run, a registry with two versions and artifacts, deltas and all pointers: small files of the real formats, signed or not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pipeline.checkpoint.steps import file_path, read_manifest
from pipeline.extras.canary.pointer import CanaryFile
from pipeline.retraining.find_artifact import find_artifact
from pipeline.retraining.registry import Registry
from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage.checksums import checksums_of, read_verified
from pipeline.runtime.storage.manifest import seal_manifest
from pipeline.runtime.storage.signature import Purpose, signing
from pipeline.serving.artifact import manifest as artifacts
from pipeline.serving.artifact.deltas import LAYERS_FILE, deltas_folder, name_of, newest_sequence, pin, read_delta
from pipeline.serving.scoring.artifact_files import ArtifactFiles

GOLDEN = Path(__file__).parents[1] / "runtime/manifests/artifact.json"


class World:
    """`manifests` are the signed manifests by purpose, each with its folder and its files; `pointers` the signed pointers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run, self.registry = folder / "run/checkpoints", folder / "registry"
        self.newest = self.registry / "versions/v000002"
        self.champion, self.pin = self.registry / "champion.json", self.newest / "deltas/pin.json"
        self.manifests = {
            Purpose.STEP: self.run / "step_00000007/manifest.json",
            Purpose.ARTIFACT: self.newest / "artifact/manifest.json",
            Purpose.DELTA: self.newest / "deltas/00000002/manifest.json",
            Purpose.VERSION: self.newest / "manifest.json",
        }
        canary = self.registry / "canary.json"
        self.pointers = {Purpose.CHAMPION: self.champion, Purpose.PIN: self.pin, Purpose.CANARY: canary}
        self.before = {
            Purpose.STEP: self.run / "step_00000006/manifest.json",
            Purpose.ARTIFACT: self.registry / "versions/v000001/artifact/manifest.json",
            Purpose.DELTA: self.newest / "deltas/00000001/manifest.json",
            Purpose.VERSION: self.registry / "versions/v000001/manifest.json",
        }

    def read(self) -> dict[str, Any]:
        """Everything that a training, a tick and a server read. Raises UserError for what is refused."""
        step = str(self.run / "step_00000007")
        manifest = read_manifest(step)
        found: dict[str, Any] = {
            name: read_verified(file_path(step, manifest, name), entry) for name, entry in manifest["files"].items()
        }
        registry = Registry(str(self.registry))
        version = registry.champion()
        assert version is not None
        if problem := registry.verify(version)[0]:
            raise DamagedError(problem)
        artifact = find_artifact(str(self.registry)).path
        served = artifacts.read_manifest(artifact)
        files = ArtifactFiles(artifact, served, verify=True)
        found |= {f"artifact/{name}": files.content(name) for name in served.files}
        for sequence in range(1, newest_sequence(deltas_folder(artifact)) + 1):
            delta = read_delta(deltas_folder(artifact), artifact, served, sequence)
            found |= {f"delta {sequence}/{name}": delta.content(name) for name in delta.files}
        return found | {"version": version.name, "canary": CanaryFile(str(self.registry)).read()}


def make_world(folder: Path, private: str | None) -> World:
    """`private` None signs nothing."""
    world = World(folder)
    with signing(private):
        for step in (6, 7):
            _write_step(world.run / f"step_{step:08d}", step)
        registry = Registry(str(world.registry))
        for number in (1, 2):
            artifact = _write_artifact(folder / f"exported_{number}", number)
            (config := folder / "config.yaml").write_text(f"name: run {number}\n")
            sources = {
                "config.yaml": str(config),
                **{
                    f"artifact/{each.relative_to(artifact)}": str(each)
                    for each in artifact.rglob("*")
                    if each.is_file()
                },
            }
            version = registry.publish(f"v{number:06d}", sources, {"parent": None, "created_at": "now"})
            registry.promote(version, registry.pointer())
            shutil.copy(world.champion, folder / f"champion_{number}.json")
            shutil.rmtree(artifact)
        for sequence in (1, 2):
            _write_delta(world, sequence)
        for number, sequence in enumerate((1, None), 1):
            pin(str(world.newest / "deltas"), sequence)
            shutil.copy(world.pin, folder / f"pin_{number}.json")
            CanaryFile(str(world.registry)).start(registry, "v000001", 0.1 * number)
            shutil.copy(world.pointers[Purpose.CANARY], folder / f"canary_{number}.json")
    return world


def _entries(folder: Path, files: dict[str, bytes]) -> dict[str, Any]:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return {name: checksums_of(str(folder / name)) for name in files}


def _write_step(folder: Path, step: int) -> None:
    files = _entries(folder, {"__0_0.distcp": f"weights of {step}".encode() * 50, "random_00000.json": b"{}" * 20})
    values = {"format_version": 2, "step": step, "attempt": "", "world_size": 1, "files": files}
    (folder / "manifest.json").write_text(seal_manifest(values, Purpose.STEP))


def _write_artifact(folder: Path, number: int) -> Path:
    values = {key: value for key, value in json.loads(GOLDEN.read_text()).items() if key not in ("sha256", "version")}
    values["files"] = _entries(folder, {"tables/00000.rows": bytes([number]) * 16, "dense.pt2": b"layers" * 9})
    (folder / "manifest.json").write_text(artifacts.decode(values).to_text())
    return folder


def _write_delta(world: World, sequence: int) -> None:
    artifact = world.newest / "artifact"
    folder = world.newest / "deltas" / name_of(sequence)
    before = artifact if sequence == 1 else folder.parent / name_of(sequence - 1)
    values = {
        "format_version": 1,
        "base_version": artifacts.read_manifest(str(artifact)).version,
        "sequence": sequence,
        "previous_sha256": json.loads((before / "manifest.json").read_text())["sha256"],
        "step": sequence,
        "saved_at": 0.0,
        "save_id": "",
        "tables": [],
        "stats": {},
        "attempt": "",
        "files": _entries(folder, {LAYERS_FILE: f"layers of {sequence}".encode() * 9}),
    }
    (folder / "manifest.json").write_text(seal_manifest(values, Purpose.DELTA))
