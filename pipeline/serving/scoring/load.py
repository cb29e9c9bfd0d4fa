"""Find the artifact folder that `artifact=` names, and load it as a scorer."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config.jobs.evaluate import PredictJob
from pipeline.config.registry import from_extra
from pipeline.config.serving import RetrieveConfig, SsdConfig
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.manifest import MANIFEST

if TYPE_CHECKING:
    from pipeline.serving.scoring.predictor import Predictor
    from pipeline.serving.scoring.scorer import Scorer

logger = get_logger(__name__)


@dataclass(frozen=True)
class FoundArtifact:
    """The artifact that `artifact=` names now. `key` changes if another artifact must be loaded."""

    path: str
    key: str


def find_folder(artifact: str) -> FoundArtifact:
    """Return the artifact's folder. Raises ServingError if there is none."""
    # What a link names now is what is loaded, wherever it points a moment later.
    path = os.path.realpath(artifact) if storage.is_local(artifact) else artifact
    manifest = storage.join(path, MANIFEST)
    if not storage.is_file(manifest):
        raise ServingError(
            f"artifact={artifact} is neither an artifact nor a registry with a champion: {manifest} is missing; "
            "make one by python -m pipeline export run=<run>"
        )
    return FoundArtifact(path, hashlib.sha256(storage.read_text(manifest).encode()).hexdigest())


def load_artifact(
    artifact: str,
    memory: str,
    ssd: SsdConfig,
    threads: int | None,
    compiled: bool,
    job: PredictJob | None = None,
    deltas: bool | int | None = None,
) -> Scorer:
    """Return a Predictor, or for a two-tower a retriever. With `job`, return the one for scoring files.

    deltas: True: apply the artifact's deltas; a number: those up to it; False: log a line if there are
    any; None: the caller applies them.
    """
    import torch

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    from pipeline.serving.artifact.manifest import read_manifest
    from pipeline.serving.scoring.predictor import Predictor

    has_towers = read_manifest(artifact).retrieval is not None
    if job is not None and has_towers:
        scorer: Scorer = from_extra("load_retriever_for_files", f"artifact={artifact}")(job, artifact)
        return scorer
    if job is not None and job.retrieve != RetrieveConfig():
        raise ServingError(f"{artifact} scores rows and retrieves nothing: leave out retrieve.*")
    cache_bytes = None if ssd.cache_gb is None else int(ssd.cache_gb * 2**30)
    load = from_extra("load_retriever", f"artifact={artifact}") if has_towers else Predictor.load
    loaded: Scorer = load(artifact, memory=memory, cache_bytes=cache_bytes, ssd=ssd, compiled=compiled)
    if isinstance(loaded, Predictor) and deltas is not None:
        _apply_deltas(loaded, artifact, deltas)
    return loaded


def _apply_deltas(predictor: Predictor, artifact: str, wanted: bool | int) -> None:
    from pipeline.serving.artifact.deltas import deltas_folder, newest_sequence

    newest = newest_sequence(deltas_folder(artifact))
    last = newest if isinstance(wanted, bool) else wanted
    if last > newest:
        raise ServingError(f"deltas={last}: the newest delta of {artifact} is number {newest}; deltas=true applies all")
    if newest and not wanted:
        logger.warning(
            "%s has deltas, to number %d, which a server applies. These scores are without them; add deltas=true to "
            "apply them",
            artifact,
            newest,
        )
    elif newest:
        predictor.catch_up(artifact, last)
        if predictor.sequence < last:
            raise ServingError(
                f"delta {predictor.sequence + 1} of {artifact} cannot be applied; the log says why. Without "
                "deltas=true the scores are those of the export"
            )


def cache_counts(scorer: object) -> tuple[int, int, int] | None:
    """Return lookups of tables on SSD, lookups found in memory, and the cached bytes; None for tables in memory."""
    lookup: Any = getattr(scorer, "lookup", None)
    counts = getattr(lookup, "counts", None)
    return None if counts is None else (counts.lookups, counts.hits, lookup.cache_bytes)
