"""Turn what was written into its certificate: beside the trained model, on the same rows, loaded as a server loads it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipeline.config.serving import PRECISIONS, ParityConfig
from pipeline.serving.artifact.certificate import Parity
from pipeline.serving.artifact.kept_rows import KeptRows
from pipeline.serving.artifact.manifest import Manifest
from pipeline.serving.artifact.reference import Reference, bytes_of, nearest
from pipeline.serving.scoring.predictor import load_parts

SPLIT = "validation"


def costs(reference: Reference, kept: list[KeptRows | None], limits: ParityConfig) -> dict[str, Any]:
    """What each precision of all tables would cost on the validation split, and what pruning costs, each by itself."""
    trained, precisions = reference.trained, {}
    for name in PRECISIONS:
        mix = [nearest(stored.dim, name) for stored in trained.stored]
        parity = reference.parity_of(SPLIT, mix)
        precisions[name] = {**parity.as_dict(), "table_bytes": bytes_of(trained, mix)}
    return {
        "model": {split: asdict(found) for split, found in reference.qualities.items()},
        "model_precision": "bf16" if trained.is_bf16 else "fp32",
        "precisions": precisions,
        "pruning": _cost_of_pruning(reference, kept) if any(rows is not None for rows in kept) else None,
        "limits": asdict(limits),
    }


def _cost_of_pruning(reference: Reference, kept: list[KeptRows | None]) -> dict[str, Any]:
    stored = reference.trained.stored
    left = [one.rows if rows is None else rows.num_kept for one, rows in zip(stored, kept, strict=True)]
    parity = reference.parity_of_pruned(SPLIT, kept)
    return {**parity.as_dict(), "rows_before": sum(one.rows for one in stored), "rows_after": sum(left)}


def check(reference: Reference, manifest: Manifest, path: str) -> dict[str, Parity]:
    """By split. `path` is where the artifact's files lie; its manifest is not written yet."""
    lookup, program = load_parts(path, manifest)
    return {
        split: reference.compare(split, sample.score(program, lambda batch: lookup.pooled(batch.values, batch.offsets)))
        for split, sample in reference.samples.items()
    }


def refusal(excesses: list[str], certificate: dict[str, Any], ways_out: list[str]) -> str:
    """Why an artifact is not written. The first way out is the smallest precision that would do."""
    limits = certificate["limits"]
    fits = [
        name
        for name, one in certificate["precisions"].items()
        if one["ne_delta"] <= limits["max_ne_increase"]
        and -one["auc_delta"] <= limits["max_auc_decrease"]
        and one["max_score_difference"] <= limits["max_score_difference"]
    ]
    ways = [*(f"precision={name} keeps within the limits on {SPLIT}" for name in fits[-1:]), *ways_out]
    return (
        f"nothing is written, the artifact is too far from the model: {'; '.join(excesses)}. "
        f"{'; '.join([*ways, 'or raise the limit'])}"
    )
