"""Implement streams and events of shadow GPUs with vector clocks, which find missing waits.

A stream runs its work in order. Work of another stream comes before it only after a wait, an event
or a wait of the host. A read or write without a wait for the previous write or use is a "race".
Memory that returns to its stream while another stream may still use it is a "reuse": record_stream
is missing. A clock maps a stream to the last piece of its work that is known to be done.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from pipeline.extras.shadow import report
from pipeline.extras.shadow.state import settings

Clock = dict[int, int]


class Tracked:
    """Records the use of one storage by streams. `owner`: the stream whose pool has the memory."""

    __slots__ = ("last_op", "owner", "recorded", "uses", "writer")

    def __init__(self) -> None:
        self.owner = current_stream().number
        self.writer: tuple[int, int, str] | None = None  # stream, its tick, operation
        self.uses: Clock = {}
        self.recorded: set[int] = set()
        self.last_op = ""
        _reuse(self.owner)


_ticks: Clock = defaultdict(int)
_clocks: dict[int, Clock] = defaultdict(lambda: dict(_host))
_host: Clock = {}  # what the host has waited for
# owner -> stream, tick, operation
_freed: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
_names: dict[int, str] = {}
_local = threading.local()
_main: dict[str, Any] = {"device": 0, "streams": {}}


def reset() -> None:
    """Forget all clocks, for the next program of this process."""
    for each in (_ticks, _clocks, _host, _freed):
        each.clear()
    _main.update(device=0, streams={})


def enter_thread() -> None:
    """Give a Python thread its device and streams. Autograd's threads use those of the main thread."""
    _local.own = {"device": 0, "streams": {}}


def _own() -> dict[str, Any]:
    return getattr(_local, "own", _main)


def current_device() -> int:
    return int(_own()["device"])


def set_device(index: int) -> None:
    if index >= settings.num_gpus:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: cuda:{index}, but there are {settings.num_gpus} GPU(s)"
        )
    if index >= 0:
        _own()["device"] = index


