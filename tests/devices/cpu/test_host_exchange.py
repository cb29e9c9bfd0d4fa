"""What a rank posts, the others of its host read, whatever its size; one that has gone is noticed."""

from __future__ import annotations

import contextlib
import os

import torch
import torch.distributed as dist

from pipeline.devices.cpu import host_exchange
from pipeline.devices.cpu.host_exchange import FIRST_BYTES, FLAGS, HostExchange, connect
from pipeline.runtime.process.distributed import DistributedContext
from tests.support.ranks import RankPool


def _connected(rank: int, timeout_s: float = 60.0) -> HostExchange:
    world = dist.get_world_size()
    exchange = connect(DistributedContext(rank, world, rank, world, torch.device("cpu"), "gloo"), timeout_s)
    assert exchange is not None
    return exchange


def _parts(sender: int, world: int, turn: int) -> list[list[torch.Tensor]]:
    """Of uneven sizes, some empty, every fourth turn larger than what is mapped at first."""
    size = FIRST_BYTES // 2 if turn % 4 == 3 else 5 * turn
    return [
        [torch.full((size + receiver, 3), 100.0 * turn + sender), torch.arange(turn * receiver)]
        for receiver in range(world)
    ]


def _swapped(rank: int) -> bool:
    exchange, world = _connected(rank), dist.get_world_size()
    channels = exchange.new_channel(), exchange.new_channel()
    right = []
    for turn in range(12):
        numbers = [exchange.post(channel, _parts(rank, world, turn)) for channel in channels]
        for channel, number in reversed(list(zip(channels, numbers, strict=True))):
            if turn == 5 and channel == channels[0]:
                continue  # given up, as batches are when a run goes back to a checkpoint
            for sender, message in enumerate(exchange.take(channel, number)):
                if message is None:
                    right.append(sender == rank)
                    continue
                for expected in _parts(sender, world, turn)[rank]:
                    right.append(torch.equal(message.read(expected.shape, expected.dtype), expected))
    return all(right) and len(right) > 12 * 2 * (world - 1)


def test_every_rank_reads_what_the_others_posted_for_it(ranks: RankPool) -> None:
    assert all(ranks.run(3, _swapped))


def _sums(rank: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    exchange = _connected(rank)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    theirs = values.clone()
    dist.all_reduce(theirs)
    exchange.all_reduce(FLAGS, values)
    flags = torch.tensor([rank, 1])
    host_exchange.all_reduce(flags)
    return values, theirs, flags.tolist()


def test_sums_have_the_same_bits_on_every_rank(ranks: RankPool) -> None:
    found = ranks.run(3, _sums)
    for values, theirs, flags in found:
        assert torch.equal(values, found[0][0])
        torch.testing.assert_close(values, theirs)
        assert flags == [3, 3]


def _rows_and_sums(rank: int, shared: bool) -> list[torch.Tensor]:
    if shared:
        _connected(rank)
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    local, whole = torch.randn(5, 3, generator=generator).t(), torch.randn(world, 4, 2, generator=generator)
    return [
        host_exchange.all_gather(local),
        host_exchange.reduce_scatter(whole),
        host_exchange.all_gather(local[:, :0]),
    ]


def test_rows_are_gathered_and_parts_summed_as_by_gloo(ranks: RankPool) -> None:
    for shared, gloo in zip(ranks.run(2, _rows_and_sums, True), ranks.run(2, _rows_and_sums, False), strict=True):
        for mine, other in zip(shared, gloo, strict=True):
            assert mine.shape == other.shape
            assert torch.equal(mine, other)


def _message_of_a_silent_rank(rank: int) -> str:
    exchange = _connected(rank, timeout_s=0.5)
    if rank == 0:
        try:
            exchange.all_reduce(FLAGS, torch.zeros(1))
        except RuntimeError as error:
            dist.barrier()
            return str(error)
    dist.barrier()
    return ""


def test_a_rank_that_is_silent_for_too_long_is_named(ranks: RankPool) -> None:
    message = ranks.run(2, _message_of_a_silent_rank)[0]
    assert message == "rank 1 has been silent for longer than comms.timeout_s allows"


def _message_of_a_rank_that_left(rank: int) -> str:
    exchange = _connected(rank)
    dist.barrier()
    if rank == 1:
        exchange.close()  # as the kernel does for a rank that is killed
        return ""
    try:
        exchange.all_reduce(FLAGS, torch.zeros(1))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_has_left_is_noticed_at_once(ranks: RankPool) -> None:
    message = ranks.run(2, _message_of_a_rank_that_left)[0]
    assert message.startswith("rank 1 has left")  # and not that it is silent, which takes the whole timeout to know


def _others(rank: int) -> list[bool]:
    world, cpu = dist.get_world_size(), torch.device("cpu")
    on_hosts = connect(DistributedContext(rank, world, 0, 1, cpu, "gloo"), 60.0)
    by_nccl = connect(DistributedContext(rank, world, rank, world, cpu, "nccl"), 60.0)
    return [on_hosts is None, by_nccl is None, host_exchange.current() is None]


def test_ranks_of_several_hosts_have_no_exchange(ranks: RankPool) -> None:
    assert all(all(found) for found in ranks.run(2, _others))


def _again(rank: int) -> tuple[bool, int]:
    exchange = _connected(rank)
    exchange.all_reduce(FLAGS, torch.zeros(3))
    links = []
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.append(os.readlink(f"/proc/self/fd/{file}"))
    return _connected(rank) is exchange, sum("memfd:rank" in link for link in links)


def test_one_exchange_a_process_group_and_none_is_left_behind(ranks: RankPool) -> None:
    first = ranks.run(2, _again)
    for _ in range(3):
        later = ranks.run(2, _again)
    print(first, later)
    assert all(same for same, _ in first + later)
    assert later == first
