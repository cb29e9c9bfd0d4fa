"""Say where the steps of a checkpoint folder lie, what their manifests hold, and whether their files are intact."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from pipeline import storage

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
STEP_FOLDER = re.compile(r"step_(\d{8,})")


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says which one, why, and what to do."""


def step_path(folder: str, step: int) -> str:
    return storage.join(folder, step_name(step))


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def list_steps(folder: str) -> list[int]:
    """Committed steps, ascending."""
    if not storage.exists(folder):
        return []
    matches = (STEP_FOLDER.fullmatch(name) for name in storage.list_folder(folder))
    return sorted(int(match[1]) for match in matches if match)


def read_manifest(path: str) -> dict[str, Any]:
    manifest = json.loads(storage.read_text(storage.join(path, MANIFEST)))
    if manifest["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format_version {manifest['format_version']}, this release reads {FORMAT_VERSION}")
    return manifest


def damage(path: str, expected: dict[str, Any]) -> str:
    """Empty for a file of the size and checksum that its manifest gives, else what is wrong."""
    if not os.path.exists(path):
        return f"{path} is missing"
    if (size := os.path.getsize(path)) != expected["size_bytes"]:
        return f"{path} has {size} bytes, its manifest says {expected['size_bytes']}"
    return "" if storage.sha256_of(path) == expected["sha256"] else f"{path} does not match its checksum"
