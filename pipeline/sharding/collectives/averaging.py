"""Average the gradients of dense layers and replicated tables over the ranks of one host.

DistributedDataParallel copies gradients into buckets, which gloo's threads send. For a small model
that takes longer than the layers. Here each rank sends one message at the end of backward. The
gradients of parameters become views of one block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from pipeline.devices.cpu.host_exchange import HostExchange
from pipeline.runtime.process.comms_wait import working

BROADCAST_BYTES = 25 << 20  # sent at a time


class GradientAverage:
    """Average the gradients of `parameters` after each backward that reaches any of them.

    Every rank must reach the same parameters. A parameter that no rank has reached stays without a
    gradient.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], exchange: HostExchange) -> None:
        """Collective: set the parameters to those of rank 0, as DDP does."""
        world = dist.GroupMember.WORLD
        assert world is not None
        dist._broadcast_coalesced(world, [parameter.detach() for parameter in parameters], BROADCAST_BYTES, 0)
        self._exchange, self._parameters = exchange, list(parameters)
        self._blocks = []
        for dtype in sorted({parameter.dtype for parameter in parameters}, key=str):
            of_dtype = [parameter for parameter in parameters if parameter.dtype == dtype]
            self._blocks.append(_Block(of_dtype, exchange.new_channel()))
        self._is_queued = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._queue)

    def _queue(self, _: torch.Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        self._is_queued = False
        with working():  # the exchange measures its waits itself
            for block in self._blocks:
                block.gather()
                block.flat.div_(self._exchange.world_size)
                self._exchange.all_reduce(block.channel, block.flat)


class _Block:
    """The gradients of parameters of one dtype, one after the other."""

    def __init__(self, parameters: list[nn.Parameter], channel: int) -> None:
        self._parameters, self.channel = parameters, channel
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype)
        self._views = [
            part.view(parameter.shape) for parameter, part in zip(parameters, self.flat.split(sizes), strict=True)
        ]

    def gather(self) -> None:
        """Copy the gradients that are not in the block yet.

        From now on the parameters' gradients are views of the block.
        """
        views, gradients = [], []
        for parameter, view in zip(self._parameters, self._views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr():
                views.append(view)
                gradients.append(gradient)
                parameter.grad = view
        if views:
            torch._foreach_copy_(views, gradients)
