"""Score rows by what an artifact's layers give: one number a row, or one for each label by its name."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ServedTask:
    """A label that is scored: binary by a probability, regression by its value, ordinal by the expected bucket.

    `width`: the numbers that the layers give for it. An artifact of one binary label names no tasks.
    """

    name: str
    kind: str
    width: int = 1


def scores_of(tasks: list[ServedTask], outputs: torch.Tensor) -> torch.Tensor:
    """Of the layers' outputs, [batch] without tasks, else [batch, sum of widths] -> [batch, tasks]."""
    if not tasks:
        return torch.sigmoid(outputs)
    parts = outputs.split([task.width for task in tasks], dim=1)
    return torch.stack([_score(task.kind, part) for task, part in zip(tasks, parts, strict=True)], dim=1)


def _score(kind: str, outputs: torch.Tensor) -> torch.Tensor:
    if kind == "regression":
        return outputs[:, 0]
    return torch.sigmoid(outputs).sum(1)


def width_of(tasks: list[ServedTask]) -> int | None:
    """Columns of the layers' outputs; None where they are [batch]."""
    return sum(task.width for task in tasks) if tasks else None
