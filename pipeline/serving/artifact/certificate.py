"""Measure how far an artifact's scores are from the trained model's, and decide whether it may be written.

The artifact's files are loaded as a server loads them, and score the rows that the trained model has scored.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.config.serving import PRECISIONS, ParityConfig
from pipeline.data.targets import Target
from pipeline.runtime.logs import progress
from pipeline.serving.artifact.kept_rows import KeptRows
from pipeline.serving.artifact.manifest import Manifest
from pipeline.serving.artifact.quantize import nearest, row_bytes
from pipeline.serving.artifact.task_quality import Parity, Quality
from pipeline.serving.scoring.artifact_files import load_parts

if TYPE_CHECKING:
    from pipeline.serving.artifact.reference import Reference

SPLIT = "validation"


def excesses(found: dict[str, Parity], limits: ParityConfig) -> list[str]:
    """A line for each limit that a split, and of several labels one of them, passes, with both numbers."""
    lines = []
    parities = {f"{split}, {name}": of_task for split, each in found.items() for name, of_task in each.tasks.items()}
    for split, parity in {**{split: each for split, each in found.items() if not each.tasks}, **parities}.items():
        checks = [
            ("NE", "rises by", parity.ne_delta, "max_ne_increase", limits.max_ne_increase),
            ("AUC", "falls by", -parity.auc_delta, "max_auc_decrease", limits.max_auc_decrease),
            ("a score", "moves by", parity.max_score_difference, "max_score_difference", limits.max_score_difference),
        ]
        lines += [
            f"{split}: {what} {moves} {value:.3g}, parity.{name} allows {limit:g}"
            for what, moves, value, name, limit in checks
            if value > limit
        ]
        name = split.partition(",")[0]
        way_out = f"leave {name} out of parity.splits" if name != SPLIT else "prepare the data with both kinds in it"
        if math.isnan(parity.ne_delta):  # AUC alone is undefined where labels are numbers
            lines.append(
                f"{split}: NE is undefined, its {parity.rows:,} rows have labels of one kind, so parity.max_ne_increase and "
                f"parity.max_auc_decrease cannot be held: {way_out}"
            )
    return lines


def costs(reference: Reference, kept: list[KeptRows | None], limits: ParityConfig) -> dict[str, Any]:
    """What each precision of all tables would cost on the validation split, and what pruning costs, each by itself."""
    trained, precisions = reference.trained, {}
    with progress("measuring what each precision costs", len(PRECISIONS)) as bar:
        for name in PRECISIONS:
            mix = [nearest(stored.dim, name) for stored in trained.stored]
            table_bytes = sum(
                table.rows * row_bytes(table.dim, kind) for table, kind in zip(trained.stored, mix, strict=True)
            )
            parity = reference.parity_of(SPLIT, mix)
            precisions[name] = {**parity.as_dict(), "table_bytes": table_bytes}
            bar.advance(1)
    return {
        "model": {split: _said(trained.targets, found) for split, found in reference.qualities.items()},
        "model_precision": "bf16" if trained.is_bf16 else "fp32",
        "precisions": precisions,
        "pruning": _cost_of_pruning(reference, kept) if any(rows is not None for rows in kept) else None,
        "limits": asdict(limits),
    }


def _said(targets: list[Target], found: list[Quality]) -> dict[str, Any]:
    """The quality of one label; of several by their names."""
    if len(found) == 1:
        return asdict(found[0])
    return {target.name: asdict(each) for target, each in zip(targets, found, strict=True)}


def _cost_of_pruning(reference: Reference, kept: list[KeptRows | None]) -> dict[str, Any]:
    stored = reference.trained.stored
    left = [table.rows if rows is None else rows.num_kept for table, rows in zip(stored, kept, strict=True)]
    parity = reference.parity_of_pruned(SPLIT, kept)
    return {**parity.as_dict(), "rows_before": sum(table.rows for table in stored), "rows_after": sum(left)}


def check(reference: Reference, manifest: Manifest, path: str) -> dict[str, Parity]:
    """By split. `path` is where the artifact's files lie; its manifest is not written yet."""
    lookup, program = load_parts(path, manifest)
    with progress("scoring by the artifact", sum(sample.num_rows for sample in reference.samples.values())) as bar:
        return {
            split: reference.compare(split, sample.score(program, lambda batch: lookup.pooled(*batch.ids), bar.advance))
            for split, sample in reference.samples.items()
        }


def refusal(excesses: list[str], certificate: dict[str, Any], hints: list[str], precision: str) -> str:
    """Why an artifact of this precision is not written. The first way out is the smallest wider one that would do.

    Which would is known of the validation split alone: on another one the refused precision may be the only one that does not.
    """
    limits = certificate["limits"]
    wider = PRECISIONS[: PRECISIONS.index(precision)] if precision in PRECISIONS else PRECISIONS
    fits = [
        name
        for name, cost in certificate["precisions"].items()
        if name in wider
        and cost["ne_delta"] <= limits["max_ne_increase"]
        and not -cost["auc_delta"] > limits["max_auc_decrease"]  # NaN of labels that are numbers
        and cost["max_score_difference"] <= limits["max_score_difference"]
    ]
    suggestions = [*(f"precision={name} keeps within the limits on {SPLIT}" for name in fits[-1:]), *hints]
    return (
        f"nothing is written, the artifact is too far from the model: {'; '.join(excesses)}. "
        f"{'; '.join([*suggestions, 'or raise the limit'])}"
    )
