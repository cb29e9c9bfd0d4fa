"""Score raw rows with an exported artifact:  python -m pipeline predict artifact=artifacts/quickstart source=rows.parquet output=scores.parquet

With a two-tower's artifact, find the best items of each row (retrieve.k=100), or give its vector
(retrieve.vectors=true). Run the same command again to resume a killed run.
"""

from __future__ import annotations

import fnmatch
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline.config.jobs.evaluate import PredictJob
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger, progress
from pipeline.runtime.process.processes import none_while_importing, only_one_run
from pipeline.runtime.storage import atomic, storage
from pipeline.serving.scoring.load import FoundArtifact, find_folder

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.data.raw.blocks import Source
    from pipeline.serving.scoring.score_files import StagedScores
    from pipeline.serving.scoring.scorer import Scorer

REPORT_SUFFIX = ".json"
QUARANTINE_SUFFIX = ".quarantine.jsonl"
logger = get_logger(__name__)


@dataclass(frozen=True)
class PredictSummary:
    """`num_rows` are all of the source's; of those `num_refused` have no score."""

    output: str
    artifact_version: str
    num_rows: int
    num_refused: int
    row_zero: dict[str, list[int]] = field(default_factory=dict)  # feature -> values, and those unknown or missing
    num_scored_before: int = 0
    already_scored: bool = False
    seconds: float = 0.0


def predict(
    job: PredictJob,
    load: Callable[[PredictJob], Scorer] | None = None,
    find: Callable[[str], FoundArtifact] = find_folder,
) -> PredictSummary:
    """Write job.output, and <output>.json, which is its commit; bad rows go to <output>.quarantine.jsonl.

    With num_shards the files are this shard's, and the last shard to end writes the manifest of all.
    Raises ServingError: artifact or source cannot be read, too many rows are bad, or job.output holds
    other scores.
    """
    started = time.monotonic()
    # Here, so that a typo in the command fails before torch and pyarrow are imported.
    with none_while_importing():
        from pipeline.data.raw.source import find_sources
        from pipeline.serving.scoring.load import load_artifact
        from pipeline.serving.scoring.score_files import StagedScores

    check_apart(job)
    whole, job = job, job_of_shard(job)
    sources = find_sources(job.source)
    if load is None:
        path = find(job.artifact).path
        scorer = load_artifact(path, job.memory, job.ssd, job.threads, job.compiled, job)
    else:
        scorer = load(job)
    subject = _subject(job, scorer, sources)
    if finished := _finished(job, subject):
        if job.num_shards > 1:
            publish_manifest(whole)
        return finished
    if job.num_shards > 1:
        storage.remove(whole.output + MANIFEST_SUFFIX)  # of another prediction
    staging = staging_folder(job)
    os.makedirs(staging, exist_ok=True)
    with only_one_run(staging, "scoring"):
        staged = _take_over(StagedScores(staging, subject))
        scored_before = staged.progress.num_rows
        summary = _score(job, scorer, sources, staged)
        storage.remove(staging)
    if job.num_shards > 1 and publish_manifest(whole):
        logger.info("all %d shards are done: %s%s", job.num_shards, whole.output, MANIFEST_SUFFIX)
    return PredictSummary(**{**summary, "num_scored_before": scored_before, "seconds": time.monotonic() - started})


def check_apart(job: PredictJob) -> None:
    """Raise ServingError where the output would be one of the sources, the next time that they are looked for."""
    folder = storage.dirname(job.output)
    by_pattern = any(character in job.source for character in "*?[") and fnmatch.fnmatch(job.output, job.source)
    local = storage.is_local(job.output) and storage.is_local(job.source)
    if by_pattern or job.output == job.source or (local and os.path.realpath(folder) == os.path.realpath(job.source)):
        raise ServingError(f"output={job.output} is among the files of source={job.source}: write it to another folder")


