"""Read batches of a stream, and record the offsets of the stream after each batch.

A batch is a fixed number of lines. A journal stores which lines, so that a killed run resumes from
its checkpoint with the same batches. The queue of batches is bounded, so a slow training does not
read ahead without limit. With several ranks, rank 0 reads the stream and writes the journal. Rank r
trains on the r-th part of each batch's rows, so a journal works for any number of ranks.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from pipeline.config.data import ReaderConfig
from pipeline.config.retraining import StreamConfig
from pipeline.data.read.batch import Batch
from pipeline.data.read.endless import (
    ENDLESS_STEPS,
    EndOfInputError,
    InputPausedError,
    Known,
    TablesFullError,
    Values,
)
from pipeline.data.read.prefetch import Prefetcher
from pipeline.data.read.quarantine import Quarantine
from pipeline.extras.stream.encode import LineEncoder
from pipeline.extras.stream.journal import Journal
from pipeline.extras.stream.new_values import NewValues
from pipeline.extras.stream.ranks import StreamRanks
from pipeline.extras.stream.source import Offsets, Range, Rows, StreamSource
from pipeline.runtime.errors import RetrainingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process import preemption, watchdog

LOOK_BEHIND_S = 5.0  # between two measurements of the source's lag
logger = get_logger("pipeline.train")


@dataclass(frozen=True)
class _Taken:
    """The rows that a batch took, and the newest event time up to this batch."""

    ranges: list[Range]
    event_time: float | None


class StreamReader:
    """Replace a ShardReader of the training split.

    Not thread-safe, except for its prefetch thread: only the trainer calls place() and progress().
    """

    # Each parameter is a separate object made by the caller.
    def __init__(
        self,
        source: StreamSource,
        encoder: LineEncoder,
        journal: Journal | None,
        *,
        name: str,
        batch_size: int,
        stream: StreamConfig,
        config: ReaderConfig,
        quarantine: Quarantine,
        ranks: StreamRanks | None = None,
        values: NewValues | None = None,
        clock: Callable[[], float] = time.time,
        pause_s: float | None = None,
    ) -> None:
        """name: the stream's name; a run cannot continue with another stream. batch_size: per rank.
        journal: used by rank 0. ranks: None for one rank.

        values: the new values of vocabularies; None: the run has none. pause_s: raise
        InputPausedError after so many seconds without a row, once for each batch read.
        """
        self.config, self.batch_size, self._ranks = config, batch_size, ranks
        self._all_rows = batch_size * (ranks.world_size if ranks else 1)  # of a batch
        self._first_row = batch_size * ranks.rank if ranks else 0
        self.num_rows, self.steps_per_epoch = ENDLESS_STEPS * self._all_rows, ENDLESS_STEPS
        self.stall_seconds = 0.0
        self._source, self._encoder, self._journal, self._quarantine = source, encoder, journal, quarantine
        self._name, self._stream, self._clock = name, stream, clock
        # start of batch self._first; None: as stream.start says
        self._offsets: Offsets | None = None
        self._first, self._taken = 0, deque[_Taken]()
        self._event_time: float | None = None  # up to self._first
        self._behind, self._looked_at = 0.0, 0.0
        self._pause_s, self._read_since_pause = pause_s, False
        self._values = values or NewValues({}, 1.0)
        self.full: list[str] = []  # tables without a row for a value, which have ended the stream

    def batches(self, epoch: int, start_step: int = 0) -> Prefetcher[Batch]:
        """Yield batches from `start_step` on; raise EndOfInputError after the last.

        Every rank must call it equally often.
        """
        stopped = threading.Event()
        round_ = self._ranks.begin() if self._ranks else 0
        self._values.restore(start_step, self._values.known_to(start_step))
        self._encoder.use(self._values.values)
        read = self._read_own if self._ranks and self._ranks.rank else self._read
        source = read(start_step, round_, stopped)
        return Prefetcher(source, self.config.prefetch_batches, "stream", self._add_stall, stopped.set)

    def _add_stall(self, seconds: float) -> None:
        self.stall_seconds += seconds

    def _read(self, start: int, round_: int, stopped: threading.Event) -> Generator[Batch, None, None]:
        number = start
        try:
            added, full = self._admit(number)
            self._end_if(full)
            for parts in self._parts(start, stopped):
                ranges = [part.range for part in parts]
                others: list[list[Rows]] = []
                if self._ranks is not None:
                    parts, *others = _split(parts, self.batch_size)
                    own = [[part.range for part in share] for share in (parts, *others)]
                    self._ranks.tell(round_, number, ranges, own, added)
                number += 1
                batch = self._batch(parts, ranges, number - 1)
                for share in others if self._values.capacities else ():
                    self._encoder.encode(share)  # finds the unknown values among them
                # before the yield, because a save after this batch stores them
                added, full = self._admit(number)
                yield batch
                self._end_if(full)
        except Exception as error:
            if self._ranks is not None:
                self._ranks.end(round_, number, error)
            raise

    def _admit(self, number: int) -> tuple[Values, set[str]]:
        """Add new values with ids from batch `number` on.

        Return them, and the tables without a free row.
        """
        added, full = self._values.admit(number, self._encoder.take_unknown())
        self._encoder.add(added)
        return added, full

    def _end_if(self, full: set[str]) -> None:
        """Raise TablesFullError if any table is full."""
        if full:
            self.full = sorted(full)
            raise TablesFullError(full)

    def _read_own(self, start: int, round_: int, stopped: threading.Event) -> Generator[Batch, None, None]:
        """Read batches on ranks other than 0. These ranks know only the offsets that they need to
        count batches.
        """
        assert self._ranks is not None
        self._offsets = self._offsets or {}
        while len(self._taken) > max(0, start - self._first):
            self._taken.pop()
        self._taken.extend(_Taken([], None) for _ in range(start - self._first - len(self._taken)))
        for number in itertools.count(start):
            try:
                share = self._ranks.share(round_, number, lambda: self._idle(stopped))
            except TablesFullError as error:
                self.full = error.tables
                raise
            self._values.add(number, share.added)
            self._encoder.add(share.added)
            yield self._batch([self._source.reread(each) for each in share.own], share.ranges, number)

    def _idle(self, stopped: threading.Event) -> None:
        """Wait on ranks other than 0 while there is no batch."""
        assert self._ranks is not None
        watchdog.beat(phase=watchdog.WAITING_FOR_INPUT)
        if stopped.is_set():
            raise EndOfInputError("these batches are no longer read")
        if preemption.wanted():
            self._ranks.ask_to_stop()

    def _parts(self, start: int, stopped: threading.Event) -> Generator[list[Rows], None, None]:
        """Yield the lines of each batch: first those in the journal, then new ones, which are added
        to the journal.
        """
        assert self._journal is not None, "rank 0 reads the stream"
        offsets = self._begin(start)
        known = self._journal.after(start)
        if known:
            logger.info("batches %d to %d are read again from the journal", start, start + len(known) - 1)
        number = start
        for ranges in known:
            # one partition may have several ranges, one after the other
            for name, begin, end in ranges:
                if begin != offsets.get(name, begin):
                    raise RetrainingError(
                        f"the journal of the stream does not continue after batch {number}: choose another run_dir"
                    )
                offsets[name] = end
            self._read_since_pause = True
            yield [self._source.reread(each) for each in ranges]
            number += 1
        left: Rows | None = None
        while True:
            parts, left = self._collect(offsets, left, stopped)
            self._journal.append(number, [part.range for part in parts])
            self._read_since_pause = True
            yield parts
            number += 1

    def _begin(self, start: int) -> Offsets:
        """Return the offsets at which batch `start` begins.

        It is the restored batch, or a later one after a rollback.
        """
        if self._offsets is None:
            self._offsets = {} if self._stream.start == "earliest" else self._source.newest()
        count = start - self._first
        while len(self._taken) > max(0, count):  # read ahead, but not trained on
            self._taken.pop()
        if len(self._taken) < count:  # a rollback skips them
            assert self._journal is not None
            known = self._journal.after(self._first + len(self._taken))
            self._taken.extend(_Taken(ranges, None) for ranges in known[: count - len(self._taken)])
        if len(self._taken) != count:
            raise RetrainingError(f"batch {start} of the stream is not known: it is at batch {self._first}")
        offsets = dict(self._offsets)
        for taken in self._taken:
            offsets |= {name: end for name, _, end in taken.ranges}
        return offsets

    def _collect(self, offsets: Offsets, left: Rows | None, stopped: threading.Event) -> tuple[list[Rows], Rows | None]:
        """Collect the lines of one batch, and the surplus of the last read.

        `offsets` are moved to the end of what was read.
        """
        parts: list[Rows] = []
        missing, since = self._all_rows, time.monotonic()
        while missing:
            if left is None:
                left = self._source.read(offsets, max(missing, self._all_rows))
                if left is None:
                    self._wait(since, stopped)
                    continue
                offsets[left.partition] = left.range.end
                since = time.monotonic()
            part, rest = left.split(min(missing, left.num_rows))
            parts.append(part)
            missing -= part.num_rows
            left = rest if rest.num_rows else None
        return parts, left

    def _wait(self, since: float, stopped: threading.Event) -> None:
        """Wait, because there are no rows now."""
        watchdog.beat(phase=watchdog.WAITING_FOR_INPUT)
        if stopped.is_set() or preemption.wanted() or (self._ranks is not None and self._ranks.is_asked_to_stop()):
            raise EndOfInputError("the run was asked to stop while it waited for rows")
        if self._stream.idle_s is not None and time.monotonic() - since > self._stream.idle_s:
            raise EndOfInputError(f"no row has arrived for stream.idle_s={self._stream.idle_s:g}")
        if self._pause_s is not None and self._read_since_pause and time.monotonic() - since > self._pause_s:
            self._read_since_pause = False
            raise InputPausedError(f"no row has arrived for {self._pause_s:g} s")

    def _batch(self, parts: list[Rows], ranges: list[Range], number: int) -> Batch:
        made = self._encoder.encode(parts, number)
        if made.bad_rows:
            reasons = {self._first_row + row.line - 1: row.reason for row in made.bad_rows}
            self._quarantine.add(_text(ranges), reasons)
        self._taken.append(_Taken(ranges, made.event_time))
        return made.batch

    def place(self, batch: int) -> dict[str, Any]:
        self._forget_before(batch)
        return {
            "name": self._name,
            "batch": batch,
            "offsets": dict(self._offsets or {}),
            "event_time": self._event_time,
        }

    def _forget_before(self, batch: int) -> None:
        """Make `batch` the first batch whose offsets are kept."""
        while self._first < batch and self._taken:
            taken = self._taken.popleft()
            assert self._offsets is not None, "a batch was read"
            for name, _, end in taken.ranges:
                self._offsets[name] = end
            self._event_time = max(
                (time for time in (self._event_time, taken.event_time) if time is not None), default=None
            )
            self._first += 1

    def go_to(self, batch: int, place: dict[str, Any]) -> None:
        if place.get("name") != self._name:
            raise RetrainingError(
                f"the run was trained on the stream {place.get('name')!r}, but this job follows "
                f"{self._name!r}: choose another run_dir"
            )
        self._first, self._offsets = (
            int(place["batch"]),
            {name: int(offset) for name, offset in place["offsets"].items()},
        )
        self._event_time = place["event_time"]
        self._taken.clear()

    def values_of(self, batch: int) -> Known:
        return self._values.known_to(batch)

    def restore_values(self, batch: int, known: Known) -> None:
        self._values.restore(batch, known)

    def progress(self, batch: int) -> dict[str, float]:
        self._forget_before(batch)
        now = time.monotonic()
        if now - self._looked_at > LOOK_BEHIND_S and self._offsets is not None and self._journal is not None:
            self._behind, self._looked_at = float(self._source.behind(self._offsets)), now
        age = {} if self._event_time is None else {"stream_event_age_seconds": self._clock() - self._event_time}
        return {
            f"stream_behind_{self._source.unit}": self._behind,
            "stream_batches_ahead": float(len(self._taken)),
            **({"stream_new_values": float(self._values.count)} if self._values.count else {}),
            **age,
        }

    def locate(self, epoch: int, step: int, rows: list[int]) -> list[tuple[str, int]]:
        """Return (partition and range, row number in the batch) of rows, for an error message."""
        at = step - self._first
        ranges = self._taken[at].ranges if 0 <= at < len(self._taken) else []
        return [(_text(ranges), self._first_row + row) for row in rows]

    def empty_batch(self) -> Batch:
        """Return a batch in which no row counts."""
        return self._encoder.nothing(self.batch_size)

    def close(self) -> None:
        self._source.close()
        if self._journal is not None:
            self._journal.close()


def _split(parts: list[Rows], size: int) -> Generator[list[Rows], None, None]:
    """Split the lines of `parts` into shares of `size`."""
    share: list[Rows] = []
    missing = size
    for part in parts:
        left = part
        while left.num_rows:
            own, left = left.split(min(missing, left.num_rows))
            share.append(own)
            missing -= own.num_rows
            if not missing:
                yield share
                share, missing = [], size


def _text(ranges: list[Range]) -> str:
    return " ".join(f"{name}:{begin}-{end}" for name, begin, end in ranges)
