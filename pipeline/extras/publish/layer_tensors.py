"""Provide the tensors of the layers' program at each step of a run. The layers are traced once;
later tensors are taken from the model by name.

A trace takes most of a delta's time. Its result is the program's code, which is the same for all
steps of a run, and tensors: named weights, quantized weights, and computed ones. They are taken by
name after a trace has shown that this gives equal numbers, and that unnamed tensors are equal to
those at the artifact's step.
"""

from __future__ import annotations

import torch

from pipeline.runtime.errors import ServingError
from pipeline.serving.artifact.dense_export import by_name, program_bytes, trace_layers
from pipeline.serving.artifact.manifest import DENSE_FILE
from pipeline.serving.artifact.task_quality import width_of
from pipeline.serving.artifact.trained_step import TrainedStep
from pipeline.serving.scoring.dense_program import DenseProgram, load_program


class LayerTensors:
    """The tensors of an artifact's program. `num_traces` counts the traces."""

    def __init__(self, precision: str, artifact: str) -> None:
        self._precision, self._artifact = precision, artifact
        self._traced: DenseProgram | None = None
        self._int8: dict[str, tuple[str, str | None]] = {}
        self._of: object = None  # the model's config for which names are sufficient
        self.num_traces = 0

    def at(self, trained: TrainedStep, served: object) -> list[torch.Tensor]:
        """Return the tensors in the order of the program.

        Raises ServingError if the program differs from `served`.
        """
        if self._traced is not None and self._of == trained.job.model:
            return [
                kept if named is None else named
                for named, kept in zip(self._named(trained, self._traced), self._traced.constants, strict=True)
            ]
        program, self._int8 = trace_layers(
            trained.model, self._precision, trained.num_dense, sum(trained.model_dims), width_of(trained.tasks)
        )
        self.num_traces += 1
        made = load_program(program_bytes(program), DENSE_FILE)
        if not isinstance(served, DenseProgram) or made.code != served.code:
            raise ServingError(f"the layers' program differs from that of {self._artifact}: export a new artifact")
        if self._names_do(trained, made, served):
            self._traced, self._of = made, trained.job.model
        return made.constants

    def _named(self, trained: TrainedStep, program: DenseProgram) -> list[torch.Tensor | None]:
        width = width_of(trained.tasks)
        return by_name(trained.model, self._precision, width, program.sources, self._int8)

    def _names_do(self, trained: TrainedStep, made: DenseProgram, served: DenseProgram) -> bool:
        if len(made.constants) != len(served.constants):
            return False
        found = self._named(trained, made)
        wanted = (before if named is None else named for named, before in zip(found, served.constants, strict=True))
        return all(_same(one, other) for one, other in zip(wanted, made.constants, strict=True))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