def staging_folder(job: PredictJob) -> str:
    """Beside the output, or in temp_dir; named after the output, so that a killed run is found again."""
    from urllib.parse import quote

    from pipeline.runtime.storage.private import temporary_folder

    if job.temp_dir is None and storage.is_local(job.output):
        return job.output + ".partial"
    return os.path.join(job.temp_dir or temporary_folder(), quote(job.output, safe="") + ".partial")


def _subject(job: PredictJob, scorer: Scorer, sources: list[Source]) -> dict[str, Any]:
    """What the output's bytes depend on, as JSON reads it back."""
    from pipeline.serving.scoring.score_files import format_of

    subject = {
        "artifact": scorer.version + ("+compiled" if job.compiled else ""),
        "source": [[source.name, source.size_bytes, source.digest] for source in sources],
        "format": job.format or format_of(sources, scorer.columns),
        "id_columns": list(job.id_columns),
        "batch_rows": job.batch_rows,  # a product of matrices may round by its number of rows
    }
    if job.num_shards > 1:
        subject["shard"] = [job.shard, job.num_shards]
    if hasattr(scorer, "output"):
        subject["retrieve"] = asdict(job.retrieve)
    return dict(json.loads(json.dumps(subject)))


def _finished(job: PredictJob, subject: dict[str, Any]) -> PredictSummary | None:
    """The summary of the same prediction. Raises ServingError where the output holds another one."""
    report = job.output + REPORT_SUFFIX
    if not storage.is_file(report) and not storage.is_file(job.output):
        return None
    hint = "set overwrite=true, or choose another output"
    values = json.loads(storage.read_text(report)) if storage.is_file(report) else {}
    changed = [name for name, value in subject.items() if values.get("subject", {}).get(name) != value]
    if storage.is_file(job.output) and not changed:
        return PredictSummary(**values["summary"], already_scored=True)
    if storage.is_file(job.output) and not job.overwrite:
        why = f"those of another {' and '.join(changed)}" if values else f"not from predict, for {report} is missing"
        raise ServingError(f"{job.output} holds other scores, {why}: {hint}")
    storage.remove(report)  # from here on nothing says that the output is whole
    return None


def _take_over(staged: StagedScores) -> StagedScores:
    dropped = staged.take_over()
    if dropped:
        logger.warning("%s since an earlier run of this command: scoring starts anew", dropped)
    elif staged.progress.parts:
        logger.info("going on after %s rows that an earlier run has scored", f"{staged.progress.num_rows:,}")
    return staged


def _score(job: PredictJob, scorer: Scorer, sources: list[Source], staged: StagedScores) -> dict[str, Any]:
    from pipeline.serving.scoring.score_files import (
        FILE,
        ROW,
        layout_of_file,
        open_sources,
        output_schema,
        score_source,
        without_formulas,
        write_output,
    )
    from pipeline.serving.scoring.scorer import output_of

    kind = staged.progress.subject["format"]
    layouts = [layout_of_file(source, kind, scorer.columns, job.id_columns, job.delimiter) for source in sources]
    fields = output_of(scorer).fields
    opened = open_sources(sources, layouts, (FILE, ROW, *(field.name for field in fields)))
    schema = output_schema(opened, fields)
    threads = job.threads or len(os.sched_getaffinity(0))
    own = sources_of_shard(sources, job.shard, job.num_shards)
    with progress("scoring", sum(source.size_bytes for source in own)) as bar:
        for number, source in enumerate(opened):
            if source.source not in own:
                continue
            score_source(
                scorer, source, number, schema, staged,
                batch_rows=job.batch_rows, rows_per_part=job.rows_per_part, threads=threads, advance=bar.advance,
            )  # fmt: skip
    done = staged.progress
    _check_refused(job, staged)
    tables: Iterable[pa.Table] = staged.tables()
    if job.output.endswith(".csv") and job.escape_formulas:
        tables = map(without_formulas, tables)
    write_output(job.output, schema, tables, os.path.join(staged.folder, "output"))
    _publish_quarantine(job, staged)
    summary = {
        "output": job.output,
        "artifact_version": scorer.version,
        "num_rows": done.num_rows,
        "num_refused": done.num_refused,
        "row_zero": done.row_zero,
    }
    if text := scorer.unusual(done.row_zero):
        logger.warning("%s", text)
    report = {"subject": done.subject, "summary": summary, "sources": [asdict(source) for source in own]}
    storage.publish_text(job.output + REPORT_SUFFIX, json.dumps(report, indent=1))
    return summary


