"""Score raw rows with an exported artifact: python -m pipeline predict
artifact=artifacts/quickstart source=rows.parquet output=scores.parquet

sources -> scorer -> the output is there? -> score in parts -> check -> write -> report. This file
is the whole path; each step is one call away. Run the same command again to resume a killed run.

With a two-tower's artifact, find the best items of each row (retrieve.k=100), or write its vector
(retrieve.vectors=true).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.config.jobs.evaluate import PredictJob
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.processes import none_while_importing, only_one_run
from pipeline.runtime.storage import storage
from pipeline.serving.scoring.load import FoundArtifact, find_folder
from pipeline.serving.scoring.prediction import (
    MANIFEST_SUFFIX,
    QUARANTINE_SUFFIX,
    PredictSummary,
    check_apart,
    check_refused,
    find_finished,
    job_of_shard,
    other_version,
    publish_manifest,
    publish_report,
    sources_of_shard,
    staging_folder,
    subject_of,
)

if TYPE_CHECKING:
    from pipeline.serving.scoring.scorer import Scorer

logger = get_logger(__name__)


def predict(
    job: PredictJob,
    load: Callable[[PredictJob], Scorer] | None = None,
    find: Callable[[str], FoundArtifact] = find_folder,
) -> PredictSummary:
    """Write job.output, and <output>.json, which commits the output. Bad rows go to
    <output>.quarantine.jsonl.

    With num_shards this shard's files are written, and the last shard to end writes the manifest of
    all shards. Raises ServingError: artifact or source cannot be read, too many rows are bad,
    job.output holds other scores, or another shard was scored by another version.
    """
    started = time.monotonic()
    # Here, so that a typo in the command fails before torch and pyarrow are imported.
    with none_while_importing():
        from pipeline.data.raw.source import find_sources
        from pipeline.serving.scoring.load import load_artifact
        from pipeline.serving.scoring.score_files import StagedScores, format_of, score_sources, write_output

    check_apart(job)
    whole, job = job, job_of_shard(job)
    sources = find_sources(job.source)
    if load is None:
        found = find(job.artifact).path
        scorer = load_artifact(found, job.memory, job.ssd, job.threads, job.compiled, job, job.deltas)
    else:
        scorer = load(job)
    subject = subject_of(job, scorer, sources, job.format or format_of(sources, scorer.columns))
    if (problem := other_version(whole, subject)) and not job.overwrite:
        raise ServingError(problem)
    if finished := find_finished(job, subject):
        publish_manifest(whole)
        return finished
    if job.num_shards > 1:
        storage.remove(whole.output + MANIFEST_SUFFIX)  # of another prediction
    staging = staging_folder(job)
    os.makedirs(staging, exist_ok=True)
    with only_one_run(staging, "scoring"):
        staged = StagedScores(staging, subject)
        staged.take_over()
        scored_before = staged.progress.num_rows
        own = sources_of_shard(sources, job.shard, job.num_shards)
        schema = score_sources(job, scorer, sources, own, staged)
        check_refused(job, staged)
        write_output(job, schema, staged)
        summary = publish_report(job, scorer, own, staged)
        storage.remove(staging)
    if problem := other_version(whole, subject):  # both were scoring when the artifact or its deltas changed
        if not job.overwrite:
            raise ServingError(problem)
        logger.warning("no manifest is written yet: %s", problem)
    elif publish_manifest(whole):
        logger.info("all %d shards are done: %s%s", job.num_shards, whole.output, MANIFEST_SUFFIX)
    seconds = time.monotonic() - started
    return replace(summary, num_scored_before=scored_before, seconds=seconds, columns=list(schema.names))


def describe(summary: PredictSummary) -> str:
    lines = [
        f"{summary.num_rows:,} rows, {summary.num_rows - summary.num_refused:,} scored by artifact {summary.artifact_version}"
    ]
    if summary.num_refused:
        lines.append(f"{summary.num_refused:,} without a score: {summary.output}{QUARANTINE_SUFFIX} says why")
    values, unknown = (sum(counts[which] for counts in summary.row_zero.values()) for which in (0, 1))
    if values:
        worst = max(summary.row_zero, key=lambda name: summary.row_zero[name][1] / max(1, summary.row_zero[name][0]))
        total, zeros = summary.row_zero[worst]
        lines.append(
            f"{values - unknown:,} of {values:,} categorical values are known to the model; least of {worst}: "
            f"{total - zeros:,} of {total:,}"
        )
    if summary.already_scored:
        lines.append(f"already scored in {summary.output}: nothing to do")
    else:
        rate = (summary.num_rows - summary.num_scored_before) / max(summary.seconds, 1e-9)
        shown = f" ({rate:,.0f} rows/s)" if rate >= 1 else ""  # of a few rows it is the time of the start
        lines.append(
            f"written to {summary.output} in {summary.seconds:.1f} s{shown}: columns {', '.join(summary.columns)}"
        )
        if set(summary.columns) <= {"file", "row", "score"}:
            lines.append("next: match scores and rows by `row`, or add columns of the source with id_columns=[NAME]")
    return "\n".join(lines)
