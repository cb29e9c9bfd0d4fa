"""Average the dense layers over steps, and put the average into evaluations and checkpoints.

A checkpoint has the average in place of the trained layers, so an evaluation, an export, a delta
and a warm start use the average without code for it. The trained layers are in one more file of the
step. A resumed run continues from them.

SWA: https://arxiv.org/abs/1803.05407. torch.optim.swa_utils computes both averages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule

from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.runtime.errors import DamagedError, TrainingError
from pipeline.runtime.logs import get_logger
from pipeline.serving.artifact.deltas import tensors_from_bytes, tensors_to_bytes
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState
from pipeline.training.optimizer import dense_parameters

ENTRY = "average"  # the key in a manifest
FILE = "trained_layers.bin"
logger = get_logger("pipeline.training")


def layers_of(model: DistributedModelParallel) -> list[torch.Tensor]:
    """Return the trained dense weights and the stored statistics of batch norms, by name."""
    stored = model.state_dict()
    of_tables = {
        id(buffer) for module in model.modules() if isinstance(module, ShardedModule) for buffer in module.buffers()
    }
    statistics = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in stored and buffer.is_floating_point() and id(buffer) not in of_tables
    }
    return [tensor for _, tensor in sorted((dense_parameters(model) | statistics).items())]


def _copies(layers: list[torch.Tensor]) -> list[torch.Tensor]:
    return [layer.detach().clone() for layer in layers]


@torch.no_grad()
def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for tensor, value in zip(into, values, strict=True):
        tensor.copy_(value)


@register("hook", "average")
class AverageLayers(Hook):
    """Every rank computes the same average, because all ranks have the same dense layers."""

    runs_after = "record"  # the average of a step is complete before the step is evaluated and saved

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._config = job.trainer.average
        self._averages: list[torch.Tensor] = []  # empty before the first averaged step
        self._num_averaged = 0

    @cached_property
    def _layers(self) -> list[torch.Tensor]:
        return layers_of(self.parts.model)

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        """Take the average from the model, which was filled from the step, and the trained layers
        from the file. A run that no longer averages only takes the trained layers."""
        self._averages, self._num_averaged = [], 0
        if (earlier := manifest.get(ENTRY)) is None:
            return
        step, layers = int(manifest["step"]), self._layers
        content = self.parts.checkpointer.read_file(step, FILE)
        trained = [] if content is None else tensors_from_bytes(content)
        if [one.shape for one in trained] != [one.shape for one in layers]:
            raise DamagedError(f"{FILE} of step {step} does not hold the {len(layers)} tensors of the dense layers")
        if earlier["kind"] == self._config.kind:
            self._averages = _copies(layers)
            self._num_averaged = int(earlier["num_averaged"])
        _copy(layers, trained)

    def on_train_start(self, state: TrainingState) -> None:
        config = self._config
        if config.kind == "none":
            return
        if not state.is_endless and state.total_steps // config.every_steps * config.every_steps < config.start_step:
            raise TrainingError(
                f"trainer.average.start_step={config.start_step} with every_steps={config.every_steps} averages no step of the "
                f"{state.total_steps} steps of this training: lower them, or leave out trainer.average"
            )
        logger.info(
            "the dense layers are averaged (%s) from step %d, every %d step(s); evaluations, checkpoints and exports use the average",
            f"ema, decay {config.decay:g}" if config.kind == "ema" else config.kind,
            config.start_step,
            config.every_steps,
        )

    def on_step_end(self, state: TrainingState) -> None:
        config = self._config
        if config.kind == "none" or state.step < config.start_step or not state.is_due(config.every_steps):
            return
        layers = self._layers
        if not self._averages:
            self._averages = _copies(layers)
        elif config.kind == "ema":
            get_ema_multi_avg_fn(config.decay_after(self._num_averaged))(self._averages, layers, self._num_averaged)
        else:
            get_swa_multi_avg_fn()(self._averages, layers, self._num_averaged)
        self._num_averaged += 1

    @contextmanager
    def evaluated_model(self, state: TrainingState) -> Iterator[None]:
        if not self._averages:
            yield
            return
        trained = _copies(self._layers)
        _copy(self._layers, self._averages)
        try:
            yield
        finally:
            _copy(self._layers, trained)

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        return {ENTRY: {"kind": self._config.kind, "num_averaged": self._num_averaged}} if self._averages else {}

    def saved_files(self, state: TrainingState) -> dict[str, bytes]:
        if not self._averages or not self.parts.context.is_main:
            return {}
        return {FILE: tensors_to_bytes([layer.cpu() for layer in self._layers])}
