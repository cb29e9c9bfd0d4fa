"""Exchange tensors between the ranks of one host through shared memory.

gloo sends tensors over TCP: the kernel copies each byte twice, and a collective wakes three threads
per rank. Here a rank writes into an anonymous file (memfd) that all ranks have mapped, and sends
each rank a short notification over a Unix socket. Only the calling threads work. If a rank dies,
its sockets close and the other ranks see it at once. Nothing has a name, so nothing is left behind.

Each channel has two slots per rank, used in turn. Before a rank writes message n into a slot, it
waits for every other rank's notification of message n - 1. A rank sends that notification after it
has read message n - 2. So no rank still reads the data that is overwritten.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from pipeline.runtime.errors import ShardingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.comms_wait import waiting
from pipeline.runtime.process.distributed import DistributedContext

MAX_RANKS = 8  # every rank reads from every other rank; with more ranks a ring moves fewer bytes
JOIN_S = 30.0
ALIGNMENT = 64
# the largest size of a slot; the file is sparse, so only written parts take memory
SLOT_BYTES = 1 << 32
NUM_SLOTS = 1 << 16
FIRST_BYTES = 1 << 20  # the part of a slot that is mapped at first
# channel, number of the message, its first byte in the slot, its size in bytes
NOTE = struct.Struct("<IIQQ")
logger = get_logger(__name__)

_exchanges_nothing = False


FLAGS = 0  # the channel that exists from the start


class HostExchange:
    """One rank's end of the exchange. Every rank sends and receives the messages of a channel in the same order."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket], files: dict[int, int]) -> None:
        self.rank, self.world_size = rank, len(files)
        self._sockets, self._files = sockets, files
        self._slots: dict[tuple[int, int], _Slot] = {}  # by owner and slot number
        self._posted = [0]  # by channel
        # For each other rank and slot: number, first byte and size of the last message.
        self._notes: dict[tuple[int, int], tuple[int, int, int]] = {}

    def new_channel(self) -> int:
        """Open a channel. Every rank must open the same channels in the same order."""
        self._posted.append(0)
        return len(self._posted) - 1

    def post(self, channel: int, parts: Sequence[Sequence[torch.Tensor]]) -> int:
        """Write parts[other] for every other rank, notify them, and return the message's number.

        If several ranks get the same sequence object, it is written once. Raises RuntimeError if a
        rank has exited or is silent.
        """
        number = self._posted[channel] + 1
        for other in self._sockets:
            self._note(other, channel, number - 1)
        self._posted[channel] = number
        slot = self._slot(self.rank, 2 * channel + number % 2)
        needed = sum(_padded(tensor) for other in self._sockets for tensor in parts[other])
        slot.reserve(needed)
        written: dict[int, tuple[int, int]] = {}
        end = 0
        for other, connection in self._sockets.items():
            if id(parts[other]) not in written:
                begin = end
                for tensor in parts[other]:
                    slot.write(end, tensor)
                    end += _padded(tensor)
                written[id(parts[other])] = (begin, end - begin)
            try:
                connection.send(NOTE.pack(channel, number, *written[id(parts[other])]))
            except ConnectionError as error:
                raise RuntimeError(f"rank {other} has left: {error}") from error
        return number

    def take(self, channel: int, number: int) -> list[Message | None]:
        """Return message `number` of each rank, and None for this rank. Raises RuntimeError as post
        does.

        Read the messages before the channel's next post.
        """
        messages: list[Message | None] = [None] * self.world_size
        for other in self._sockets:
            _, begin, size = self._note(other, channel, number)
            messages[other] = Message(self._slot(other, 2 * channel + number % 2).view(begin, size))
        return messages

    def all_gather(self, channel: int, local: torch.Tensor) -> list[torch.Tensor]:
        """Return `local` of every rank (all of one shape). Read the tensors before the channel's next post."""
        parts = [local]
        number = self.post(channel, [parts] * self.world_size)
        return self._read_all(channel, number, local)

    def all_reduce(self, channel: int, flat: torch.Tensor) -> None:
        """Sum [n] over all ranks in place. The order is the same on all ranks, so all get the same bits."""
        flat.copy_(_sum(self.all_gather(channel, flat)))

    def reduce_scatter(self, channel: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of all ranks' parts for this rank. All parts have one shape."""
        number = self.post(channel, [[part] for part in parts])
        return _sum(self._read_all(channel, number, parts[self.rank]))

    def _read_all(self, channel: int, number: int, local: torch.Tensor) -> list[torch.Tensor]:
        """Return one tensor of each rank, all with the shape of `local`, which is this rank's tensor."""
        return [
            local if message is None else message.read(local.shape, local.dtype)
            for message in self.take(channel, number)
        ]

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        for file in self._files.values():
            os.close(file)  # a mapping stays until no tensor uses it
        self._files = {}  # the numbers may soon belong to other files

    def _slot(self, owner: int, index: int) -> _Slot:
        slot = self._slots.get((owner, index))
        if slot is None:
            slot = self._slots[owner, index] = _Slot(self._files[owner], index)
        return slot

    def _note(self, other: int, channel: int, number: int) -> tuple[int, int, int]:
        slot = other, 2 * channel + number % 2
        note = self._notes.get(slot, (0, 0, 0))
        while note[0] < number:
            self._receive(other)
            note = self._notes.get(slot, (0, 0, 0))
        assert note[0] == number, "messages of a channel must be taken in the order in which they were posted"
        return note

    def _receive(self, other: int) -> None:
        try:
            with waiting():
                note = self._sockets[other].recv(NOTE.size)
        except BlockingIOError as error:
            raise RuntimeError(f"rank {other} has been silent for longer than comms.timeout_s allows") from error
        except ConnectionError as error:
            raise RuntimeError(f"rank {other} has left: {error}") from error
        if not note:
            raise RuntimeError(f"rank {other} has left: connection closed by peer")
        channel, number, begin, size = NOTE.unpack(note)
        self._notes[other, 2 * channel + number % 2] = (number, begin, size)


class Message:
    """A received message: tensors, which must be read in the order in which they were written."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data, self._position = data, 0

    def read(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the next tensor as a view of the sender's memory."""
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        begin = self._position
        self._position += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return self._data[begin : begin + num_bytes].view(dtype).view(shape)


class _Slot:
    """A slot of a rank's file. The mapping grows with the data."""

    def __init__(self, file: int, index: int) -> None:
        assert index < NUM_SLOTS, "too many channels"
        self._file, self._begin = file, index * SLOT_BYTES
        self._map(FIRST_BYTES)

    def _map(self, num_bytes: int) -> None:
        if num_bytes > SLOT_BYTES:
            raise ShardingError(
                f"a rank has to send {num_bytes / 2**30:.1f} GiB at once and can send "
                f"{SLOT_BYTES / 2**30:.0f} through shared "
                "memory; set comms.shared_memory=false, or lower trainer.global_batch_size"
            )
        self._bytes = torch.frombuffer(mmap.mmap(self._file, num_bytes, offset=self._begin), dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> None:
        if num_bytes > len(self._bytes):
            self._map(1 << (num_bytes - 1).bit_length())

    def write(self, begin: int, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        self._bytes[begin : begin + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def view(self, begin: int, num_bytes: int) -> torch.Tensor:
        self.reserve(begin + num_bytes)
        return self._bytes[begin : begin + num_bytes]


def _sum(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add two or more blocks in their order."""
    total = blocks[0].add(blocks[1])
    for block in blocks[2:]:
        total.add_(block)
    return total


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


_current: tuple[dist.ProcessGroup, HostExchange] | None = None


def current() -> HostExchange | None:
    """Return the exchange that connect() made for all ranks, or None."""
    return _current[1] if _current is not None and _current[0] is dist.GroupMember.WORLD else None


def all_reduce(tensor: torch.Tensor) -> None:
    """Collective: sum a tensor over all ranks in place, by the exchange if there is one."""
    exchange = _current_for(tensor)
    if exchange is not None:
        exchange.all_reduce(FLAGS, tensor)
    else:
        with waiting():
            dist.all_reduce(tensor)


def all_gather(local: torch.Tensor) -> torch.Tensor:
    """Collective: return the tensors of all ranks as [ranks, *shape], by the exchange if there is one."""
    exchange = _current_for(local)
    if exchange is not None:
        return torch.stack(exchange.all_gather(FLAGS, local))
    world = dist.get_world_size()
    gathered = local.new_empty(world * local.numel())
    with waiting():
        dist.all_gather_into_tensor(gathered, local.flatten())
    return gathered.view(world, *local.shape)


def reduce_scatter(whole: torch.Tensor) -> torch.Tensor:
    """Collective: sum [ranks, *shape] over all ranks, and return this rank's part [*shape]."""
    exchange = _current_for(whole)
    if exchange is not None:
        return exchange.reduce_scatter(FLAGS, whole.unbind())
    local = whole.new_empty(whole.numel() // len(whole))
    with waiting():
        dist.reduce_scatter_tensor(local, whole.flatten())
    return local.view(whole.shape[1:])


def num_exchanging_ranks() -> int:
    """Return the number of ranks whose rows a layer exchanges; 1 without a process group."""
    return 1 if _exchanges_nothing or not dist.is_initialized() else dist.get_world_size()


@contextmanager
def exchanging_nothing() -> Iterator[None]:
    """Let layers use only this rank's rows, so that their operations can be recorded on fake tensors."""
    global _exchanges_nothing
    before, _exchanges_nothing = _exchanges_nothing, True
    try:
        yield
    finally:
        _exchanges_nothing = before


def _current_for(tensor: torch.Tensor) -> HostExchange | None:
    return current() if tensor.device.type == "cpu" else None


def connect(context: DistributedContext, timeout_s: float) -> HostExchange | None:
    """Collective: return the exchange, or None unless all ranks are CPU ranks of one host and few."""
    global _current
    if current() is not None:
        return current()
    if _current is not None:  # it belongs to a process group that no longer exists
        _current[1].close()
        _current = None
    fits = context.backend == "gloo" and context.device.type == "cpu" and hasattr(os, "memfd_create")
    if not fits or not 1 < context.world_size <= MAX_RANKS or context.local_world_size != context.world_size:
        return None
    exchange, problem = None, ""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # Linux chooses a free name in its abstract namespace
        listener.listen(context.world_size)
        listener.settimeout(JOIN_S)
        addresses = _gathered(listener.getsockname(), context)
        try:
            exchange = _join(context, listener, addresses, timeout_s)
        except OSError as error:
            problem = str(error) or type(error).__name__
    problems = [text for text in _gathered(problem, context) if text]
    if problems:
        if exchange is not None:
            exchange.close()
        logger.info("ranks of this host exchange through gloo instead of shared memory: %s", problems[0])
        return None
    assert exchange is not None
    world = dist.GroupMember.WORLD
    assert world is not None
    _current = (world, exchange)
    return exchange


def _join(
    context: DistributedContext, listener: socket.socket, addresses: list[bytes], timeout_s: float
) -> HostExchange:
    """Connect to the ranks before this rank, accept the ranks after it, and exchange file descriptors."""
    local_file = os.memfd_create(f"rank {context.rank}")
    os.ftruncate(local_file, NUM_SLOTS * SLOT_BYTES)
    sockets: dict[int, socket.socket] = {}
    files = {context.rank: local_file}
    for other in range(context.rank):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(JOIN_S)
        connection.connect(addresses[other])
        _swap(connection, context.rank, local_file, sockets, files)
    for _ in range(context.rank + 1, context.world_size):
        connection, _ = listener.accept()
        connection.settimeout(JOIN_S)
        _swap(connection, context.rank, local_file, sockets, files)
    for connection in sockets.values():
        connection.settimeout(None)  # the timeout of the kernel below saves a poll before each recv
        seconds, fraction = divmod(timeout_s, 1)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(fraction * 1_000_000))
        )
    return HostExchange(context.rank, dict(sorted(sockets.items())), files)


def _swap(
    connection: socket.socket, rank: int, local_file: int, sockets: dict[int, socket.socket], files: dict[int, int]
) -> None:
    peer = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if peer[1] != os.geteuid():
        raise OSError(f"another user ({peer[1]}) answered on a rank's socket")
    socket.send_fds(connection, [struct.pack("<I", rank)], [local_file])
    message, descriptors, _, _ = socket.recv_fds(connection, 4, 1)
    if len(message) != 4 or len(descriptors) != 1:
        raise OSError("a rank's socket was closed while joining")
    other = struct.unpack("<I", message)[0]
    sockets[other], files[other] = connection, descriptors[0]


def _gathered(value: Any, context: DistributedContext) -> list[Any]:
    gathered: list[Any] = [None] * context.world_size
    dist.all_gather_object(gathered, value)
    return gathered
