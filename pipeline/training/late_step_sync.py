"""Share flags between ranks without making the host wait for the device in each step.

StepSync reads its flags between forward and backward. The host waits for the device there, and the
device then waits until backward is launched. LateStepSync lets the device itself skip the update of
a bad batch. The host reads the flags of a batch during the next batch, before that batch updates
anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeline.devices.base import in_host_memory
from pipeline.devices.cpu.host_exchange import all_reduce
from pipeline.sharding.torchrec.skipped_updates import without_updates
from pipeline.training.optimizer import TrainingOptimizer
from pipeline.training.step_sync import StepSync, is_alone, marks_of

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
        """Wait for the flags of the last batch. Results of the batch before it stay set.

        Raises:
            NonFiniteLossError: as StepSync does, about the last batch.
        """
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

        Collective.
        """
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
