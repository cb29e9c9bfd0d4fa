"""Measure the seconds that a rank's training thread waits for collectives: the log's `comms %`.

No function of torch is replaced. The clock runs at the points where a step can block on other
ranks:

- the exchange of splits and ids: in TimedTrainPipeline if a train pipeline runs, otherwise in ShardedTables.forward;
- pooled embeddings: each output awaitable in forward, and in backward the autograd node that waits for their gradients;
- gradients under DistributedDataParallel: from the last computation of backward to its end;
- ranks of one host that exchange through memory: the wait for another rank's message (host_exchange);
- the few collectives that this codebase calls in a step, such as for the flags of the loss.

Waiting for a slower rank counts, and so do the copies that TorchRec and DDP make of received data
before the call returns. Saves, evaluations and other threads do not count. With nccl no rank
blocks: the device's streams wait, which a clock on the host cannot measure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torchrec.distributed.types import Awaitable

MEASURED_BACKENDS = ("gloo",)
REQUEST_NODES = "_ReqBackward"  # torchrec.distributed.comm_ops: All2All_Pooled_Req, ReduceScatter_Req, ...
MAX_NODES = 64  # there are two to five between an awaitable's result and its request


class CommsWait:
    """Count the `seconds` that this object's thread waits for collectives, while clocked."""

    def __init__(self) -> None:
        self.seconds = 0.0
        # checkpoints and evaluations may use other threads and groups
        self.thread = threading.get_ident()
        self._is_running, self._since = False, 0.0

    @contextmanager
    def clocked(self, loss: nn.Module) -> Iterator[None]:
        """Run the clock while this rank waits, including waits in the backward of `loss` (DDP)."""
        global _clock
        hook = loss.register_forward_hook(self._clock_backward)
        before, _clock = _clock, self
        try:
            yield
        finally:
            _clock = before
            hook.remove()

    def switch(self, on: bool) -> bool:
        """Start or stop the clock. Return whether it was running before."""
        now = time.perf_counter()
        if self._is_running:
            self.seconds += now - self._since
        was_running, self._is_running, self._since = self._is_running, on, now
        return was_running

    def _clock_backward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        # Autograd runs the callbacks for the end of backward in the order in which they were
        # queued. So the gradient of the loss queues a callback before DDP's that starts the clock.
        # This callback queues another one that stops it.
        loss = outputs[0]
        if loss.requires_grad:
            loss.register_hook(lambda gradient: _at_the_end_of_backward(self._begin))

    def _begin(self) -> None:
        self.switch(True)
        _at_the_end_of_backward(lambda: self.switch(False))  # after DDP's callback


_clock: CommsWait | None = None


def _current() -> CommsWait | None:
    return _clock if _clock is not None and _clock.thread == threading.get_ident() else None


@contextmanager
def waiting(is_waiting: bool = True) -> Iterator[None]:
    """Count the time in this context as waiting for other ranks, except in an inner `working()`."""
    if (clock := _current()) is None:
        yield
        return
    before = clock.switch(is_waiting)
    try:
        yield
    finally:
        clock.switch(before)


def working() -> AbstractContextManager[None]:
    """Do not count the time in this context, because the rank works instead of waiting."""
    return waiting(False)


def clock_awaitable(awaitable: Awaitable[Any]) -> None:
    """Let an awaitable of pooled embeddings count its own wait, and in backward the wait for its gradients."""
    if _current() is None:
        return
    wait_impl: Callable[[], Any] = awaitable._wait_impl

    def clocked_wait() -> Any:
        with waiting():
            result = wait_impl()
        if isinstance(result, torch.Tensor) and result.grad_fn is not None:
            _clock_requests(result.grad_fn)
        return result

    awaitable._wait_impl = clocked_wait  # of this awaitable alone, which lives for one batch


def _clock_requests(last: torch.autograd.graph.Node) -> None:
    """Measure the backward of TorchRec's requests below `last`, which waits for gradients first."""
    nodes, seen = [last], {last}
    while nodes and len(seen) < MAX_NODES:
        node = nodes.pop()
        if node.name().endswith(REQUEST_NODES):
            node.register_prehook(_start)
            node.register_hook(_stop)
            continue
        behind = [each for each, _ in node.next_functions if each is not None and each not in seen]
        nodes += behind
        seen.update(behind)


def _start(gradients: Any) -> None:
    if clock := _current():
        clock.switch(True)


def _stop(gradients: Any, received: Any) -> None:
    if clock := _current():
        clock.switch(False)


def _at_the_end_of_backward(call: Callable[[], Any]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)
