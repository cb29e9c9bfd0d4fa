"""Define paths of the steps in a checkpoint folder, and read their manifests.

In a step's manifest `attempt` is the folder of its files below the step. On a local disk it is
empty, because a rename moves the files into the step itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from pipeline.runtime.errors import DamagedError
from pipeline.runtime.json_values import checked
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.atomic import PublishedFolders, committed_names, published_folders
from pipeline.runtime.storage.checksums import read_verified
from pipeline.runtime.storage.manifest import MANIFEST, open_manifest
from pipeline.runtime.storage.signature import Purpose

METADATA = ".metadata"
FORMAT_VERSION = 2
LINK_VERSION = 3  # of a step with only changed rows; earlier releases cannot read it
# of a step that leaves out rows that were never updated; earlier releases cannot read it
SAMPLED_VERSION = 4
# of a link with compressed shard files (pipeline.extras.differential.packed); earlier releases cannot read
# it
PACKED_VERSION = 5
PREFIX = "step_"
STEP_FOLDER = re.compile(r"step_(\d{8,})")


Count = Annotated[int, Meta(ge=0)]


@dataclass
class _Chain:
    """The manifest's entry about the chain that a link belongs to (pipeline.checkpoint.chains)."""

    base: Count
    base_bytes: Count
    previous: Count
    previous_sha256: str
    links: Count
    link_bytes: Count


@dataclass
class _StepValues:
    """The types of the values in a manifest. Hooks add more values."""

    step: Count
    attempt: str
    world_size: Annotated[int, Meta(ge=1)] = 1
    save_id: str = ""
    chain: _Chain | None = None
    packed: bool = False
    sampled: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    data_order: dict[str, Any] = field(default_factory=dict)
    libraries: dict[str, Any] = field(default_factory=dict)
    compression: dict[str, Any] = field(default_factory=dict)
    replicas: dict[str, Any] | None = None


def step_path(folder: str, step: int) -> str:
    return storage.join(folder, step_name(step))


def step_name(step: int) -> str:
    return f"{PREFIX}{step:08d}"


def file_path(path: str, manifest: dict[str, Any], name: str) -> str:
    """Return the path of a file of the step at `path`."""
    return storage.join(path, manifest["attempt"], name) if manifest["attempt"] else storage.join(path, name)


def list_steps(folder: str) -> list[int]:
    """Return the committed steps, ascending. Raises OSError if an object store does not answer, so
    that this is not mistaken for an empty folder.
    """
    return sorted(int(name.removeprefix(PREFIX)) for name in committed_names(folder, STEP_FOLDER))


def step_folders(folder: str, staging: str) -> PublishedFolders:
    """Return the folders of steps. `staging` is a local folder, needed only for object stores."""
    return published_folders(folder, STEP_FOLDER, prefix=PREFIX, staging=staging)


def read_manifest(path: str) -> dict[str, Any]:
    """Return the manifest of the step at `path`. Raises DamagedError if the manifest is missing,
    was changed, has an unknown format, or has values of wrong types.
    """
    versions = (FORMAT_VERSION, LINK_VERSION, SAMPLED_VERSION, PACKED_VERSION)
    manifest = open_manifest(f"{path}/{MANIFEST}", Purpose.STEP, *versions)
    checked(manifest, _StepValues, f"{path}/{MANIFEST}")
    name = storage.join(path, "").rstrip("/").rsplit("/", 1)[-1]
    if STEP_FOLDER.fullmatch(name) and step_name(manifest["step"]) != name:
        raise DamagedError(f"{path}/{MANIFEST} is that of step {manifest['step']}")
    return manifest


def read_step_file(path: str, name: str) -> bytes | None:
    """Return the verified content of a file, or None if the step at `path` does not have the file.
    Raises DamagedError.
    """
    manifest = read_manifest(path)
    if name not in manifest["files"]:
        return None
    return read_verified(file_path(path, manifest, name), manifest["files"][name])


def is_link(manifest: dict[str, Any]) -> bool:
    """Return True if a step holds only the rows that changed since another step
    (pipeline.checkpoint.chains)."""
    return "chain" in manifest


def is_packed(manifest: dict[str, Any]) -> bool:
    """Return True if a step's shard files are compressed."""
    return bool(manifest.get("packed", False))


def base_of(manifest: dict[str, Any]) -> int:
    """Return the full step that a step builds on. For a full step this is the step itself."""
    return int(manifest["chain"]["base"] if is_link(manifest) else manifest["step"])
