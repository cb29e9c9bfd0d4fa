"""Share flags between all ranks once a batch: stop, failed reader, quarantined rows, due save, loss not finite.

The tables' optimizer runs inside backward. If the loss of any rank is not finite, all ranks must skip the update
before backward starts. The other flags travel in the same all-reduce, so all ranks act on them at the same step.

StepSync reads its flags between forward and backward, so the host waits for the device there. LateStepSync lets the
device itself skip the update of a bad batch. The host reads the flags of a batch during the next batch, before that
batch updates anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeline.data.read.batch import Batch
from pipeline.devices.base import in_host_memory
from pipeline.devices.cpu.host_exchange import all_reduce
from pipeline.runtime.errors import TrainingError
from pipeline.sharding.torchrec.fbgemm_lookups import without_updates
from pipeline.training.optimizer import TrainingOptimizer

MAX_SUSPECTS = 5  # rows that an error names on each rank if the loss is not finite


class NonFiniteLossError(TrainingError):
    """The loss of a step is NaN or infinite on at least one rank. No rank has updated anything.

    `rows` are indices into this rank's batch. They name rows whose loss is not finite, out of
    `num_at_fault` such rows. If there are none on this rank, they name the rows with the largest loss. The
    list is empty if the task has no method `losses`.
    """

    def __init__(
        self, message: str, rows: list[int], losses: list[float], num_at_fault: int, num_in_a_row: int
    ) -> None:
        super().__init__(message)
        self.rows, self.losses, self.num_at_fault, self.num_in_a_row = rows, losses, num_at_fault, num_in_a_row


class StepSync:
    """One all-reduce in each training batch of a guarded task, between its forward and its
    backward.

    Each rank sets its own flags `stop_wanted`, `input_failed`, `input_ended` and `save_wanted`. The results
    (`stop_agreed` and others) are the same on every rank and describe the last batch. After `input_ended`,
    batches that were read ahead are still trained on; the first batch without a row counts as a failed
    reader. Up to `max_in_a_row` consecutive batches with a loss that is not finite are skipped; the next
    such batch raises NonFiniteLossError on every rank. 0 skips none. A finite loss is multiplied by
    `loss_scale`.
    """

    is_late = False  # True if the results describe the batch before the last one

    def __init__(self, max_in_a_row: int = 0, loss_scale: float = 1.0) -> None:
        self.max_in_a_row, self.loss_scale = max_in_a_row, loss_scale
        self.was_skipped = False
        self.num_batches_late = 0  # how many batches ago the failed batch was
        self.stop_wanted = self.input_failed = self.input_ended = self.save_wanted = (
            False  # flags of this rank; a signal handler may set them
        )
        self.stop_agreed = self.input_failure_agreed = self.save_agreed = False
        self.num_bad_rows = 0  # sum over all ranks and training batches
        self.num_skipped = self.in_a_row = 0  # batches whose loss was not finite

    @contextmanager
    def guarding(self, task: nn.Module) -> Iterator[None]:
        """Guard `task`: any module with forward(batch) -> (loss, prediction). Only training mode is
        guarded.

        A forward hook guards it, so the names of the task's parameters do not change. If a batch
        must not update anything, the hook returns a new loss whose backward touches no parameter,
        and None as the prediction.
        """
        handle = task.register_forward_hook(self._guard)
        try:
            yield
        finally:
            handle.remove()

    def _guard(self, task: nn.Module, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, Any]) -> Any:
        """Share the flags of one batch. Collective in training mode."""
        if not task.training:
            return outputs
        loss, prediction = outputs
        marks = marks_of(inputs[0])
        # count_nonzero is three times as fast as a sum of comparisons.
        num_marked = torch.count_nonzero(marks)
        failed_here = self.input_failed or (self.input_ended and int(num_marked) == 0)
        if is_alone():
            flags = [not math.isfinite(loss.item()), self.stop_wanted, failed_here, self.save_wanted]
            non_finite, stop, failed, save, bad = (*map(int, flags), len(marks) - int(num_marked))
        else:
            bad_rows = len(marks) - num_marked
            not_finite = ~loss.detach().isfinite()
            shared: list[torch.Tensor | bool] = [not_finite, self.stop_wanted, failed_here, self.save_wanted, bad_rows]
            non_finite, stop, failed, save, bad = _summed(shared, loss.device)
        self._conclude((non_finite > 0, stop > 0, failed > 0, save > 0, bad), task, loss, prediction)
        if self.was_skipped:
            return _nothing(loss)
        return loss if self.loss_scale == 1.0 else loss * self.loss_scale, prediction

    def settle(self) -> None:
        """Make sure that the results describe the last batch."""

    def forget(self) -> None:
        """Reset the count of consecutive bad losses, because the next batch does not follow the
        last one."""
        self.in_a_row = 0

    def _conclude(
        self, agreed: tuple[bool, bool, bool, bool, int], task: nn.Module, loss: torch.Tensor, prediction: Any
    ) -> None:
        """Store the results for a batch. Raises NonFiniteLossError after too many bad losses in a
        row."""
        non_finite, self.stop_agreed, self.input_failure_agreed, self.save_agreed, num_bad_rows = agreed
        self.was_skipped = non_finite or self.input_failure_agreed
        if self.input_failure_agreed:
            return
        self.num_bad_rows += num_bad_rows
        if not non_finite:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        if self.in_a_row > self.max_in_a_row:
            raise self._error(task, loss, prediction)
        self.num_skipped += 1

    def _error(self, task: nn.Module, loss: torch.Tensor, prediction: Any) -> NonFiniteLossError:
        message = (
            f"the loss is {loss.item()} on this rank and not finite on at least one, {self.in_a_row} time(s) "
            f"in a row with {self.max_in_a_row} allowed; this batch has updated nothing. Look for NaN labels or dense "
            "values, lower the learning rates or warm up (schedule=...), or set trainer.non_finite_loss=skip or rollback"
        )
        losses_of_rows = getattr(task, "losses", None)
        if losses_of_rows is None:
            return NonFiniteLossError(message, [], [], 0, self.in_a_row)
        losses = losses_of_rows(prediction)
        at_fault = torch.nonzero(~losses.isfinite()).flatten()
        rows = at_fault[:MAX_SUSPECTS]
        if not len(rows):
            rows = losses.topk(min(MAX_SUSPECTS, len(losses))).indices
        return NonFiniteLossError(message, rows.tolist(), losses[rows].tolist(), len(at_fault), self.in_a_row)


def marks_of(batch: Batch) -> torch.Tensor:
    """Return [batch]: 0 in quarantined rows. Training batches have no padding."""
    return batch.sample_weights if batch.present is None else batch.present


def _nothing(loss: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.zeros_like(loss.detach()).requires_grad_(), None


def is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _summed(flags: list[torch.Tensor | bool], device: torch.device) -> list[int]:
    """Return the sum of each flag or count over all ranks. Collective."""
    sums = torch.stack([torch.as_tensor(flag, dtype=torch.int64, device=device) for flag in flags])
    all_reduce(sums)
    return [int(value) for value in sums.tolist()]


# Sums over ranks: LOSS is not zero if a loss is not finite; FAILED counts failed readers; STOP and
# SAVE count requests; ROWS counts valid rows.
LOSS, FAILED, STOP, SAVE, ROWS = range(5)


class LateStepSync(StepSync):
    """A StepSync whose results describe the batch before the last one, until settle() is called.
    `stop_agreed` and `save_agreed` may therefore come one step later. If a batch is skipped:

    - tables get gradients of zero, which change nothing under the optimizers that
      TrainingOptimizer.can_skip_on_device accepts;
    - the fused optimizer of the dense layers does nothing if its `found_inf` is 1, as in torch's GradScaler;
    - `was_skipped` is True, and hooks must not see the prediction.
    """

    is_late = True

    def __init__(
        self, model: nn.Module, optimizer: TrainingOptimizer, device: torch.device, max_in_a_row: int = 0
    ) -> None:
        super().__init__(max_in_a_row)
        self._model, self._optimizer = model, optimizer
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._read = torch.zeros(5, dtype=torch.float64, pin_memory=not in_host_memory(self._sums))
        self._event = torch.get_device_module(device).Event()
        self._is_bad = torch.zeros((), dtype=torch.bool, device=device)
        self._found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self._flags, self._flags_on_device = (0.0, 0.0, 0.0), torch.zeros(3, dtype=torch.float64, device=device)
        self._unread: Callable[[], None] | None = None

    @contextmanager
    def guarding(self, task: nn.Module) -> Iterator[None]:
        self._optimizer.skip_where(self._found_inf)
        with without_updates(self._model, self._is_bad), super().guarding(task):
            yield

    def settle(self) -> None:
        """Wait for the flags of the last batch. Results of the batch before it stay set. Raises
        NonFiniteLossError as StepSync does, about the last batch."""
        stop, save, failed = self.stop_agreed, self.save_agreed, self.input_failure_agreed
        self._settle_last()
        self.stop_agreed |= stop
        self.save_agreed |= save
        self.input_failure_agreed |= failed

    def forget(self) -> None:
        super().forget()
        self._unread = None

    def _guard(self, task: nn.Module, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, Any]) -> Any:
        """Share the flags of one batch. Collective in training mode."""
        if not task.training:
            return outputs
        self.stop_agreed = self.save_agreed = self.input_failure_agreed = False
        self.num_batches_late = 1
        self._settle_last()
        if not self.input_failure_agreed:
            self.num_batches_late = 0
        loss, prediction = outputs
        marks = marks_of(inputs[0])
        failed = self.input_failed or (self.input_ended and int(torch.count_nonzero(marks)) == 0)
        self._send(loss.detach(), marks, (float(failed), float(self.stop_wanted), float(self.save_wanted)))
        self._unread = partial(self._take, len(marks), task, loss.detach(), prediction)
        return loss, prediction

    def _send(self, loss: torch.Tensor, marks: torch.Tensor, flags: tuple[float, float, float]) -> None:
        """Queue the sum of all ranks' flags, the decision to skip, and the copy to the host.
        Collective."""
        if flags != self._flags:
            self._flags = flags
            self._flags_on_device.copy_(torch.tensor(flags, dtype=torch.float64))
        # 0 if the loss is finite, otherwise NaN; a sum with NaN is NaN
        self._sums[LOSS].copy_(loss - loss)
        self._sums[FAILED : SAVE + 1].copy_(self._flags_on_device)
        self._sums[ROWS].copy_(torch.count_nonzero(marks))
        if not is_alone():
            all_reduce(self._sums)
        self._is_bad.copy_((self._sums[: FAILED + 1] != 0).any())
        self._found_inf.copy_(self._is_bad)
        self._read.copy_(self._sums, non_blocking=True)
        self._event.record()

    def _settle_last(self) -> None:
        if (take := self._unread) is not None:
            self._unread = None
            if not self._event.query():
                self._event.synchronize()
            take()

    def _take(self, num_rows: int, task: nn.Module, loss: torch.Tensor, prediction: Any) -> None:
        not_finite, failed, stop, save, rows = self._read.tolist()
        num_bad_rows = num_rows * (1 if is_alone() else dist.get_world_size()) - int(rows)
        self._conclude((not_finite != 0, stop > 0, failed > 0, save > 0, num_bad_rows), task, loss, prediction)
