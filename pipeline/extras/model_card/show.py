"""Read the card of an artifact, and add what came after the export: deltas, and the registry's decision."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.serving import CardConfig
from pipeline.extras.model_card.card import ModelCard, Since, read_card
from pipeline.extras.model_card.write import card_of
from pipeline.retraining.registry import Registry
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.checksums import read_verified
from pipeline.serving.artifact.deltas import OF_VERSION, deltas_folder, newest_sequence, read_delta
from pipeline.serving.artifact.manifest import CARD_FILES, ArtifactError, Manifest, read_manifest


def card_of_artifact(artifact: str) -> ModelCard:
    """Return the card of the artifact in this folder, with `since`.

    An artifact that was exported without a card has one that is made of its manifest. Raises
    DamagedError if the card, the manifest or the newest delta is damaged.
    """
    artifact = artifact.rstrip("/")
    manifest, name = read_manifest(artifact), CARD_FILES[0]
    if name in manifest.files:
        path = storage.join(artifact, name)
        card = read_card(read_verified(path, manifest.files[name]).decode(), path)
    else:
        try:
            card = card_of(manifest, CardConfig(**manifest.settings.get("card", {})))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{artifact} has no model card, and its certificate is not one of export ({error!r})"
            ) from None
    return replace(card, since=_since(artifact, manifest))


def _since(artifact: str, manifest: Manifest) -> Since:
    folder, version, is_champion = deltas_folder(artifact), None, None
    if OF_VERSION.fullmatch(artifact):
        of_version = storage.dirname(artifact)
        versions, _, name = of_version.rpartition("/")
        registry = Registry(storage.dirname(versions))
        version, pointer = registry.version(name), registry.pointer()
        is_champion = pointer is not None and pointer.version == name
    lineage = version.lineage if version is not None else {}
    metrics = lineage.get("metrics", {})
    newest = newest_sequence(folder)
    delta = read_delta(folder, artifact, manifest, newest) if newest else None
    return Since(
        version=None if version is None else version.name,
        is_champion=is_champion,
        window=lineage.get("window") or None,
        parent=lineage.get("parent"),
        judged_on=metrics.get("judged_on"),
        ne_when_judged=metrics.get("challenger_ne"),
        newest_delta=newest,
        delta_step=None if delta is None else delta.step,
        delta_ne=None if delta is None else delta.stats.get("ne"),
    )
