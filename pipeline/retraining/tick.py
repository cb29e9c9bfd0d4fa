"""Train on new data, and promote the model if it is better:  python -m pipeline retrain
experiment=quickstart source=clicks/

One call takes the oldest windows of new data (at most max_catchup). For each window it prepares the
data, trains a challenger from the champion, compares both on the next window, and promotes or
rejects the challenger. A call that finds nothing to do, or another call running, ends with exit
code 0. So a scheduler may start it at any rate (docs/do/retraining.md).
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice, takewhile
from statistics import median_low
from typing import TYPE_CHECKING

from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.registry import from_extra
from pipeline.retraining.ledger import MAX_READ, PROMOTED, REJECTED, SKIPPED, TERMINAL, Ledger, Record, describe_record
from pipeline.retraining.promotion import complete, promote, publish
from pipeline.retraining.registry import PinnedError, Pointer, Registry
from pipeline.retraining.windows import LATE, READY, Window, find_windows
from pipeline.retraining.worker_group import WorkerGroup
from pipeline.runtime.errors import DamagedError, RetrainingError, UserError, did_you_mean
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process import preemption, watchdog
from pipeline.runtime.process.exit_codes import REJECTED_WINDOW
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.lease import Lease, RunFolderHeldError, take_lease
from pipeline.runtime.storage.signature import requiring, signing

if TYPE_CHECKING:
    from pipeline.retraining.window_runner import WindowRunner

ACCEPTED = "accepted_pointers.json"  # of a registry, if a signature is required: a later tick refuses older ones
MANY_REFUSED = 3  # windows in a row: more than a bad day and its repair
logger = get_logger("pipeline.retrain")


@dataclass
class TickSummary:
    """The result of a call.

    `records` are new; `note` says what is left for the next call, or why nothing was done.
    """

    champion: str
    records: list[Record] = field(default_factory=list)
    note: str = ""

    @property
    def has_rejected(self) -> bool:
        return any(record.state == REJECTED for record in self.records)


def retrain(job: RetrainJob) -> TickSummary:
    """Collective: process the oldest new windows.

    Raises:
        RetrainingError: the job does not fit the source, the data or the registry.
    """
    group = WorkerGroup(job.world_size, job.comms.backend, job.comms.timeout_s, job.hardware.compute_device)
    if not group.is_leader:
        with signing(job.checkpoint.sign_key), requiring(job.checkpoint.require_signature):
            group.follow()
        return TickSummary("")
    try:
        with ExitStack() as stack:
            stack.enter_context(watchdog.unwatched("working on windows"))
            stack.enter_context(signing(job.checkpoint.sign_key))
            leases = _take_leases(job, stack)
            accepted = storage.join(job.run_dir, ACCEPTED)
            stack.enter_context(requiring(job.checkpoint.require_signature, accepted))
            return Tick(job, group, leases).run()
    except RunFolderHeldError as error:
        return TickSummary("", note=f"nothing done: another retrain is running ({error})")
    finally:
        group.end()


def _take_leases(job: RetrainJob, stack: ExitStack) -> list[Lease]:
    """Take the lease of run_dir, and of a local registry, which jobs with another run_dir may
    share.
    """
    leases = []
    for folder in [job.run_dir, *([job.registry.path] if storage.is_local(job.registry.path) else [])]:
        lease = take_lease(folder, job.trainer.lease_ttl_s, when_lost=preemption.request)
        stack.callback(lease.release)
        leases.append(lease)
    return leases


class Tick:
    """Do rank 0's part.

    Only the registry stores what is done; all other files may be lost or made again.
    """

    def __init__(self, job: RetrainJob, group: WorkerGroup, leases: list[Lease]) -> None:
        self.job, self._group, self._leases = job, group, leases
        self.registry, self.ledger = Registry(job.registry.path), Ledger(job.registry.path)
        self._records: list[Record] = []
        self._refused: list[Record] = []  # newest first
        self._began = time.monotonic()

    def run(self) -> TickSummary:
        """Run the tick.

        Raises DamagedError if the champion's files are lost or damaged, with the fix.
        """
        try:
            return self._run()
        except UserError as error:
            if not self._is_of_champion(error):
                raise
            raise DamagedError(
                f"{str(error).rstrip('.?')}. It is the champion: `python -m pipeline registry "
                f"rollback {self.registry.path}` returns to the previous version; then `unpin` "
                "lets retraining continue"
            ) from error

    def _is_of_champion(self, error: UserError) -> bool:
        with suppress(DamagedError):  # the error of champion.json says what to do
            pointer = self.registry.pointer()
            return pointer is not None and (
                pointer.version not in self.registry.names() or f"/{pointer.version}/" in str(error)
            )
        return False

    def _run(self) -> TickSummary:
        complete(self.registry, self.ledger)
        if self.job.retry:
            self._check_retry()
        note = ""
        while not note:
            pointer = self.registry.pointer()
            worked = sum(record.state != SKIPPED for record in self._records)
            if pointer is not None and pointer.pinned:
                note = f"{pointer.version} is pinned ({pointer.reason}): `python -m pipeline registry unpin {self.registry.path}`"
            elif worked >= self.job.max_catchup:
                note = f"max_catchup={self.job.max_catchup} windows done; the next retrain continues"
            elif waits := self._waits_for_canary():
                note = waits
            else:
                note = self._next(pointer)
        pointer = self.registry.pointer()
        return TickSummary(pointer.version if pointer else "none", self._records, note + self._left_of_retry())

    def _waits_for_canary(self) -> str:
        """Return why no window is begun while a version of an earlier window serves as canary."""
        if self.job.registry.canary_share is None:
            return ""
        return str(from_extra("canary_note", "registry.canary_share")(self.registry.path))

    def _next(self, pointer: Pointer | None) -> str:
        """Process the oldest window. Return why nothing more can be done, or an empty string."""
        pending = self._pending()
        ready: list[Window] = []
        for window in pending:
            if window.state == LATE:
                self._record(_skipped(window))
                return ""
            if window.state != READY:
                return f"waiting for window {window.name}: {window.why}"
            ready.append(window)
            if len(ready) == 2:
                return self._work_on(ready[0], ready[1], pointer)
        if ready:
            waits = f"window {ready[0].name} waits for the next window, on which both models are compared"
            return waits + _advice(self._refused)
        return "no new window" + _advice(self._refused)

    def _read_windows(self) -> list[Record]:
        """Return the newest records of windows, newest first."""
        return list(islice((record for record in self.ledger.newest() if record.window), MAX_READ))

    def _check_retry(self) -> None:
        """Raise RetrainingError for an unknown window in `retry`.

        Log which windows cannot be judged again, and why.
        """
        states = {record.window: record.state for record in reversed(self._read_windows())}
        waiting = {window.name for window in self._pending()}
        for name in self.job.retry:
            if name not in states.keys() | waiting:
                raise RetrainingError(
                    f"retry names {name!r}, but no window of that name was rejected or skipped; "
                    "`python -m pipeline registry "
                    f"history {self.registry.path}` has the names{did_you_mean(name, states.keys() | waiting)}"
                )
            if states.get(name) == PROMOTED:
                logger.warning("retry: window %s was promoted and is not judged again", name)
            elif name not in waiting:
                logger.warning("retry: window %s is not at %s, or begins before windows.first", name, self.job.source)

    def _left_of_retry(self) -> str:
        """Return a note about windows in `retry` that were not judged, because a later call does
        not know them.
        """
        if not self.job.retry:
            return ""
        judged = {record.window for record in self._records}
        left = [window.name for window in self._pending() if window.name in set(self.job.retry) - judged]
        return f". Give retry=[{','.join(left)}] again: not used in this tick" if left else ""

    def _pending(self) -> list[Window]:
        records = self._read_windows()
        done = {record.window: record for record in reversed(records) if record.state in TERMINAL}
        for name in self.job.retry:
            own_numbers = {record.number for record in self._records}
            if name in done and done[name].state != PROMOTED and done[name].number not in own_numbers:
                del done[name]
        self._refused = _newest_refused(records)
        after = None
        # older windows were done long ago; the median, because some were judged again
        if len(records) == MAX_READ:
            after = median_low(datetime.fromisoformat(record.begin) for record in records)
        job = self.job
        return find_windows(job.windows, job.source, job.data, datetime.now(UTC), after, done)

    # Imported when there is work, so that an idle call loads no pyarrow.
    def _runner(self) -> WindowRunner:
        from pipeline.retraining.window_runner import WindowRunner

        return WindowRunner(self.job, self._group)

    def _about(self) -> dict[str, str]:
        from pipeline.retraining.window_runner import code_version, config_hash

        return {"config_hash": config_hash(self.job), "code_version": code_version()}

    def _work_on(self, window: Window, judged_on: Window, pointer: Pointer | None) -> str:
        """Record a result for `window`, or for `judged_on` if its data cannot be used to judge.

        Otherwise return the reason.
        """
        from pipeline.retraining.challenge import Challenge

        champion = self.registry.champion()
        if champion is not None:
            self.registry.check_inputs(champion)
        before = f"champion {champion.name}" if champion else "no champion yet"
        logger.info("window %s: %s, judged on %s", window.name, before, judged_on.name)
        outcome = Challenge(
            self.job, self._runner(), self.ledger, window, judged_on, champion, pointer, self._about()
        ).run()
        record = replace(outcome.record, seconds=round(time.monotonic() - self._began, 1))
        if outcome.candidate is None:
            self._record(record)
        else:
            candidate = replace(outcome.candidate, record=record)
            share = self.job.registry.canary_share
            try:
                if share is None or champion is None:
                    promoted = promote(self.registry, self.ledger, candidate, self.job.registry.keep, self._fence)
                else:
                    version = publish(self.registry, candidate, self._fence)
                    offer = from_extra("offer_canary", "registry.canary_share")
                    promoted = offer(self.registry, version, record, share)
                    self.registry.prune(self.job.registry.keep)
            except PinnedError as error:
                return f"window {window.name} waits: {error}"
            self._note(promoted)
        self._runner().forget(outcome.window)
        return ""

    def _record(self, record: Record) -> None:
        self._note(self.ledger.append(record))

    def _note(self, record: Record) -> None:
        """Log a record of the ledger."""
        self._records.append(record)
        log = logger.info if record.state == PROMOTED else logger.warning
        log("window %s %s%s", record.window, record.state, "".join(f"; {reason}" for reason in record.reasons))
        if self.job.registry.mlflow:
            mirror_record = from_extra("mirror_record", "registry.mlflow")
            mirror_record(self.job.registry.mlflow, self.job.name, record)
        self._began = time.monotonic()

    def _fence(self) -> None:
        for lease in self._leases:
            lease.check()


def _newest_refused(records: list[Record]) -> list[Record]:
    """Return the latest windows that were rejected for their data, without an accepted window
    between. Newest first.
    """
    come = (record for record in records if record.state != SKIPPED)
    return list(takewhile(lambda record: record.state == REJECTED and record.data.get("accepted") is False, come))


def _advice(refused: list[Record]) -> str:
    """Return advice if no window passes any more, because later windows cannot pass if the data
    have changed for good.
    """
    if len(refused) < MANY_REFUSED:
        return ""
    oldest = min(refused, key=lambda record: record.begin)
    return (
        f". The data of the last {len(refused)} windows were rejected, the oldest is {oldest.window}: if the stream has changed for "
        f"good, checks.first={datetime.fromisoformat(oldest.begin):%Y-%m-%dT%H:%M} compares "
        "windows with no window before that one"
    )


def _skipped(window: Window) -> Record:
    return Record(SKIPPED, window.name, reasons=[window.why], begin=window.begin.isoformat())


def describe(summary: TickSummary) -> str:
    lines = [describe_record(record) for record in summary.records]
    return "\n".join(
        [*lines, *([f"champion    {summary.champion}"] if summary.champion else []), f"next        {summary.note}"]
    )


def retrain_strictly(job: RetrainJob) -> TickSummary:
    summary = retrain(job)
    if job.strict and summary.has_rejected:
        print(describe(summary), flush=True)
        sys.exit(REJECTED_WINDOW)
    return summary
