"""Say where the steps of a checkpoint folder lie and what their manifests hold.

A manifest opens with the SHA-256 of all that follows, so a changed one is refused, not read. `attempt` is the part of
the path, below the step, that its files have: empty on a local disk, where a rename puts them into the step itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from pipeline.checkpoint.errors import CheckpointError, DamagedError
from pipeline.runtime.storage import storage

__all__ = [
    "CheckpointError", "file_path", "list_steps", "read_manifest", "read_sealed", "seal_manifest", "step_name", "step_path",
]  # fmt: skip
MANIFEST = "manifest.json"
METADATA = ".metadata"
FORMAT_VERSION = 2
STEP_FOLDER = re.compile(r"step_(\d{8,})")
SEAL = re.compile(r'\{\n "sha256": "([0-9a-f]{64})",')


def step_path(folder: str, step: int) -> str:
    return storage.join(folder, step_name(step))


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def file_path(path: str, manifest: dict[str, Any], name: str) -> str:
    """Of a file of the step at `path`."""
    return storage.join(path, manifest["attempt"], name) if manifest["attempt"] else storage.join(path, name)


def list_steps(folder: str) -> list[int]:
    """Committed steps, ascending. Raises OSError where an object store does not answer: that is no empty folder."""
    matches = (STEP_FOLDER.fullmatch(name) for name in storage.list_folder(folder))
    steps = sorted(int(match[1]) for match in matches if match)
    if storage.is_local(folder):
        return steps
    return [step for step in steps if storage.exists(storage.join(step_path(folder, step), MANIFEST))]


def seal_manifest(manifest: dict[str, Any]) -> str:
    """The text of a manifest file."""
    text = json.dumps(manifest, indent=1)
    return f'{{\n "sha256": "{hashlib.sha256(text.encode()).hexdigest()}",{text[1:]}'


def read_manifest(path: str) -> dict[str, Any]:
    """The manifest of the step at `path`.

    Raises:
        DamagedError: it is missing, not what was written, or of another release.
    """
    manifest = read_sealed(f"{path}/{MANIFEST}")
    if manifest["format_version"] != FORMAT_VERSION:
        raise DamagedError(
            f"{path}/{MANIFEST} has format_version {manifest['format_version']}, this release reads {FORMAT_VERSION}"
        )
    name = storage.join(path, "").rstrip("/").rsplit("/", 1)[-1]
    if STEP_FOLDER.fullmatch(name) and step_name(manifest["step"]) != name:
        raise DamagedError(f"{path}/{MANIFEST} is that of step {manifest['step']}")
    return manifest


def read_sealed(path: str) -> dict[str, Any]:
    """What seal_manifest made a file of. Raises DamagedError where it is missing or not what was written."""
    try:
        text = storage.read_text(path)
    except (FileNotFoundError, UnicodeDecodeError, IsADirectoryError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from None
    seal = SEAL.match(text)
    if seal is None or hashlib.sha256(("{" + text[seal.end() :]).encode()).hexdigest() != seal[1]:
        raise DamagedError(f"{path} does not match its checksum")
    manifest: dict[str, Any] = json.loads(text)
    del manifest["sha256"]
    return manifest
