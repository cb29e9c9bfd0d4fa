"""Name, compare and publish the files of a prediction: report, quarantine, and the manifest of its
shards.

<output>.json what the scores depend on, the counts and the sources: it commits the output
<output>.quarantine.jsonl rows without a score, with the reason <output without
suffix>.shard-00002-of-00008.parquet the scores of shard 2, with the same files
<output>.manifest.json every shard's file in the order of the rows; the last shard to end writes it

A shard has complete source files that follow each other. So all shards, one after another, have the
same rows as the output of a run without shards.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pipeline.config.jobs.evaluate import PredictJob
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import atomic, storage
from pipeline.runtime.storage.private import temporary_folder

if TYPE_CHECKING:
    from pipeline.data.raw.blocks import Source
    from pipeline.serving.scoring.score_files import StagedScores
    from pipeline.serving.scoring.scorer import Scorer

REPORT_SUFFIX, MANIFEST_SUFFIX, QUARANTINE_SUFFIX = ".json", ".manifest.json", ".quarantine.jsonl"
STATE = "state of the source"  # in a subject: modification times and ETags of large sources
logger = get_logger("pipeline.serving.scoring.predict")


@dataclass(frozen=True)
class PredictSummary:
    """The result. `num_rows`: all rows of the source. `num_refused`: the rows among them that have no score."""

    output: str
    artifact_version: str
    num_rows: int
    num_refused: int
    row_zero: dict[str, list[int]] = field(default_factory=dict)  # feature -> values, and those unknown or missing
    num_scored_before: int = 0
    already_scored: bool = False
    seconds: float = 0.0
    columns: list[str] = field(default_factory=list)  # of the output, if it was written now


def check_apart(job: PredictJob) -> None:
    """Raise ServingError if the output would match `source`, because the next run would then read it as a source."""
    folder = storage.dirname(job.output)
    by_pattern = any(character in job.source for character in "*?[") and fnmatch.fnmatch(job.output, job.source)
    local = storage.is_local(job.output) and storage.is_local(job.source)
    if by_pattern or job.output == job.source or (local and os.path.realpath(folder) == os.path.realpath(job.source)):
        raise ServingError(f"output={job.output} is among the files of source={job.source}: write it to another folder")


def staging_folder(job: PredictJob) -> str:
    """Return a folder next to the output, or in temp_dir. Its name is the same after a restart."""
    if job.temp_dir is None and storage.is_local(job.output):
        return job.output + ".partial"
    return os.path.join(job.temp_dir or temporary_folder(), quote(job.output, safe="") + ".partial")


def subject_of(job: PredictJob, scorer: Scorer, sources: list[Source], kind: str) -> dict[str, Any]:
    """Return everything that the output's bytes depend on, as values that JSON can store. kind: the format."""
    subject = {
        "artifact": scorer.version + ("+compiled" if job.compiled else ""),
        "source": [[source.name, source.size_bytes, source.digest] for source in sources],
        "format": kind,
        "id_columns": list(job.id_columns),
        "batch_rows": job.batch_rows,  # a product of matrices may round by its number of rows
    }
    text = [job.delimiter, job.encoding, job.quotes]
    if text != [None, "utf-8", "doubled"]:
        subject["text"] = text
    if job.num_shards > 1:
        subject["shard"] = [job.shard, job.num_shards]
    if states := [
        (source.stamp.modified_ns, source.stamp.etag) for source in sources if source.stamp and source.is_sampled
    ]:
        subject[STATE] = states  # their digests leave bytes out
    if hasattr(scorer, "output"):
        subject["retrieve"] = asdict(job.retrieve)
    return dict(json.loads(json.dumps(subject)))


def find_finished(job: PredictJob, subject: dict[str, Any]) -> PredictSummary | None:
    """Return the summary if the same prediction has finished. Raises ServingError if the output holds another one."""
    report = job.output + REPORT_SUFFIX
    if not storage.is_file(report) and not storage.is_file(job.output):
        return None
    hint = "set overwrite=true, or choose another output"
    values = json.loads(storage.read_text(report)) if storage.is_file(report) else {}
    earlier = values.get("subject", {})
    changed = [name for name, value in subject.items() if earlier.get(name, value if name == STATE else None) != value]
    if storage.is_file(job.output) and not changed:
        return PredictSummary(**values["summary"], already_scored=True)
    if storage.is_file(job.output) and not job.overwrite:
        why = f"those of another {' and '.join(changed)}" if values else f"not from predict, for {report} is missing"
        raise ServingError(f"{job.output} holds other scores, {why}: {hint}")
    storage.remove(report)  # from here on nothing says that the output is whole
    return None


