"""Train a challenger on a window and compare it with the champion: the long part of a tick.

Nothing here changes the registry. The result is a record, and a candidate if the verdict is
positive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.registry import if_installed
from pipeline.config.retraining import GateConfig
from pipeline.data.dataset import Dataset, load_dataset
from pipeline.data.raw.source import SourceChangedError
from pipeline.retraining.data_checks import check_data
from pipeline.retraining.feature_changes import FeatureChanges, LacksColumnError, learnt_labels
from pipeline.retraining.gate import Finding, Scores, judge
from pipeline.retraining.ledger import PROMOTED, REJECTED, Ledger, Record, judged_windows, windows_missed
from pipeline.retraining.promotion import Candidate, FinishedRun, files_of_artifact
from pipeline.retraining.registry import Pointer, Version
from pipeline.retraining.statistics import WindowStatistics
from pipeline.retraining.window_runner import WindowFiles, WindowRunner
from pipeline.retraining.windows import Window, file_name
from pipeline.runtime.errors import DamagedError, LimitError, RetrainingError, UserError
from pipeline.runtime.logs import get_logger
from pipeline.serving.artifact.export import ExportSummary
from pipeline.training.step_sync import NonFiniteLossError

logger = get_logger("pipeline.retrain")
History = list[tuple[str, WindowStatistics]]


@dataclass(frozen=True)
class Examined:
    """A window's data and the findings of the checks.

    `scores` are the champion's on its rows; None without a champion.
    """

    place: WindowFiles
    data: str
    statistics: WindowStatistics
    scores: Scores | None
    findings: list[Finding]

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.passed]


@dataclass(frozen=True)
class Outcome:
    """The result. `record` describes `window`.

    `candidate` is set if the challenger is to be promoted.
    """

    window: Window
    record: Record
    candidate: Candidate | None = None


@dataclass(frozen=True)
class Challenge:
    """Train a challenger from the champion on `window`, and judge it on the rows of the next
    window, `judged_on`.
    """

    job: RetrainJob
    runner: WindowRunner
    ledger: Ledger
    window: Window
    judged_on: Window
    champion: Version | None
    pointer: Pointer | None
    # part of every record: config_hash, code_version
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def parent(self) -> str:
        return self.champion.name if self.champion else ""

    @cached_property
    def rejected(self) -> dict[str, str]:
        """The sketches of windows whose data were rejected, by window: their rows stay rejected.

        The exceptions are the windows that `retry` names, whose data a person has found sound.
        """
        besides = (self.window.name, self.judged_on.name, *self.job.retry)
        found = judged_windows(self.ledger, self.job.checks.remember, besides, accepted=False)
        return {record.window: record.data["statistics"]["sketch"] for record in found}

    @cached_property
    def changes(self) -> FeatureChanges | None:
        """What the job reads and learns, compared with the champion; None without a champion."""
        return self.runner.changes(self.champion) if self.champion else None

    @cached_property
    def gate(self) -> GateConfig | None:
        """The gate on what both models learn and read; None if there is no such champion."""
        return self.runner.gate_for(self.champion) if self.champion else None

    def run(self) -> Outcome:
        """Return the outcome for `window`, or for `judged_on` if its data cannot be used to judge.

        Raises:
            RetrainingError: the job does not fit the data, or the first window cannot be prepared.
        """
        accepted = judged_windows(self.ledger, self.job.checks.remember, (self.window.name, self.judged_on.name))
        history = [
            (record.window, WindowStatistics.of({**record.data["statistics"], "begin": record.begin}))
            for record in accepted
        ]
        trained_on = self._examine(self.window, history, len(self._missed_before(self.window)))
        if isinstance(trained_on, Outcome):
            return trained_on
        if trained_on.failed:
            return self._unfit(self.window, trained_on)
        if reason := self._too_few_to_train(trained_on):
            if self.champion is None and not history:
                raise self._first_is_unfit(reason)
            return self._rejected(self.window, [reason], trained_on, accepted=False)
        missed = self._missed_before(self.judged_on) | {self.window.name}
        judged_on = self._examine(self.judged_on, [(self.window.name, trained_on.statistics), *history], len(missed))
        if isinstance(judged_on, Outcome):
            return judged_on
        if judged_on.failed:
            if self._is_like(judged_on, history):
                return self._unlike_the_next(trained_on, judged_on)
            return self._unfit(self.judged_on, judged_on)
        try:
            data = self.runner.challenger_data(trained_on.place, self.champion)
            if self.champion is not None:
                log_changes(self.champion, self.changes, load_dataset(self.champion.data), load_dataset(data))
            run = self.runner.train(trained_on.place, self.champion)
            name = f"challenger-of-{file_name(self.window.name)}-{self.parent or 'scratch'}"
            view = self.runner.by_challenger(judged_on.place, name, run.data, self.champion)
            scores = self.runner.score_run(run, view, self.gate or self.job.gate)
        except NonFiniteLossError as error:
            return self._rejected(self.window, [f"its challenger's loss is not finite: {error}"], trained_on)
        return self._decide(trained_on, judged_on, run, scores)

    def _missed_before(self, window: Window) -> set[str]:
        """Return the windows between the champion's window and this one that the champion was not
        trained on.
        """
        return windows_missed(self.ledger, self.champion.name, window.begin) if self.champion else set()

    def _examine(self, window: Window, history: History, age: int) -> Examined | Outcome:
        """Prepare and check the window's data for the champion.

        If that fails, return an outcome that rejects the window.
        """
        try:
            place = self.runner.place(window)
            data = self._champions_view(place)
        except UserError as error:
            self._check_job(error, window, history)
            return self._rejected(window, [str(error)])
        scores = self.runner.score_version(self.champion, data, self.gate) if self.champion and self.gate else None
        found = self._measure(place, data, history, age, scores)
        findings = check_data(found, [statistics for _, statistics in history], self.job.checks)
        log_findings(f"data of {window.name}", findings)
        return Examined(place, data, found, scores, findings)

    def _check_job(self, error: UserError, window: Window, history: History) -> None:
        """Raise the error if the window is not at fault.

        The job or the registry may be at fault: then each window that comes would be rejected. A file
        that is still written is not judged: the next tick reads it again.
        """
        if isinstance(error, (LacksColumnError, LimitError, SourceChangedError)):
            raise error
        if self.champion is not None:
            self.runner.check_data_of(self.champion)
        elif not history:  # no window has ever been prepared
            raise self._first_is_unfit(str(error)) from error

    def _too_few_to_train(self, examined: Examined) -> str:
        # Without a champion the window is prepared for its challenger, so held-out rows are already
        # removed.
        held_out = self.job.growth.validation_fraction if self.champion else 0.0
        rows = int(examined.statistics.rows * (1.0 - held_out))
        batch = self.job.trainer.global_batch_size
        return "" if rows >= batch else f"{rows:,} training rows are fewer than trainer.global_batch_size={batch:,}"

    def _first_is_unfit(self, why: str) -> RetrainingError:
        return RetrainingError(
            f"the first window, {self.window.name}, cannot be trained on: {why.rstrip('.')}. If "
            "its files are wrong and the job is correct, set "
            f"windows.first={self.judged_on.begin:%Y-%m-%dT%H:%M} to begin with the next window"
        )

    def _measure(
        self, place: WindowFiles, data: str, history: History, age: int, scores: Scores | None
    ) -> WindowStatistics:
        window = place.window
        found = self.runner.statistics(place, data, history, self.rejected, self.champion)
        found = replace(found, age=age, begin=window.begin.isoformat(), apart=_apart(window, history))
        if scores is None:  # these are the window's ids, so unknown ids cannot be measured
            return replace(found, empty_share={}, distance={})
        return replace(found, champion_ne=scores.ne, champion_calibration=scores.calibration)

    def _is_like(self, judged_on: Examined, history: History) -> bool:
        """Return whether the failed check passes for `judged_on` compared with windows before
        `window`.

        If so, `window` is wrong and not the next window. A wrong window passes while there is too
        little history to detect it. If the next window were rejected for being different, so would
        every later window, and the wrong window never. Rows that both windows have count against
        the later window.
        """
        names = {finding.name for finding in judged_on.failed}
        if "repeated_share" in names:
            return False
        age = judged_on.statistics.age
        found = self._measure(judged_on.place, judged_on.data, history, age, judged_on.scores)
        checks = replace(self.job.checks, min_history=1)
        findings = check_data(found, [statistics for _, statistics in history], checks)
        return all(finding.passed for finding in findings if finding.name in names)

    def _unlike_the_next(self, trained_on: Examined, judged_on: Examined) -> Outcome:
        why = f"the next window, {self.judged_on.name}, is similar to the windows before both and not to this one"
        reasons = [f"{why}: {finding.text}" for finding in judged_on.failed]
        return self._rejected(self.window, reasons, trained_on, accepted=False)

    def _unfit(self, window: Window, examined: Examined) -> Outcome:
        return self._rejected(window, [finding.text for finding in examined.failed], examined, accepted=False)

    def _champions_view(self, place: WindowFiles) -> str:
        """Return the folder of the window's rows as the champion reads them; without a champion, as
        the challenger reads them.
        """
        if self.champion is None:
            return self.runner.challenger_data(place, None)
        self.runner.check_added_columns(place, self.champion)
        return self.runner.by_champion(place, self.champion)

    def _decide(self, trained_on: Examined, judged_on: Examined, run: FinishedRun, scores: Scores) -> Outcome:
        champions = judged_on.scores
        if champions is not None and not np.array_equal(scores.labels, champions.labels):
            reason = (
                f"the champion reads {len(champions.labels):,} rows of {self.judged_on.name} and the challenger "
                f"{len(scores.labels):,}, so they cannot be compared: a column has another role, or its unreadable cells "
                "differ; data/quarantine of both lists them"
            )
            return self._rejected(self.window, [reason], trained_on)
        verdict = judge(scores, champions, self.gate or self.job.gate)
        log_findings(f"challenger of {self.window.name}", verdict.findings)
        metrics: dict[str, Any] = {**verdict.metrics, "judged_on": self.judged_on.name}
        cost_of_run = if_installed("cost_of_run")
        if cost := cost_of_run(run.folder) if cost_of_run else {}:
            metrics |= {f"training_{name}": cost[name] for name in ("rank_hours", "price") if cost[name] is not None}
        if len(learnt_labels(self.job)) > 1:
            metrics["label"] = self.job.gate.task or self.job.data.columns.label
        if not verdict.passed:
            return self._rejected(self.window, verdict.reasons, trained_on, metrics=metrics)
        extra: dict[str, str] = {}
        if self.job.gate.export.enabled:
            try:
                exported = self.runner.export(run, self.window.name)
            except DamagedError:  # the trained files were changed, so there is no verdict on the window
                raise
            except UserError as error:
                return self._rejected(self.window, [f"gate.export: {error}"], trained_on, metrics=metrics)
            metrics |= parity_metrics(exported)
            extra = files_of_artifact(exported.artifact)
        record = self._record(PROMOTED, self.window, trained_on, metrics=metrics)
        key = "|".join((self.window.name, trained_on.place.digest, self.parent, record.config_hash))
        return Outcome(self.window, record, Candidate(run, key, record, self.pointer, extra))

    def _rejected(
        self, window: Window, reasons: list[str], examined: Examined | None = None, accepted: bool = True, **more: Any
    ) -> Outcome:
        record = self._record(REJECTED, window, examined, accepted and examined is not None, reasons=reasons, **more)
        return Outcome(window, record)

    def _record(
        self,
        state: str,
        window: Window,
        examined: Examined | None,
        accepted: bool = True,
        reasons: Sequence[str] = (),
        **more: Any,
    ) -> Record:
        """Make a record. A window that was used although it is incomplete says so in its
        reasons.
        """
        data = {"accepted": accepted, "statistics": examined.statistics.as_dict()} if examined else {}
        if examined and self.changes is not None and not self.changes.is_empty:
            data["changes"] = self.changes.as_dict()
        return Record(
            state,
            window.name,
            parent=self.parent,
            begin=window.begin.isoformat(),
            reasons=[*reasons, *([window.why] if window.why else [])],
            data=data,
            source=examined.place.digest if examined else "",
            **self.about,
            **more,
        )


def _apart(window: Window, history: History) -> int:
    """Return by how many windows this window comes after the last accepted one.

    Drift is expected to grow with this number.
    """
    if not history or not history[0][1].begin:
        return 1
    between = abs(window.begin - datetime.fromisoformat(history[0][1].begin))
    return max(1, round(between / (window.end - window.begin)))


def parity_metrics(exported: ExportSummary) -> dict[str, Any]:
    """Return the artifact's version and the worst of all splits for each metric; empty if labels
    have one kind only.
    """
    found = {
        "export_ne_delta": max(parity["ne_delta"] for parity in exported.parity.values()),
        "export_auc_delta": min(parity["auc_delta"] for parity in exported.parity.values()),
        "export_max_score_difference": max(parity["max_score_difference"] for parity in exported.parity.values()),
    }
    return {"artifact": exported.version, **{name: value for name, value in found.items() if math.isfinite(value)}}


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"


def log_changes(champion: Version, changes: FeatureChanges | None, before: Dataset, now: Dataset) -> None:
    """Log what the challenger keeps of the champion, before it is trained."""
    if changes is None or changes.is_empty:
        return
    lines = "\n  ".join(changes.lines(before, now))
    logger.info("the job reads other columns than %s, the champion:\n  %s", champion.name, lines)


def log_findings(what: str, findings: list[Finding]) -> None:
    """Log one line: each check with its value and its limit."""
    shown = ", ".join(
        f"{finding.name} {_number(finding.value)} ({'passed' if finding.passed else 'FAILED'}, {finding.bound} {_number(finding.limit)})"
        for finding in findings
    )
    logger.info("%s: %s", what, shown)