def _check_refused(job: PredictJob, staged: StagedScores) -> None:
    done = staged.progress
    if done.num_refused > job.max_quarantined_fraction * done.num_rows:
        first = json.loads(next(staged.quarantine_lines()))
        raise ServingError(
            f"{done.num_refused:,} of {done.num_rows:,} rows ({done.num_refused / done.num_rows:.2%}) cannot be scored and "
            f"max_quarantined_fraction allows {job.max_quarantined_fraction:.2%}; the first is {first['file']}, line "
            f"{first['line']}: {first['reason']}. Check format, fix the source, or allow more: what is scored is kept"
        )


def _publish_quarantine(job: PredictJob, staged: StagedScores) -> None:
    path = job.output + QUARANTINE_SUFFIX
    if not staged.progress.num_refused:
        storage.remove(path)
        return
    joined = os.path.join(staged.folder, "quarantine.jsonl")
    with open(joined, "w", encoding="utf-8") as out:
        out.writelines(staged.quarantine_lines())
    atomic.publish_file(joined, path)


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
        lines.append(f"written to {summary.output} in {summary.seconds:.1f} s ({rate:,.0f} rows/s)")
    return "\n".join(lines)


MANIFEST_SUFFIX = ".manifest.json"


def shard_output(output: str, shard: int, num_shards: int) -> str:
    """Of one shard; the output itself where there is but one."""
    if num_shards == 1:
        return output
    stem, _, suffix = output.rpartition(".")
    return f"{stem}.shard-{shard:05d}-of-{num_shards:05d}.{suffix}"


def job_of_shard(job: PredictJob) -> PredictJob:
    return replace(job, output=shard_output(job.output, job.shard, job.num_shards))


def sources_of_shard(sources: Sequence[Source], shard: int, num_shards: int) -> list[Source]:
    """Files whose middle byte, counted over all files, lies in the shard's share of the bytes: none, where files are few; its output is empty then."""
    total = sum(max(1, source.size_bytes) for source in sources)
    found, before = [], 0
    for source in sources:
        size = max(1, source.size_bytes)
        if (2 * before + size) * num_shards // (2 * total) == shard:
            found.append(source)
        before += size
    return found


def publish_manifest(job: PredictJob) -> bool:
    """Write the manifest if every shard has its report of one prediction; return whether it was written.

    Shards that end at the same time write the same bytes.
    """
    reports = [_report(shard_output(job.output, shard, job.num_shards)) for shard in range(job.num_shards)]
    about = [{name: value for name, value in each.get("subject", {}).items() if name != "shard"} for each in reports]
    if not all(about) or any(each != about[0] for each in about):
        return False
    shards = [report["summary"] for report in reports]
    folder = storage.dirname(job.output)
    manifest = {
        "subject": about[0],
        "num_rows": sum(each["num_rows"] for each in shards),
        "num_refused": sum(each["num_refused"] for each in shards),
        "shards": [
            {
                "file": each["output"][len(folder) :].lstrip("/"),
                "num_rows": each["num_rows"],
                "num_refused": each["num_refused"],
                "sources": [source["name"] for source in report["sources"]],
            }
            for each, report in zip(shards, reports, strict=True)
        ],
    }
    storage.publish_text(job.output + MANIFEST_SUFFIX, json.dumps(manifest, indent=1))
    return True


def _report(output: str) -> dict[str, Any]:
    """Empty where there is none; another shard may be writing its own at this moment."""
    path = output + REPORT_SUFFIX
    return dict(json.loads(storage.read_text(path))) if storage.is_file(path) else {}
