"""Turn `artifact=` into the folder that it names now: an artifact, a link to one, or a registry's champion."""

from __future__ import annotations

import hashlib
import os

from pipeline import storage
from pipeline.checkpoint.steps import MANIFEST
from pipeline.retraining.registry import POINTER, Registry
from pipeline.serving.switching import FoundArtifact


def find_artifact(artifact: str) -> FoundArtifact:
    """Raises ValueError where there is none."""
    if storage.is_file(storage.join(artifact, POINTER)):
        return _champion(artifact)
    # What a link names now is what is loaded, wherever it points a moment later.
    path = os.path.realpath(artifact) if storage.is_local(artifact) else artifact
    manifest = storage.join(path, MANIFEST)
    if not storage.is_file(manifest):
        raise ValueError(
            f"artifact={artifact} is neither an artifact nor a registry with a champion: {manifest} is missing; "
            "make one by python -m pipeline.export run=<run>"
        )
    return FoundArtifact(path, hashlib.sha256(storage.read_text(manifest).encode()).hexdigest())


def _champion(path: str) -> FoundArtifact:
    champion = Registry(path).champion()
    if champion is None:
        raise ValueError(f"registry {path} has no champion yet: promote a version first")
    if champion.artifact is None:
        raise ValueError(
            f"{champion.name}, the champion of {path}, has no artifact: retrain with an export, or export it"
        )
    return FoundArtifact(champion.artifact, f"{path}:{champion.name}")
