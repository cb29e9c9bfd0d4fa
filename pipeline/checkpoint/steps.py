"""Say where the steps of a checkpoint folder lie and what their manifests hold.

In a step's manifest `attempt` is the part of the path, below the step, that its files have: empty on a local disk,
where a rename puts them into the step itself.
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
LINK_VERSION = 3  # of a step that holds changed rows alone, which releases before it do not read
SAMPLED_VERSION = 4  # of a step that leaves out rows that are as they began; likewise
PACKED_VERSION = 5  # of a link whose shard files are compressed (pipeline.checkpoint.packed); likewise
PREFIX = "step_"
STEP_FOLDER = re.compile(r"step_(\d{8,})")


Count = Annotated[int, Meta(ge=0)]


@dataclass
class _Chain:
    """What a link builds on (pipeline.checkpoint.chains)."""

    base: Count
    base_bytes: Count
    previous: Count
    previous_sha256: str
    links: Count
    link_bytes: Count


@dataclass
class _StepValues:
    """The types of a manifest's values; hooks add values of their own."""

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
    """Of a file of the step at `path`."""
    return storage.join(path, manifest["attempt"], name) if manifest["attempt"] else storage.join(path, name)


def list_steps(folder: str) -> list[int]:
    """Committed steps, ascending. Raises OSError where an object store does not answer: that is no empty folder."""
    return sorted(int(name.removeprefix(PREFIX)) for name in committed_names(folder, STEP_FOLDER))


def step_folders(folder: str, staging: str) -> PublishedFolders:
    """`staging` is a local folder, needed for object stores alone."""
    return published_folders(folder, STEP_FOLDER, prefix=PREFIX, staging=staging)


def read_manifest(path: str) -> dict[str, Any]:
    """The manifest of the step at `path`.

    Raises:
        DamagedError: it is missing, not what was written, of another release, or of other types.
    """
    versions = (FORMAT_VERSION, LINK_VERSION, SAMPLED_VERSION, PACKED_VERSION)
    manifest = open_manifest(f"{path}/{MANIFEST}", Purpose.STEP, *versions)
    checked(manifest, _StepValues, f"{path}/{MANIFEST}")
    name = storage.join(path, "").rstrip("/").rsplit("/", 1)[-1]
    if STEP_FOLDER.fullmatch(name) and step_name(manifest["step"]) != name:
        raise DamagedError(f"{path}/{MANIFEST} is that of step {manifest['step']}")
    return manifest


def read_step_file(path: str, name: str) -> bytes | None:
    """Verified; None where the step at `path` has no such file. Raises DamagedError."""
    manifest = read_manifest(path)
    if name not in manifest["files"]:
        return None
    return read_verified(file_path(path, manifest, name), manifest["files"][name])


def is_link(manifest: dict[str, Any]) -> bool:
    """Whether a step holds the rows that changed since another step (pipeline.checkpoint.chains)."""
    return "chain" in manifest


def is_packed(manifest: dict[str, Any]) -> bool:
    """Whether a step's shard files are compressed."""
    return bool(manifest.get("packed", False))


def base_of(manifest: dict[str, Any]) -> int:
    """The whole step that a step builds on, which may be the step itself."""
    return int(manifest["chain"]["base"] if is_link(manifest) else manifest["step"])
