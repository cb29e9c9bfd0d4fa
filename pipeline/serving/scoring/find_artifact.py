"""Find the folder that `artifact=` names now: an artifact, or a link to one."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from pipeline.runtime.errors import ServingError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.manifest import MANIFEST


@dataclass(frozen=True)
class FoundArtifact:
    """What `artifact=` names at the moment: `key` changes whenever another one has to be loaded."""

    path: str
    key: str


def find_folder(artifact: str) -> FoundArtifact:
    """Raises ServingError where there is none."""
    # What a link names now is what is loaded, wherever it points a moment later.
    path = os.path.realpath(artifact) if storage.is_local(artifact) else artifact
    manifest = storage.join(path, MANIFEST)
    if not storage.is_file(manifest):
        raise ServingError(
            f"artifact={artifact} is neither an artifact nor a registry with a champion: {manifest} is missing; "
            "make one by python -m pipeline.export run=<run>"
        )
    return FoundArtifact(path, hashlib.sha256(storage.read_text(manifest).encode()).hexdigest())
