"""Turn a rank's waits for collectives into seconds, for the share of a step that the log tells.

A rank blocks in three places. TorchRec and our own code wait in Python, in gloo's `Work.wait`, which is given a clock, and
for the other ranks of a host in pipeline.sharding.collectives.host_exchange, which has one.
DDP waits in C++, at the end of backward: autograd runs what was queued for then in the order in which it was queued,
so a clock is started by what the loss's gradient queues, before DDP does, and stopped by what that queues in turn.
DDP's copy of the averaged gradients falls into that time. A rank that waits for a slower one is in a collective too.
On nccl no rank blocks: the device's streams wait, which a clock on the host does not see.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeline.sharding.collectives.host_exchange import current

MEASURED_BACKENDS = ("gloo",)


class CommsWait:
    """`seconds` that this rank has spent blocked in collectives, on the thread that made this object, while clocked."""

    def __init__(self) -> None:
        self._clocked = self._on_host = 0.0
        self._thread = threading.get_ident()  # checkpoints and evaluations may have threads, and groups, of their own
        self._began = self._on_host_then = 0.0

    @property
    def seconds(self) -> float:
        return self._clocked + self._on_host

    @contextmanager
    def clocked(self, loss: nn.Module) -> Iterator[None]:
        """Clock every `Work.wait` of the process, and DDP's wait in the backward of what `loss` returns first."""
        original: Any = dist.Work.wait

        def wait(work: Any, *arguments: Any, **keywords: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(work, *arguments, **keywords)
            began = time.perf_counter()
            try:
                return original(work, *arguments, **keywords)
            finally:
                self._clocked += time.perf_counter() - began

        exchange = current()
        if exchange is not None:
            exchange.on_wait = self._add_on_host
        hook = loss.register_forward_hook(self._clock_backward)
        dist.Work.wait = wait  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            dist.Work.wait = original  # type: ignore[method-assign]
            hook.remove()
            if exchange is not None:
                exchange.on_wait = None

    def _add_on_host(self, seconds: float) -> None:
        self._on_host += seconds

    def _clock_backward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        loss = outputs[0]
        if loss.requires_grad:
            loss.register_hook(lambda gradient: _at_the_end_of_backward(self._begin))

    def _begin(self) -> None:
        self._began, self._on_host_then = time.perf_counter(), self._on_host
        _at_the_end_of_backward(self._end)  # behind DDP's

    def _end(self) -> None:
        self._clocked += time.perf_counter() - self._began - (self._on_host - self._on_host_then)


def _at_the_end_of_backward(call: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[no-untyped-call]