def check_refused(job: PredictJob, staged: StagedScores) -> None:
    """Raise ServingError if more rows are without a score than the job allows."""
    done = staged.progress
    if done.num_refused > job.max_quarantined_fraction * done.num_rows:
        first = json.loads(next(staged.quarantine_lines()))
        raise ServingError(
            f"{done.num_refused:,} of {done.num_rows:,} rows ({done.num_refused / done.num_rows:.2%}) cannot be scored and "
            f"max_quarantined_fraction allows {job.max_quarantined_fraction:.2%}; the first is {first['file']}, line "
            f"{first['line']}: {first['reason']}. Check format, fix the source, or allow more: what is scored is kept"
        )


def publish_report(job: PredictJob, scorer: Scorer, own: Sequence[Source], staged: StagedScores) -> PredictSummary:
    """Publish the quarantine and after it the report. Warn if many values are unknown."""
    done, refused = staged.progress, job.output + QUARANTINE_SUFFIX
    if not done.num_refused:
        storage.remove(refused)  # of an earlier prediction
    else:
        joined = os.path.join(staged.folder, "quarantine.jsonl")
        with open(joined, "w", encoding="utf-8") as out:
            out.writelines(staged.quarantine_lines())
        atomic.publish_file(joined, refused)
    summary = PredictSummary(job.output, scorer.version, done.num_rows, done.num_refused, done.row_zero)
    if text := scorer.unusual(done.row_zero):
        logger.warning("%s", text)
    stored = ("output", "artifact_version", "num_rows", "num_refused", "row_zero")
    report = {
        "subject": done.subject,
        "summary": {name: getattr(summary, name) for name in stored},
        "sources": [asdict(source) for source in own],
    }
    storage.publish_text(job.output + REPORT_SUFFIX, json.dumps(report, indent=1))
    return summary


def shard_output(output: str, shard: int, num_shards: int) -> str:
    """Return the output of one shard; the output itself if there is only one."""
    if num_shards == 1:
        return output
    stem, _, suffix = output.rpartition(".")
    return f"{stem}.shard-{shard:05d}-of-{num_shards:05d}.{suffix}"


def job_of_shard(job: PredictJob) -> PredictJob:
    return replace(job, output=shard_output(job.output, job.shard, job.num_shards))


def sources_of_shard(sources: Sequence[Source], shard: int, num_shards: int) -> list[Source]:
    """Return the files whose middle byte is in the shard's share of all bytes; [] if there are too few files."""
    total = sum(max(1, source.size_bytes) for source in sources)
    found, before = [], 0
    for source in sources:
        size = max(1, source.size_bytes)
        if (2 * before + size) * num_shards // (2 * total) == shard:
            found.append(source)
        before += size
    return found


def other_version(job: PredictJob, subject: dict[str, Any]) -> str:
    """Return which other shard has scored the same rows by another version of the artifact; "" if none has."""

    def rows(about: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in about.items() if name not in ("artifact", "shard", STATE)}

    for shard in range(job.num_shards):
        about = _report(shard_output(job.output, shard, job.num_shards)).get("subject", {})
        if shard != job.shard and rows(about) == rows(subject) and about["artifact"] != subject["artifact"]:
            return (
                f"shard {shard} of {job.output} was scored by version {about['artifact']}, and shard {job.shard} by "
                f"{subject['artifact']}: one output has one version. Give all shards the same artifact and "
                "deltas=<the number after the +> (deltas=false if there is none), and overwrite=true to score a shard again"
            )
    return ""


def publish_manifest(job: PredictJob) -> bool:
    """Write the manifest if every shard has a report of the same prediction. Return True if it was
    written.

    Shards that end at the same time write the same bytes.
    """
    if job.num_shards == 1:
        return False
    reports = [_report(shard_output(job.output, shard, job.num_shards)) for shard in range(job.num_shards)]
    about = [
        {name: value for name, value in each.get("subject", {}).items() if name not in ("shard", STATE)}
        for each in reports
    ]
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
    """Return a shard's report; empty if there is none, or another shard is writing it now."""
    path = output + REPORT_SUFFIX
    return dict(json.loads(storage.read_text(path))) if storage.is_file(path) else {}
