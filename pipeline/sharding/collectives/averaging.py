"""Turn each rank's gradients of dense layers and replicated tables into their mean over the ranks of one host.

What DistributedDataParallel does, in one message at the end of backward: it copies gradients into buckets and has gloo's
threads send them, which for a small model takes longer than the layers. Parameters' gradients become views of one block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from pipeline.sharding.collectives.comms_wait import working
from pipeline.sharding.collectives.host_exchange import HostExchange

BROADCAST_BYTES = 25 << 20  # at once


class GradientAverage:
    """Averages the gradients of `parameters` wherever a backward reaches any of them.

    Every rank reaches the same parameters; what none has reached stays without a gradient.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], exchange: HostExchange) -> None:
        """Collective: parameters become rank 0's, as under DDP."""
        world = dist.GroupMember.WORLD
        assert world is not None
        dist._broadcast_coalesced(world, [one.detach() for one in parameters], BROADCAST_BYTES, 0)
        self._exchange, self._parameters = exchange, list(parameters)
        self._blocks = []
        for dtype in sorted({one.dtype for one in parameters}, key=str):
            of_dtype = [one for one in parameters if one.dtype == dtype]
            self._blocks.append(_Block(of_dtype, exchange.new_channel()))
        self._is_queued = False
        for one in parameters:
            one.register_post_accumulate_grad_hook(self._queue)

    def _queue(self, _: torch.Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _average(self) -> None:
        self._is_queued = False
        with working():  # the exchange counts its own waits
            for block in self._blocks:
                block.gather()
                block.flat.div_(self._exchange.world_size)
                self._exchange.all_reduce(block.channel, block.flat)


class _Block:
    """The gradients of parameters of one dtype, one after the other."""

    def __init__(self, parameters: list[nn.Parameter], channel: int) -> None:
        self._parameters, self.channel = parameters, channel
        self.flat = torch.zeros(sum(one.numel() for one in parameters), dtype=parameters[0].dtype)
        parts = self.flat.split([one.numel() for one in parameters])
        self._places = [part.view(one.shape) for one, part in zip(parameters, parts, strict=True)]

    def gather(self) -> None:
        """Copy what is not here already, and let the parameters' gradients lie here from now on."""
        into, gradients = [], []
        for one, place in zip(self._parameters, self._places, strict=True):
            gradient = one.grad
            if gradient is None:
                place.zero_()
            elif gradient.data_ptr() != place.data_ptr():
                into.append(place)
                gradients.append(gradient)
                one.grad = place
        if into:
            torch._foreach_copy_(into, gradients)
