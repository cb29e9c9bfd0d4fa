"""Write the certificate of a serving log: whether training prepares and scores its rows as the server did.

{
  "log", "artifact", "passed": true or false, "problems": [one line each]
  "requests", "rows", "from", "to", "artifacts": {version: rows by delta}
  "replay": {"rows", "equal_rows" (all ids and dense values), "scores", "equal_scores", "differing", "examples"}
  "training": {"rows", "compared", "differing_rows", "columns": [{column, rows, looks_like, example}]}
  "psi": {feature: PSI against the training split}, and "score" against the scores of that split
}
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import load_saved_job
from pipeline.extras.serving_log import log_files
from pipeline.extras.serving_log.compare_rows import ColumnSkew, compare, explain, read_training_rows
from pipeline.extras.serving_log.drift import SCORE, Counts, Reference, measure_reference, read_reference
from pipeline.extras.serving_log.job import SkewJob
from pipeline.extras.serving_log.log_files import IDS, About, read_log, score_names
from pipeline.extras.serving_log.replay import Artifacts, Compared, replay
from pipeline.runtime.errors import DataError, ServingError
from pipeline.runtime.storage import storage

SHOWN = 12  # columns that the printed text names


def write_reference(job: SkewJob) -> str:
    """Measure the training split, and write job.reference."""
    assert job.reference is not None
    artifacts = Artifacts(job.artifact)
    if (count := len(set(artifacts.paths.values()))) != 1:
        raise ServingError(f"artifact={job.artifact} has {count} artifacts: name one for a reference")
    predictor = artifacts.load(next(iter(artifacts.paths)), 0)
    found = measure_reference(predictor, _data_path(job, predictor.manifest.lineage), job.reference_rows)
    found.write(job.reference)
    return f"{job.reference}: {len(found.features)} features of {found.rows:,} training rows"


def _data_path(job: SkewJob, lineage: dict[str, Any]) -> str:
    if job.data_path is not None:
        return job.data_path
    run = lineage.get("run")
    file = storage.join(str(run), "config.yaml")
    if not run or not storage.is_file(file):
        raise DataError(
            f"the run {run} of the artifact is not here: give data_path=<its data set>, or reference=<file>"
        )
    return str(load_saved_job(TrainJob, file).data.path)


def skew(job: SkewJob) -> dict[str, Any]:
    """Compare, and return the certificate. Raises DataError and ServingError."""
    assert job.log is not None
    artifacts, compared = Artifacts(job.artifact), Compared()
    training = None if job.rows is None else read_training_rows(job.rows, job.id_column, job.row_column)
    columns: dict[str, ColumnSkew] = {}
    num_matched = num_differing = 0
    reference, counts, requests = None, None, set()
    versions: dict[str, Counter[int]] = {}
    times: list[Any] = []
    notes: set[str] = set()
    for path, about, table in read_log(job.log):
        notes |= _notes(about)
        if about.compiled:
            raise ServingError(f"{path} was scored by compiled layers, whose scores cannot be computed again here")
        requests |= set(table[log_files.REQUEST_ID].to_pylist())
        times += [pc.min(table[log_files.TIME]).as_py(), pc.max(table[log_files.TIME]).as_py()]
        for delta in sorted(set(table[log_files.DELTA].to_pylist())):
            predictor = artifacts.load(about.artifact, delta)
            rows = table.filter(pc.equal(table[log_files.DELTA], delta)).combine_chunks()
            versions.setdefault(about.artifact, Counter())[delta] += rows.num_rows
            replay(predictor, about, rows, compared)
            if reference is None:
                reference = _reference(job, predictor)
                counts = _counts_of(reference)
            assert counts is not None
            count_rows(counts, about, rows)
            if training is not None:
                places = training.find(rows)
                own = training.table.take(pa.array(places[places >= 0]))
                num_matched += own.num_rows
                matched = rows.filter(pa.array(places >= 0))
                num_differing += compare(predictor.encoder, about, matched, own, columns)
    explain(columns)
    assert counts is not None
    certificate: dict[str, Any] = {
        "format_version": 1, "log": job.log, "artifact": job.artifact, "requests": len(requests), "rows": compared.rows,
        "from": str(min(times)), "to": str(max(times)),
        "artifacts": {version: {str(delta): n for delta, n in sorted(each.items())} for version, each in versions.items()},
        "replay": asdict(compared), "psi": dict(sorted(counts.psi().items(), key=lambda each: -each[1])),
        "psi_rows": compared.rows, "notes": sorted(notes),
    }  # fmt: skip
    if training is not None:
        if not num_matched:
            raise DataError(
                f"rows={job.rows} has none of the {len(requests)} requests of the log: is {job.id_column!r} the column "
                "of X-Request-ID, and row_column the number of the row in its request?"
            )
        certificate["training"] = {
            "rows": training.table.num_rows, "doubled_ids": training.num_doubled, "compared": num_matched,
            "differing_rows": num_differing, "columns": [_as_dict(each) for each in _by_rows(columns)],
        }  # fmt: skip
    certificate["problems"] = _problems(job, certificate)
    certificate["passed"] = not certificate["problems"]
    if job.output is not None:
        storage.publish_text(job.output, json.dumps(certificate, indent=1, default=str) + "\n")
    return certificate


def _notes(about: About) -> set[str]:
    here = torch.__version__, torch.backends.cpu.get_cpu_capability()
    there = about.torch, about.cpu
    if here == there:
        return set()
    return {f"scored by torch {there[0]} on {there[1]}, and here by torch {here[0]} on {here[1]}: last bits may differ"}


def _reference(job: SkewJob, predictor: Any) -> Reference:
    if job.reference is not None:
        return read_reference(job.reference)
    return measure_reference(predictor, _data_path(job, predictor.manifest.lineage), job.reference_rows)


def _counts_of(reference: Reference) -> Counts:
    scores = {} if reference.scores is None else {SCORE: reference.scores}
    return Counts({**reference.features, **scores})


def count_rows(counts: Counts, about: About, rows: pa.Table) -> None:
    """Count the features and scores of logged rows."""
    dense = np.asarray(rows[log_files.DENSE].combine_chunks().drop_null().flatten(), np.float32)
    dense = dense.reshape(-1, len(about.dense)) if about.dense else dense.reshape(0, 0)
    for number, name in enumerate(about.dense):
        counts.add(name, dense[:, number])
    for name in about.features:
        counts.add(name, np.asarray(rows[IDS + name].combine_chunks().drop_null().flatten(), np.int64))
    counts.add(SCORE, rows[score_names(about.scores)[0]].drop_null().to_numpy())


def _by_rows(columns: dict[str, ColumnSkew]) -> list[ColumnSkew]:
    return sorted(columns.values(), key=lambda each: -each.rows)


def _as_dict(skew: ColumnSkew) -> dict[str, Any]:
    served, own = skew.pairs[0]
    return {
        "column": skew.column, "rows": skew.rows, "prepared_rows": skew.prepared, "looks_like": skew.looks_like,
        "example": {**skew.request, "served": served, "training": own},
    }  # fmt: skip


def _problems(job: SkewJob, certificate: dict[str, Any]) -> list[str]:
    found, replayed = [], certificate["replay"]
    rows = max(1, replayed["rows"])
    if (share := (replayed["scores"] - replayed["equal_scores"]) / rows) > job.max_differing:
        found.append(
            f"{share:.2%} of the scores are not reproduced, at most {replayed['largest_difference']:.3g} apart"
        )
    kept = replayed["scores"]
    if (share := (kept - replayed["equal_rows"]) / rows) > job.max_differing:
        named = ", ".join(f"{name} ({count:,} rows)" for name, count in list(replayed["differing"].items())[:SHOWN])
        found.append(f"{share:.2%} of the rows are prepared otherwise: {named}")
    if replayed["refused_otherwise"] > job.max_differing * rows:
        found.append(f"{replayed['refused_otherwise']:,} rows are refused in one of serving and training")
    training = certificate.get("training", {"differing_rows": 0, "compared": 1})
    if training["differing_rows"] / training["compared"] > job.max_differing:
        found += [line_of(each) for each in training["columns"]]
    for name, psi in certificate["psi"].items():
        if psi > job.max_psi:
            found.append(f"{name} has moved from the training split: PSI {psi:.2f}, max_psi is {job.max_psi:g}")
    return found


def line_of(column: dict[str, Any]) -> str:
    example = column["example"]
    return (
        f"column {column['column']!r} {column['looks_like'] or 'differs'} in {column['rows']:,} rows; request "
        f"{example['request_id']} row {example['row']}: served {example['served']!r}, training {example['training']!r}"
    )


def describe(certificate: dict[str, Any]) -> str:
    replayed = certificate["replay"]
    lines = [
        f"{certificate['rows']:,} rows of {certificate['requests']:,} requests, {len(certificate['artifacts'])} artifacts",
        f"equal ids     {replayed['equal_rows']:,} of {replayed['scores']:,} rows",
        f"equal scores  {replayed['equal_scores']:,} of {replayed['scores']:,} rows, to the bit",
    ]
    if training := certificate.get("training"):
        lines.append(f"training rows {training['compared']:,} compared, {training['differing_rows']:,} differ")
    worst = list(certificate["psi"].items())[:3]
    lines.append("largest PSI   " + ", ".join(f"{name} {psi:.3f}" for name, psi in worst))
    lines += certificate["notes"]
    problems = certificate["problems"]
    lines += [f"SKEW: {each}" for each in problems[:SHOWN]] or ["no skew"]
    if len(problems) > SHOWN:
        lines.append(f"and {len(problems) - SHOWN} more")
    return "\n".join(lines)
