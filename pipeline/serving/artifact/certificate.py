"""Certify an artifact: load it as a server does, and compare its scores with the model's scores."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.serving import AUTO, PRECISIONS, ParityConfig
from pipeline.data.targets import Target
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger, progress
from pipeline.serving.artifact.manifest import Manifest
from pipeline.serving.artifact.plan import ExportPlan
from pipeline.serving.artifact.quantize import nearest, row_bytes
from pipeline.serving.artifact.reference import SPLIT, Reference, Scores
from pipeline.serving.artifact.task_quality import Parity, Quality, measures
from pipeline.serving.scoring.artifact_files import load_parts

logger = get_logger("pipeline.export")


def excesses(found: dict[str, Parity], limits: ParityConfig) -> list[str]:
    """Return a line for each limit that a split exceeds, with both numbers, and for each label separately."""
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
        fix = f"leave {name} out of parity.splits" if name != SPLIT else "prepare the data with both kinds in it"
        if math.isnan(parity.ne_delta):  # if labels are numbers, only AUC is undefined
            lines.append(
                f"{split}: NE is undefined, its {parity.rows:,} rows have labels of one kind, so parity.max_ne_increase and "
                f"parity.max_auc_decrease cannot be held: {fix}"
            )
    return lines


def certify(
    job: ExportJob, reference: Reference, plan: ExportPlan, draft: Manifest, outputs: dict[str, Scores]
) -> Manifest:
    """Return the manifest `draft` with a certificate added. `outputs`: artifact_outputs of its files.

    Raises ServingError if the scores differ more from the trained model's scores than job.parity
    allows.
    """
    certificate = _costs(reference, plan, job.parity)
    found = {split: reference.compare(split, reference.samples[split].scores(each)) for split, each in outputs.items()}
    certificate["splits"] = {split: parity.as_dict() for split, parity in found.items()}
    for split, parity in found.items():
        titles = measures(parity.ne_delta, parity.auc_delta)
        deltas = "".join(f"{title} {getattr(parity, f'{key}_delta'):+.6f}, " for key, title in titles.items())
        largest, mean = parity.max_score_difference, parity.mean_score_difference
        logger.info("artifact   %s: %sscores differ by %.2g at most, %.2g on average", split, deltas, largest, mean)
    if lines := excesses(found, job.parity):
        hints = ["precision=auto finds the smallest mix within ne_budget"] if job.precision != AUTO else []
        hints += ["prune less"] if job.pruning.kind != "none" else []
        hints += ["dense=fp32"] if job.dense != "fp32" else []
        raise ServingError(refusal(lines, certificate, hints, job.precision))
    return replace(draft, certificate={**draft.certificate, **certificate})


def artifact_outputs(reference: Reference, draft: Manifest, path: str) -> dict[str, Scores]:
    """Return split -> outputs of the layers of the artifact whose files are in folder `path`, not
    calibrated."""
    lookup, program = load_parts(path, draft)
    with progress("scoring by the artifact", sum(sample.num_rows for sample in reference.samples.values())) as bar:
        return {
            split: sample.outputs(program, lambda batch: lookup.pooled(*batch.ids), bar.advance)
            for split, sample in reference.samples.items()
        }


def _costs(reference: Reference, plan: ExportPlan, limits: ParityConfig) -> dict[str, Any]:
    """Return the loss of quality on the validation split by each precision of all tables, and by pruning."""
    step, precisions = plan.step, {}
    with progress("measuring what each precision costs", len(PRECISIONS)) as bar:
        for name in PRECISIONS:
            mix = [nearest(stored.dim, name) for stored in step.stored]
            table_bytes = sum(
                table.rows * row_bytes(table.dim, kind) for table, kind in zip(step.stored, mix, strict=True)
            )
            parity = reference.parity_of(SPLIT, mix)
            precisions[name] = {**parity.as_dict(), "table_bytes": table_bytes}
            bar.advance(1)
    pruning = None
    if any(rows is not None for rows in plan.kept):
        left = (each.stored.rows if each.kept is None else each.kept.num_kept for each in plan.tables)
        parity = reference.parity_of_pruned(SPLIT, plan.kept)
        pruning = {**parity.as_dict(), "rows_before": step.num_rows, "rows_after": sum(left)}
    return {
        "model": {split: _by_target(step.targets, found) for split, found in reference.qualities.items()},
        "model_precision": step.precision,
        "precisions": precisions,
        "pruning": pruning,
        "limits": asdict(limits),
    }


def _by_target(targets: list[Target], found: list[Quality]) -> dict[str, Any]:
    """Return the quality of the label; if there are several labels, return label -> quality."""
    if len(found) == 1:
        return asdict(found[0])
    return {target.name: asdict(each) for target, each in zip(targets, found, strict=True)}


def refusal(excesses: list[str], certificate: dict[str, Any], hints: list[str], precision: str) -> str:
    """Return a message that says why nothing is written, and suggests the smallest precision that fits."""
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