def index_of(device: Any) -> int:
    """Return the index of a device in any notation. None is the current device."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


class Stream:
    """Replace torch.cuda.Stream."""

    _made = 1000  # smaller numbers are the default streams of devices

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        Stream._made += 1
        self._begin(Stream._made, index_of(device), priority)

    def _begin(self, number: int, device: int, priority: int) -> None:
        self.number = self.cuda_stream = self.stream_id = number
        self.device, self.priority = torch.device("cuda", device), priority
        self.device_index, self.device_type = device, 1
        _names[number] = f"stream {number}" if number > 999 else f"the default stream of cuda:{number}"

    @classmethod
    def default(cls, device: int) -> Stream:
        made = cls.__new__(cls)
        made._begin(device, device, 0)
        return made

    def wait_stream(self, other: Stream) -> None:
        report.current().waits += 1
        _learn(_clocks[self.number], clock_of(other.number))

    def follow(self, other: Stream) -> None:
        """Do the same as wait_stream without counting it. Libraries' streams use this."""
        _learn(_clocks[self.number], clock_of(other.number))

    def learn(self, clock: Clock) -> None:
        _learn(_clocks[self.number], clock)

    def wait_event(self, event: Event) -> None:
        report.current().waits += 1
        _learn(_clocks[self.number], event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        report.sync("stream.synchronize")
        host_waits(clock_of(self.number))

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        _entered().append(StreamContext(self))
        _entered()[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        _entered().pop().__exit__(*error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.number == other.number

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"<{_names[self.number]}>"


class Event:
    """Replace torch.cuda.Event. Its time is measured by the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}
        self.time_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict(clock_of((stream or current_stream()).number))
        self.time_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        report.sync("event.synchronize")
        host_waits(self.clock)

    def elapsed_time(self, end: Event) -> float:
        return (end.time_s - self.time_s) * 1e3


class StreamContext:
    """Replace torch.cuda.stream(s). None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        own, stream = _own(), self.stream
        self.before = (own["device"], dict(own["streams"]))
        if stream is not None:
            own["device"] = stream.device_index
            own["streams"][stream.device_index] = stream

    def __exit__(self, *_: object) -> None:
        own = _own()
        own["device"], own["streams"] = self.before


def _entered() -> list[StreamContext]:
    if not hasattr(_local, "entered"):
        _local.entered = []
    return _local.entered


def name(stream: Stream, text: str) -> None:
    """Set the name of a stream in findings."""
    _names[stream.number] = text


def current_stream(device: Any = None) -> Stream:
    index = index_of(device)
    streams = _own()["streams"]
    return streams[index] if index in streams else default_stream(index)


def default_stream(device: Any = None) -> Stream:
    return Stream.default(index_of(device))


def set_stream(stream: Stream) -> None:
    _own()["streams"][stream.device_index] = stream


def synchronize(device: Any = None) -> None:
    """Let the host wait for all streams."""
    report.sync("torch.cuda.synchronize")
    host_waits(dict(_ticks))


def wait_for_host_copy() -> None:
    """Let the host wait for the current stream, as a blocking copy does."""
    host_waits(clock_of(current_stream().number))


def clock_of(stream: int) -> Clock:
    """Return the clock that is reached when the stream's current work is done."""
    return {**_clocks[stream], stream: _ticks[stream]}


def host_waits(clock: Clock) -> None:
    """Order new work of all streams after the work that the host has waited for."""
    _learn(_host, clock)
    for known in _clocks.values():
        _learn(known, clock)


def host_knows(stream: int, tick: int) -> bool:
    return _host.get(stream, 0) >= tick


def tick_of(stream: int) -> int:
    return _ticks[stream]


def _learn(known: Clock, clock: Clock) -> None:
    for stream, tick in clock.items():
        if known.get(stream, 0) < tick:
            known[stream] = tick


def operation(
    name: str,
    reads: Sequence[tuple[Tracked, Any]],
    writes: Sequence[tuple[Tracked, Any]],
    stream: int | None = None,
) -> None:
    """Add an operation to the current stream or `stream`, and find races. reads, writes: pairs (block, shape)."""
    me = current_stream().number if stream is None else stream
    _ticks[me] += 1
    tick, known = _ticks[me], _clocks[me]
    for block, shape in reads:
        if block.writer is not None and block.writer[0] != me:
            writer, since, by = block.writer
            if known.get(writer, 0) < since:
                _race(name, shape, me, "reads", f"{_names[writer]} wrote by {by}")
        block.uses[me] = tick
        block.last_op = name
    for block, shape in writes:
        for other, since in block.uses.items():
            if other != me and known.get(other, 0) < since:
                _race(name, shape, me, "writes", f"{_names[other]} uses by {block.last_op}")
        block.uses[me] = tick
        block.writer = (me, tick, name)
        block.last_op = name


def _race(name: str, shape: Any, me: int, does: str, other: str) -> None:
    report.current().find(
        "race",
        f"{name} on {_names[me]} {does} a tensor of shape {list(shape)} that {other}, without a wait in between",
    )


def record(block: Tracked, stream: Stream) -> None:
    """Replace tensor.record_stream: the memory is not reused before the stream is done with it."""
    report.current().record_streams += 1
    block.recorded.add(stream.number)


def freed(block: Tracked) -> None:
    """Record which streams may still use memory that returns to the pool of its stream."""
    known = _clocks[block.owner]
    for stream, tick in block.uses.items():
        if stream != block.owner and stream not in block.recorded and known.get(stream, 0) < tick:
            _freed[block.owner].append((stream, tick, block.last_op))


def _reuse(owner: int) -> None:
    """Check a new allocation: earlier uses of its memory must be known to be done."""
    if not _freed.get(owner):
        return
    known = _clocks[owner]
    for stream, tick, name in _freed.pop(owner):
        if known.get(stream, 0) < tick:
            report.current().find(
                "reuse",
                f"memory of {_names.get(owner, owner)} was freed and may be given away while "
                f"{_names.get(stream, stream)} still uses it ({name}): record_stream is missing",
            )
