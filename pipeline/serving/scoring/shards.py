"""Divide a prediction's files among processes, and say in one manifest when all of them are done.

<output less its suffix>.shard-00002-of-00008.parquet   the scores of shard 2, with the report and quarantine that any output has
<output>.manifest.json                                  every shard's file in the order of the rows; whoever ends last writes it

A shard has whole files, next to each other in the order of a single run: the shards one after another are that run's rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline.config.jobs.evaluate import PredictJob
from pipeline.runtime.storage import storage

if TYPE_CHECKING:
    from pipeline.data.raw.blocks import Source

MANIFEST_SUFFIX = ".manifest.json"
REPORT_SUFFIX = ".json"


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
    """Write the manifest if every shard has its report, and all are of one prediction; whether it was written.

    Shards that end at the same time write the same bytes. job: that of the command line, not of a shard.
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
