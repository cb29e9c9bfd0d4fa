"""Judge a canary by labels of live requests, with the gate of retrain, and promote or stop it.

Rows that both models have scored (shadow) are compared as a window of retrain is: on the same rows.
The label rates of the two models' answers are compared too, because a model can predict well what it
shows and show the wrong things.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.special import logit
from scipy.stats import norm

from pipeline.extras.canary.config import CanaryJob
from pipeline.extras.canary.pair_log import read_pairs
from pipeline.extras.canary.pointer import CanaryFile
from pipeline.extras.runs.slices import measure
from pipeline.retraining.gate import Finding, Scores, judge, upper_bound_of_ratio
from pipeline.retraining.ledger import PROMOTED, REJECTED, Ledger, Record
from pipeline.retraining.registry import Pointer, Registry, RegistryError, Version
from pipeline.runtime.errors import DataError, did_you_mean
from pipeline.runtime.storage import storage
from pipeline.serving.artifact.manifest import read_manifest

PROMOTE, STOP, WAIT = "promote", "stop", "wait"
EDGE = 1e-7  # scores are float32; a score of 0 or 1 has no logit
KEYS = ["request_id", "row"]


@dataclass(frozen=True)
class Decision:
    """What to do with the canary, why, and the numbers."""

    action: str
    reasons: list[str]
    metrics: dict[str, float]
    findings: list[Finding]

    def lines(self) -> list[str]:
        shown = [f"{each.name:<12}{'passed' if each.passed else 'FAILED'}  {each.text}" for each in self.findings]
        return [*shown, f"decision    {self.action}: {'; '.join(self.reasons)}"]


def evaluate(job: CanaryJob) -> list[str]:
    """Decide about the canary, and act if job.act says so. Raises RegistryError without a canary,
    DataError for a log or labels that cannot be read."""
    registry, file = Registry(job.registry), CanaryFile(job.registry)
    canary, champion = file.read(), registry.champion()
    pointer = registry.pointer()
    if canary.version is None or champion is None or pointer is None:
        raise RegistryError(f"{job.registry} has no canary: start one by `canary start {job.registry} VERSION`")
    if canary.version == champion.name:  # promoted, and ended before it could be noted
        file.stop("promoted", canary.version)
        return [f"champion    {champion.name}, the canary, was promoted before"]
    challenger = registry.version(canary.version)
    if canary.champion != champion.name:
        reason = f"the champion is {champion.name}, and the canary was started next to {canary.champion}"
        decision = Decision(STOP, [reason], {}, [])
        if job.act:
            stop(registry, file, challenger, champion.name, decision)
        return decision.lines()
    since = datetime.fromisoformat(canary.started_at)
    rows = labelled_rows(job, artifact_version(champion), artifact_version(challenger), since.timestamp())
    hours = (datetime.now(UTC) - since).total_seconds() / 3600
    decision = decide(job, rows, is_over=hours > job.max_hours)
    if job.act and decision.action == PROMOTE:
        promote(registry, file, challenger, pointer, decision)
    elif job.act and decision.action == STOP:
        stop(registry, file, challenger, champion.name, decision)
    return decision.lines()


def artifact_version(version: Version) -> str:
    if version.artifact is None:
        raise RegistryError(f"{version.name} has no artifact, so no server has scored by it")
    return read_manifest(version.artifact).version


def labelled_rows(job: CanaryJob, champion: str, challenger: str, since: float) -> pa.Table:
    """Return the logged rows of these two artifacts and their deltas that have a label, with the column `label`."""
    assert job.log is not None and job.labels is not None
    pairs = read_pairs(job.log)
    of_both = pc.and_(_is_of(pairs["champion"], champion), _is_of(pairs["challenger"], challenger))
    pairs = pairs.filter(pc.and_(of_both, pc.greater_equal(pairs["at"], since)))
    labels = _read_labels(job.labels)
    for name in (job.id_column, job.label_column):
        if name not in labels.column_names:
            hint = did_you_mean(name, labels.column_names)
            raise DataError(f"labels={job.labels} has no column {name!r}{hint}; it has {labels.column_names[:10]}")
    numbers = (
        labels[job.row_column]
        if job.row_column in labels.column_names
        else pa.nulls(len(labels), pa.int32()).fill_null(0)
    )
    try:
        columns = [
            labels[job.id_column].cast(pa.string()),
            numbers.cast(pa.int32()),
            labels[job.label_column].cast(pa.float32()),
        ]
    except pa.ArrowException as error:
        raise DataError(f"labels={job.labels} cannot be read: {str(error)[:200]}") from None
    known = pa.table(columns, names=[*KEYS, "label"]).group_by(KEYS).aggregate([("label", "max")])
    found = pairs.join(known.rename_columns([*KEYS, "label"]), KEYS, join_type="left outer")
    if job.negative_after_s is not None:
        is_old = pc.less(found["at"], datetime.now(UTC).timestamp() - job.negative_after_s)
        filled = pc.if_else(is_old, pc.fill_null(found["label"], 0.0), found["label"])
        found = found.set_column(found.column_names.index("label"), "label", filled)
    found = found.filter(found["label"].is_valid())
    values = np.unique(found["label"].to_numpy())
    if not np.isin(values, (0.0, 1.0)).all():
        raise DataError(f"labels={job.labels} has labels such as {values[:3].tolist()}; the gate needs 0 and 1")
    return found.sort_by([("at", "ascending"), ("request_id", "ascending"), ("row", "ascending")])


def _is_of(column: pa.ChunkedArray, version: str) -> pa.ChunkedArray:
    """Return True for this artifact and its deltas, and where no score was computed."""
    base = pc.list_element(pc.split_pattern(column, "+"), 0)
    return pc.fill_null(pc.equal(base, version), True)


def _read_labels(path: str) -> pa.Table:
    if not storage.exists(path):
        raise DataError(f"labels={path} is not there")
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"labels={path} is not Parquet: {' '.join(str(error).split())[:150]}") from None


def decide(job: CanaryJob, rows: pa.Table, is_over: bool) -> Decision:
    """Apply the gate. The canary is promoted if every check passes. It is stopped if a check fails
    with confidence, not by chance; before that it waits for more labels, until it is over.
    """
    gate, sure = job.gate, float(norm.ppf(job.gate.confidence))
    challenger, champion, num_lost = paired_scores(rows)
    verdict = judge(challenger, champion, gate)
    findings = [*verdict.findings, *_arms(rows, job.max_rate_fall, sure)]
    metrics = {**verdict.metrics, "paired_rows": float(len(challenger.labels))}
    failed = [each for each in findings if not each.passed]
    bad = [each.text for each in failed if each.name in ("finite", "label rate")]
    if num_lost:
        bad.append(f"the canary refuses {num_lost:,} rows that the champion scores")
    if {each.name for each in findings} >= {"ne", "calibration"}:
        bad += _proven_bad(challenger, champion, job, sure)
    if bad:
        return Decision(STOP, bad, metrics, findings)
    if not failed:
        return Decision(PROMOTE, [f"every check passes on {len(challenger.labels):,} rows"], metrics, findings)
    texts = [each.text for each in failed]
    if is_over:
        return Decision(STOP, [f"not proven within max_hours={job.max_hours:g}", *texts], metrics, findings)
    return Decision(WAIT, texts, metrics, findings)


def paired_scores(rows: pa.Table) -> tuple[Scores, Scores, int]:
    """Return challenger's and champion's scores of the rows that both have scored, and the number of
    rows that only the champion could score."""
    both = rows.filter(pc.and_(rows["champion"].is_valid(), rows["challenger"].is_valid()))
    labels = both["label"].to_numpy().astype(np.float32)
    first, second = (both[name].to_numpy() for name in ("champion_score", "challenger_score"))
    kept = np.isfinite(first) & np.isfinite(second)
    lost = int(np.count_nonzero(np.isfinite(first) & ~np.isfinite(second)))
    return Scores(_logits(second[kept]), labels[kept]), Scores(_logits(first[kept]), labels[kept]), lost


def _logits(scores: NDArray[Any]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = logit(np.clip(scores.astype(np.float64), EDGE, 1 - EDGE)).astype(np.float32)
    return found


def _proven_bad(challenger: Scores, champion: Scores, job: CanaryJob, sure: float) -> list[str]:
    """Return why the challenger is worse than the gate allows, with its confidence."""
    gate, found = job.gate, []
    inverse = upper_bound_of_ratio(champion.losses, challenger.losses, gate.confidence, gate.bootstrap_samples, 0)
    if (least := 1.0 / inverse) > 1.0 + gate.ne_tolerance:
        found.append(
            f"NE is at least {least:.4f} times the champion's with {100 * gate.confidence:g} % confidence; at most "
            f"{1.0 + gate.ne_tolerance:.4f} is allowed"
        )
    (value, error), _, _ = measure(
        challenger.logits.astype(np.float64), challenger.labels.astype(np.float64), np.ones(len(challenger.labels))
    )
    if value is not None and error is not None:
        low, high = value - sure * error, value + sure * error
        if low > gate.calibration_max or high < gate.calibration_min:
            found.append(
                f"calibration is {low:.4f} to {high:.4f}, and not within {gate.calibration_min:g} to {gate.calibration_max:g}"
            )
    return found


def _arms(rows: pa.Table, max_fall: float, sure: float) -> list[Finding]:
    """Compare the label rates of the canary's and the champion's answers; nothing if one has no labels."""
    by_canary = rows["by_challenger"].to_numpy()
    labels = rows["label"].to_numpy()
    counts = [(int(part.sum()), len(part)) for part in (labels[by_canary], labels[~by_canary])]
    if not all(positives for positives, _ in counts):
        return []
    (ours, our_rows), (theirs, their_rows) = counts
    rate, base = ours / our_rows, theirs / their_rows
    # The logarithm of a ratio of two rates has about this variance (delta method).
    error = math.sqrt((1 - rate) / ours + (1 - base) / theirs)
    highest = rate / base * math.exp(sure * error)
    text = (
        f"label rate {rate:.4f} of {our_rows:,} rows that the canary answered, {base:.4f} of the champion's "
        f"{their_rows:,}: the ratio is at most {highest:.4f}, and at least {1 - max_fall:.4f} is needed"
    )
    return [Finding("label rate", highest >= 1 - max_fall, highest, 1 - max_fall, text, "at least")]


def promote(registry: Registry, file: CanaryFile, version: Version, expected: Pointer, decision: Decision) -> None:
    """Make the canary the champion. Raises PinnedError or RegistryError if the champion has changed."""
    registry.promote(version, expected)
    file.stop("promoted", version.name)
    Ledger(registry.path).append(_record(PROMOTED, version, expected.version, decision))


def stop(registry: Registry, file: CanaryFile, version: Version, champion: str, decision: Decision) -> None:
    """End the canary: servers drop it at their next check, and the champion answers everything."""
    file.stop("; ".join(decision.reasons)[:1000], version.name)
    Ledger(registry.path).append(_record(REJECTED, version, champion, decision))


def _record(state: str, version: Version, champion: str, decision: Decision) -> Record:
    made = Record(**version.lineage.get("record", {"state": state}))
    metrics = {**decision.metrics, "judged_on": "labels of live requests"}
    reasons = [f"canary: {reason}" for reason in decision.reasons]
    return replace(made, state=state, version=version.name, parent=champion, reasons=reasons, metrics=metrics, time="")
