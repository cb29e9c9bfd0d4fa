"""Name the first layer whose output or gradient is not finite: debug=anomaly, or
trainer.hooks=[anomaly].

The hook checks every layer's output, so steps are slow. The run ends at the first finding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from pipeline.config.registry import register
from pipeline.runtime.errors import TrainingError
from pipeline.training.hooks.base import Hook, TrainingState
from pipeline.training.step_sync import NonFiniteLossError


class AnomalyError(TrainingError):
    """A number of a layer is NaN or infinite.

    The message names the layer and counts the numbers.
    """


@register("hook", "anomaly")
class AnomalyWatch(Hook):
    reads_every_step = True

    def on_train_start(self, state: TrainingState) -> None:
        self._found: list[str] = []
        self._handles: list[Any] = []
        for name, module in self.parts.task.named_modules():
            self._handles.append(module.register_forward_hook(partial(self._look_at_output, name or "the whole model")))
        for name, parameter in self.parts.task.named_parameters():
            if parameter.requires_grad and isinstance(parameter, nn.Parameter) and parameter.is_leaf:
                self._handles.append(parameter.register_hook(partial(self._look_at_gradient, name)))

    def on_step_start(self, state: TrainingState) -> None:
        self._found.clear()

    def _look_at_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for index, tensor in enumerate(_tensors(output)):
            if problem := _problem(tensor):
                which = "" if index == 0 else f"[{index}]"
                before = (
                    "" if all(not _problem(each) for each in _tensors(inputs)) else "; its input is not finite either"
                )
                self._found.append(f"the output{which} of {name} ({type(module).__name__}) has {problem}{before}")

    def _look_at_gradient(self, name: str, gradient: torch.Tensor) -> None:
        if problem := _problem(gradient):
            self._found.append(f"the gradient of {name} has {problem}")

    def on_step_end(self, state: TrainingState) -> None:
        self._agree(state.step)

    def on_non_finite_loss(self, state: TrainingState, error: NonFiniteLossError) -> None:
        self._agree(state.step + 1, str(error))

    def _agree(self, step: int, otherwise: str = "") -> None:
        """Raise AnomalyError on every rank if any rank has found something. Collective."""
        found = torch.tensor([float(bool(self._found))], device=self.parts.context.device)
        if self.parts.context.world_size > 1:
            dist.all_reduce(found)
        if found.item():
            here = f"step {step}: {self._found[0]}" if self._found else f"step {step}: found on another rank"
            more = (
                f"; then {len(self._found) - 1} more, the last of them {self._found[-1]}"
                if len(self._found) > 1
                else ""
            )
            raise AnomalyError(f"{here}{more}. {otherwise}".rstrip(" ."))

    def close(self) -> None:
        for handle in getattr(self, "_handles", []):
            handle.remove()


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a layer's inputs or output.

    Trace proxies and awaitables are not tensors.
    """
    if type(value) in (torch.Tensor, nn.Parameter):
        return [value]
    if isinstance(value, KeyedTensor):
        return [value.values()]
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in _tensors(each)]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in _tensors(each)]
    return []


def _problem(tensor: torch.Tensor) -> str:
    """Describe the numbers that are not finite; "" if all are finite."""
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
        return ""
    nan, infinite = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)
    at = int((~torch.isfinite(rows).all(dim=1)).nonzero()[0])
    return f"{nan:,} NaN and {infinite:,} infinite of {tensor.numel():,} numbers, the first in row {at}"
