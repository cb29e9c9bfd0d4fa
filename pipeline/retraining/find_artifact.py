"""Find the folder that `artifact=` names: an artifact, a link to one, or a registry's champion."""

from __future__ import annotations

from pipeline.retraining.registry import ARTIFACT, POINTER, Registry
from pipeline.runtime.errors import DamagedError, RetrainingError
from pipeline.runtime.storage import signature, storage
from pipeline.runtime.storage.checksums import damage
from pipeline.runtime.storage.manifest import MANIFEST, check_not_removed
from pipeline.serving.scoring.load import FoundArtifact, find_folder


def find_artifact(artifact: str) -> FoundArtifact:
    """Return the folder of an artifact. Raises RetrainingError or ServingError if there is none."""
    pointer = storage.join(artifact, POINTER)
    if storage.is_file(pointer):
        return _champion(artifact)
    check_not_removed(pointer)
    return find_folder(artifact)


def _champion(path: str) -> FoundArtifact:
    champion = Registry(path).champion()
    if champion is None:
        raise RetrainingError(f"registry {path} has no champion yet: promote a version first")
    if champion.artifact is None:
        raise RetrainingError(
            f"{champion.name}, the champion of {path}, has no artifact: retrain with an export, or export it"
        )
    if signature.is_required():  # an artifact of another version may be signed too
        name = f"{ARTIFACT}/{MANIFEST}"
        if problem := damage(storage.join(champion.path, name), champion.manifest["files"][name]):
            raise DamagedError(f"{problem}: it is not the artifact that {champion.name} was promoted with")
    return FoundArtifact(champion.artifact, f"{path}:{champion.name}")
