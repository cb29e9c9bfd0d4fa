"""Detect a rank that hangs, name it, dump its stack, and end with an exit code (stdlib only).

Each rank has one watchdog thread. The rank must report progress (`beat`, `phase`) within the time
limit of its phase. It writes a pulse to a board that all ranks see (the launcher's c10d store). The
next rank checks that the pulse changes, which a stopped process cannot imitate. The process ends by
os._exit, which no blocked collective can delay, and the launcher restarts all ranks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol

from pipeline.runtime.process import preemption, processes
from pipeline.runtime.process.exit_codes import HANG, REQUEUE
from pipeline.runtime.process.failures import write_error_file

WAITING_FOR_INPUT, ENDING = "waiting for input", "ending"
SAFETY_S = 5.0  # part of the grace period, reserved for the launcher and the kernel


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds; 0: no limit. stage_s: for a stage of start-up. step_s: for a step or a batch."""

    stage_s: float = 900.0
    step_s: float = 180.0
    save_s: float = 1800.0
    grace_s: float = 30.0


class Board(Protocol):
    """The methods of a c10d Store that the watchdog needs. No other thread may block in this client."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass
class Pulse:
    """The state that a rank reports. `tick` rises while its process runs."""

    rank: int
    tick: int
    step: int
    phase: str
    idle_s: float  # since its last progress
    host: str
    pid: int
    started: int  # processes.start_time

    def describe(self) -> str:
        process = f"pid {self.pid} on {self.host}"
        return f"rank {self.rank} ({process}) has been at step {self.step}, {self.phase}, for {self.idle_s:.0f} s"


class Watchdog:
    """Watch this process. Call start() and all other methods on the main thread."""

    def __init__(self, rank: int, limits: Limits) -> None:
        self.limits = limits
        self.rank, self._step = rank, 0
        self._phase, self._budget_s = "starting", limits.stage_s
        self._progress_at = time.monotonic()
        self._tick = 0
        self._board: Board | None = None
        self._world_size, self._prefix = 1, ""
        self._neighbour = (0, time.monotonic())  # the other rank's tick, and when it was first seen
        self._identity = (socket.gethostname(), os.getpid(), processes.start_time(os.getpid()))
        self._ended = threading.Event()
        self._wake_reader, self._wake_writer = os.pipe()

    def start(self) -> None:
        os.set_blocking(self._wake_writer, False)
        # it arrives even if the main thread is blocked
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()
        threading.Thread(target=self._hear_signals, name="watchdog-signals", daemon=True).start()

    def stop(self) -> None:
        """Stop watching, and tell the other ranks that no more heartbeats come."""
        self.beat(phase=ENDING)
        self._publish()
        self._ended.set()

    def beat(self, step: int | None = None, phase: str | None = None) -> None:
        """Record progress of this rank."""
        self._step = self._step if step is None else step
        self._phase = phase or self._phase
        self._progress_at = time.monotonic()

    @property
    def progress_at(self) -> float:
        return self._progress_at

    @contextmanager
    def phase(self, name: str, budget_s: float) -> Iterator[None]:
        before = (self._phase, self._budget_s)
        self._enter(name, budget_s)
        try:
            yield
        finally:
            self._enter(*before)

    def _enter(self, name: str, budget_s: float) -> None:
        # set first, because the thread must not compare the old time with the new limit
        self._progress_at = time.monotonic()
        self._phase, self._budget_s = name, budget_s

    def watch_others(self, board: Board, world_size: int, attempt: str) -> None:
        """Watch another rank. `attempt` separates this start of the group from earlier ones."""
        self._world_size, self._prefix = world_size, f"pulse/{attempt}/"
        self._neighbour = (-1, time.monotonic())
        self._board = board

    @property
    def _tick_s(self) -> float:
        # The board takes 50 pulses a second from all ranks together, so few ranks report more
        # often.
        return min(1.0, max(0.1, self.limits.step_s / 10 or 1.0), max(0.1, 0.02 * self._world_size))

    def _run(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(self._tick_s):
            now = time.monotonic()
            self._forgive(now - before - self._tick_s)
            before = now
            try:
                found = self._look()
            except Exception as error:  # the board's host is gone or does not answer
                found = self._own_hang() or self._silent_board(error)
            if found:
                self._give_up(found)

    def _forgive(self, late_s: float) -> None:
        """Do not count time in which this process was suspended."""
        if late_s > max(2.0, 2 * self._tick_s):
            self._progress_at += late_s
            self._neighbour = (self._neighbour[0], self._neighbour[1] + late_s)

    def _look(self) -> str:
        self._publish()
        if preemption.seconds_since_arrival() > self.limits.grace_s - SAFETY_S:
            self._end_unsaved()
        return self._own_hang() or self._neighbour_hang()

    def _idle_s(self) -> float:
        return time.monotonic() - self._progress_at

    def _publish(self) -> None:
        self._tick += 1
        if self._board is not None:
            pulse = Pulse(self.rank, self._tick, self._step, self._phase, self._idle_s(), *self._identity)
            self._board.set(f"{self._prefix}{self.rank}", json.dumps(asdict(pulse)))

    def _read(self, rank: int) -> Pulse | None:
        key = f"{self._prefix}{rank}"
        if self._board is None or not self._board.check([key]):
            return None
        return Pulse(**json.loads(self._board.get(key)))

    def _own_hang(self) -> str:
        idle_s = self._idle_s()
        if not 0 < self._budget_s < idle_s:
            return ""
        return f"no progress for {idle_s:.1f} s in the phase `{self._phase}`; the limit is {self._budget_s:g} s"

    def _neighbour_hang(self) -> str:
        rank = (self.rank + 1) % self._world_size
        if self._board is None or rank == self.rank or not self.limits.step_s:
            return ""
        pulse = self._read(rank)
        tick = pulse.tick if pulse else 0
        now = time.monotonic()
        if tick != self._neighbour[0]:
            self._neighbour = (tick, now)
        silent_s = now - self._neighbour[1]
        # The joining stage handles a rank that has not joined yet. A rank that ends also stops its
        # watchdog.
        if pulse is None or pulse.phase == ENDING or silent_s <= self.limits.step_s:
            return ""
        return f"rank {rank} has sent no heartbeat for {silent_s:.1f} s; the limit is {self.limits.step_s:g} s"

    def _silent_board(self, error: Exception) -> str:
        silent_s = time.monotonic() - self._neighbour[1]
        if not 0 < self.limits.step_s < silent_s:
            return ""
        return f"the launcher's store has not answered for {silent_s:.1f} s ({type(error).__name__}: {error})"

    def _give_up(self, found: str) -> None:
        lines = [f"hang: {found}", *self._suspects()]
        self._dump("\n".join(lines))
        write_error_file("; ".join(lines))
        self._exit(HANG)

    def _end_unsaved(self) -> None:
        self._dump(
            f"{preemption.seconds_since_arrival():.0f} s after SIGTERM nothing is saved yet, and trainer.grace_s="
            f"{self.limits.grace_s:g} is nearly over: ending; run the same command again to resume from the last saved step"
        )
        self._exit(REQUEUE)

    def _dump(self, text: str) -> None:
        """Write all threads' stacks to the real stderr (not sys.stderr) without taking a lock."""
        about = f"rank {self.rank} at step {self._step}, {self._phase}"
        os.write(2, f"[{about}] {text}\nstacks of {about}:\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)

    def _exit(self, code: int) -> None:
        sys.stdout.flush()
        os._exit(code)

    def _suspects(self) -> list[str]:
        """Return the ranks that cause the hang. Takes two seconds.

        These are processes that do not run (killed, if they are on this host), otherwise ranks that wait
        for input, otherwise the rank without progress for the longest time.
        """
        if self._board is None or self._world_size == 1:
            return []
        try:
            first = [self._read(rank) for rank in range(self._world_size)]
            # so that a busy rank does not look like a stopped rank
            time.sleep(max(2.0, 2.2 * self._tick_s))
            self._publish()
            second = [self._read(rank) for rank in range(self._world_size)]
        except Exception as error:
            return [f"the cause is unknown, because the launcher's store does not answer ({error})"]
        missing = [f"rank {rank} has not joined" for rank, pulse in enumerate(second) if pulse is None]
        pairs = [(old, new) for old, new in zip(first, second, strict=True) if old and new]
        frozen = [new for old, new in pairs if old.tick == new.tick and new.rank != self.rank]
        running = [new for _, new in pairs if new not in frozen]
        waiting = [pulse for pulse in running if pulse.phase == WAITING_FOR_INPUT]
        slowest = [] if missing or frozen or waiting else [max(running, key=lambda pulse: pulse.idle_s)]
        return missing + [self._end_frozen(pulse) for pulse in frozen] + [p.describe() for p in waiting + slowest]

    def _end_frozen(self, pulse: Pulse) -> str:
        text = f"{pulse.describe()} and sends no heartbeat"
        if pulse.host != self._identity[0]:
            return text
        text += f"; its process is {processes.state(pulse.pid)}"
        # SIGTERM from the launcher does not reach a stopped process.
        return f"{text}, killed" if processes.kill(pulse.pid, pulse.started) else text

    def _hear_signals(self) -> None:
        """Record when SIGTERM arrives, even if the main thread is inside a collective."""
        while os.read(self._wake_reader, 1) != bytes([signal.SIGTERM]):
            pass
        preemption.note_arrival()


_current: Watchdog | None = None


def start(rank: int, limits: Limits | None = None) -> Watchdog:
    """Watch this process. Without a watchdog the functions below do nothing."""
    global _current
    _current = Watchdog(rank, limits or Limits())
    _current.start()
    return _current


def end() -> None:
    global _current
    if _current is not None:
        _current.stop()
    _current = None


def is_running() -> bool:
    return _current is not None


def progress_at() -> float:
    """Return the time of this rank's last progress, by time.monotonic(); 0 if no watchdog runs."""
    return _current.progress_at if _current is not None else 0.0


def use(limits: Limits) -> None:
    if _current is not None:
        _current.limits = limits


def watch_others(connect: Callable[[], Board], world_size: int, attempt: str) -> None:
    """Watch other ranks. `connect` makes a client of their store for the watchdog's thread."""
    if _current is not None:
        _current.watch_others(connect(), world_size, attempt)


def beat(step: int | None = None, phase: str | None = None) -> None:
    if _current is not None:
        _current.beat(step, phase)


def stepping(name: str) -> AbstractContextManager[None]:
    """Start a phase of steps or batches. Each beat() restarts the time limit."""
    return _phase(name, lambda limits: limits.step_s)


def saving(name: str = "saving") -> AbstractContextManager[None]:
    """Start a phase that may take long without a beat, such as saving."""
    return _phase(name, lambda limits: limits.save_s)


def stage(name: str) -> AbstractContextManager[None]:
    """Start a stage of start-up, such as joining or loading."""
    return _phase(name, lambda limits: limits.stage_s)


def unwatched(name: str) -> AbstractContextManager[None]:
    """Start a phase without a time limit: work of unknown length, or waiting for it."""
    return _phase(name, lambda limits: 0.0)


@contextmanager
def _phase(name: str, budget_s: Callable[[Limits], float]) -> Iterator[None]:
    if _current is None:
        yield
    else:
        with _current.phase(name, budget_s(_current.limits)):
            yield
