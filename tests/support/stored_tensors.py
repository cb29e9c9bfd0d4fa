"""What the shard files of a checkpoint's step hold of the model: the same bytes for two runs that have trained the same."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline.checkpoint.owners import HEADER_BYTES
from pipeline.checkpoint.tensors import StepTensors


def stored_tensors(step: str | Path) -> dict[str, bytes]:
    """By the name of the file, without the line that names the save."""
    return {file.name: file.read_bytes()[HEADER_BYTES:] for file in Path(step).glob("*.distcp")}


def step_tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """All weights and states that the step of a run holds, whole, by key."""
    tensors = StepTensors(str(run / "checkpoints" / f"step_{step:08d}"))
    return {key: tensors.read(key, [0] * len(tensors.shape(key)), list(tensors.shape(key))) for key in tensors.entries}
