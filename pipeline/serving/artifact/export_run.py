"""Export a checkpoint as an artifact that scores raw rows:  python -m pipeline export run=runs/quickstart precision=int8

Tables in fp32, fp16, int8, int4 or int2, one by one too (tables.cat_3=fp16), or precision=auto for the smallest mix within
ne_budget; rows left out by pruning.kind=untrained or frequency; layers in fp32, bf16 or int8 (dense=bf16), and compiled
ahead of time (compiled=true). What it costs in quality is measured and stands in the artifact; past parity.max_ne_increase
and the like nothing is written. A two-tower becomes a user's program, an item's program, and its items' vectors with an index
(retrieval.index=auto).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.registry import from_extra
from pipeline.runtime.byte_counts import show_size
from pipeline.runtime.errors import ServingError, UserError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.garbage import none_while_importing
from pipeline.runtime.shell_words import word
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.signature import requiring, signing

if TYPE_CHECKING:
    from pipeline.serving.artifact.manifest import Manifest
    from pipeline.serving.artifact.source import Source
    from pipeline.serving.artifact.trained_model import TrainedModel

logger = get_logger("pipeline.export")


@dataclass
class ExportSummary:
    """`parity` is what the artifact's certificate says, by split: scores, NE and AUC beside the trained model's."""

    run: str
    step: int
    artifact: str
    version: str
    certificate: dict[str, Any]
    sizes: dict[str, Any]
    already_exported: bool = False
    seconds: float = 0.0
    parity: dict[str, dict[str, Any]] = field(default_factory=dict)
    best_by: str = ""  # the metric by which the step is the best of the run; empty where it was not chosen so


def export(job: ExportJob) -> ExportSummary:
    """Write the artifact, or find that it is there already.

    Raises:
        ServingError: the run, step or data set is not there, or damaged; another artifact has the output's place; or the
            artifact's scores lie further from the model's than job.parity allows, with the numbers.
    """
    with none_while_importing():  # here, for a typo in the command line must fail before torch is loaded
        from pipeline.serving.artifact.make_artifact import make_artifact
        from pipeline.serving.artifact.package import artifact_folder
        from pipeline.serving.artifact.source import default_output, open_source

    started = time.monotonic()
    with requiring(job.require_signature):
        source = open_source(job)
    output = job.output or default_output(job, source.step)
    if storage.exists(output):
        return _already_there(job, source, output)
    logger.info("step %d of %s: %s", source.step, job.run, _describe_tables(source.trained))
    try:
        # Tables are read while they are written, so the signature is required here too.
        with artifact_folder(output) as at, requiring(job.require_signature), signing(job.sign_key):
            manifest = make_artifact(job, source, at)
            at.commit(manifest.to_text())
    except FileExistsError:  # another export has made it in the meantime, maybe the same
        return _already_there(job, source, output)
    return _summary(job, source, output, manifest, time.monotonic() - started)


def _already_there(job: ExportJob, source: Source, output: str) -> ExportSummary:
    """Raises ServingError where what is there is something else."""
    from pipeline.serving.artifact.manifest import read_manifest
    from pipeline.serving.artifact.source import lineage_of, settings_of

    hint = f"choose another output=<folder>, or remove {output}"
    try:
        manifest = read_manifest(output)
    except UserError as error:
        raise ServingError(f"{output} is there already, and is no artifact ({error}): {hint}") from None
    wanted = {**lineage_of(job, source), "exported_at": manifest.lineage["exported_at"], "run": manifest.lineage["run"]}
    if manifest.lineage != wanted or manifest.settings != json.loads(json.dumps(settings_of(job))):
        raise ServingError(f"{output} is there already, of another step, run or setting: {hint}")
    return _summary(job, source, output, manifest, 0.0, already_exported=True)


def _summary(
    job: ExportJob, source: Source, output: str, manifest: Manifest, seconds: float, already_exported: bool = False
) -> ExportSummary:
    return ExportSummary(
        job.run, source.step, output, manifest.version, manifest.certificate, manifest.sizes, already_exported, seconds,
        manifest.certificate["splits"], source.best_by,
    )  # fmt: skip


def _describe_tables(trained: TrainedModel) -> str:
    rows = sum(stored.rows for stored in trained.stored)
    return f"{len(trained.tables)} tables with {rows:,} rows, {show_size(trained.table_bytes)}"


def _by_label(splits: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Each split's parity, or, of several labels, each label's."""
    found = []
    for split, parity in splits.items():
        of_tasks = parity.get("tasks", {})
        found += [(f"{split} {name} ", each) for name, each in of_tasks.items()] or [(split, parity)]
    return found


def describe(summary: ExportSummary) -> str:
    from pipeline.serving.artifact.task_quality import measures

    sizes, certificate = summary.sizes, summary.certificate
    if "index" in certificate:
        return str(from_extra("describe_towers", f"run={summary.run}")(summary))
    ratio = sizes["tables_before"] / max(sizes["tables_after"], 1)
    lines = [title(summary), *_table_of_precisions(certificate["precisions"])]
    for split, parity in _by_label(certificate["splits"]):
        titles = measures(parity["ne"], parity["auc"])
        numbers = "".join(
            f"{title} {parity[key]:.5f} ({parity[f'{key}_delta']:+.6f}), " for key, title in titles.items()
        )
        lines.append(f"{split:<12}{numbers}scores within {parity['max_score_difference']:.2g} of the model's")
    lines.append(
        f"tables      {show_size(sizes['tables_before'])} -> {show_size(sizes['tables_after'])} ({ratio:.1f}x smaller); layers "
        f"{show_size(sizes['layers_before'])} -> {show_size(sizes['layers_after'])}, vocabularies {show_size(sizes['vocabularies'])}"
    )
    return "\n".join([*lines, *ending(summary)])


def _table_of_precisions(costs: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each precision, with what scores lose by it."""
    from pipeline.serving.artifact.task_quality import measures

    first = next(iter(costs.values()))
    titles = measures(first["ne_delta"], first["auc_delta"])
    heads = "".join(f"{title:>{max(12, len(title) + 2)}}" for title in titles.values())
    lines = [f"  {'precision':<11}{'tables':>12}{heads}{'score, most':>13}{'mean':>11}   on validation"]
    for name, cost in costs.items():
        deltas = "".join(f"{cost[f'{key}_delta']:>+{max(12, len(title) + 2)}.6f}" for key, title in titles.items())
        lines.append(
            f"  {name:<11}{show_size(cost['table_bytes']):>12}{deltas}"
            f"{cost['max_score_difference']:>13.2g}{cost['mean_score_difference']:>11.2g}"
        )
    return lines


def title(summary: ExportSummary) -> str:
    """Return the first line of what export prints."""
    best = f" (best by {summary.best_by})" if summary.best_by else ""
    return f"step {summary.step}{best} of {summary.run} as an artifact, version {summary.version}"


def ending(summary: ExportSummary) -> list[str]:
    """Return the last lines: where the artifact is, and the next command."""
    sizes, lines = summary.sizes, []
    if summary.already_exported:
        lines.append(f"already exported to {summary.artifact}: nothing to do")
    else:
        lines.append(f"written to  {summary.artifact} ({show_size(sizes['artifact'])}) in {summary.seconds:.1f} s")
    return [*lines, f"next        python -m pipeline serve {word('artifact', summary.artifact)}"]
