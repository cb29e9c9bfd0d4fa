"""Find the folder that `artifact=` names: an artifact, a link to one, or a registry's champion."""

from __future__ import annotations

from pipeline.retraining.registry import POINTER, Registry
from pipeline.runtime.errors import RetrainingError
from pipeline.runtime.storage import storage
from pipeline.serving.scoring.load import FoundArtifact, find_folder


def find_artifact(artifact: str) -> FoundArtifact:
    """Find the artifact. Raises RetrainingError if there is none."""
    return _champion(artifact) if storage.is_file(storage.join(artifact, POINTER)) else find_folder(artifact)


def _champion(path: str) -> FoundArtifact:
    champion = Registry(path).champion()
    if champion is None:
        raise RetrainingError(f"registry {path} has no champion yet: promote a version first")
    if champion.artifact is None:
        raise RetrainingError(
            f"{champion.name}, the champion of {path}, has no artifact: retrain with an export, or export it"
        )
    return FoundArtifact(champion.artifact, f"{path}:{champion.name}")
