"""Train several labels, or one that is not binary: a weighted sum of losses, metrics by label."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.data.read.batch import Batch
from pipeline.data.targets import Target
from pipeline.embeddings.table import Table
from pipeline.models.tasks.click_metrics import Prediction
from pipeline.models.tasks.label_kinds import (
    TargetMeasure,
    TargetPrediction,
    evaluation_measure,
    losses_of,
    training_measure,
)
from pipeline.models.tasks.task import Measure
from pipeline.runtime.process.distributed import DistributedContext


class LabelsPrediction(NamedTuple):
    """Detached: outputs [B, sum of widths], labels and sample_weights [B, targets], losses [B]."""

    loss: torch.Tensor  # scalar
    outputs: torch.Tensor
    labels: torch.Tensor
    sample_weights: torch.Tensor
    losses: torch.Tensor


@register("task", "labels")
class LabelsTask(nn.Module):
    """The sum over targets of weight * loss, a mean over all rows; a masked row adds 0.

    So a step is the same for any number of ranks. A target with few unmasked rows has less
    influence, which `weight` may compensate.
    """

    no_export = ""
    takes_targets = True

    def __init__(self, config: ModelConfig, tables: list[Table], targets: list[Target]) -> None:
        super().__init__()
        self.targets = targets
        ends = [sum(target.width for target in targets[: number + 1]) for number in range(len(targets))]
        # Learnt logarithms of losses' variances (Kendall et al., CVPR 2018). None: given weights.
        learns_weights = getattr(config, "uncertainty_weights", False)
        self.log_variances = nn.Parameter(torch.zeros(len(targets))) if learns_weights else None
        self._columns = [slice(end - target.width, end) for end, target in zip(ends, targets, strict=True)]

    def forward(self, outputs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, LabelsPrediction]:
        """outputs: [B, sum of widths], in the order of targets, the main target first."""
        outputs = outputs.float()
        labels, weights = (part.reshape(-1, len(self.targets)) for part in (batch.labels, batch.sample_weights))
        parts = [outputs[:, columns] for columns in self._columns]
        if self.training:  # rows were sampled in training; the model's logits describe all rows
            parts = [
                part + target.train_offset if target.train_offset else part
                for part, target in zip(parts, self.targets, strict=True)
            ]
        losses = self.losses_of_targets(parts, labels, weights)
        loss = self.total(losses)
        rows = torch.stack([each.detach() for each in losses]).sum(0)
        return loss, LabelsPrediction(loss.detach(), outputs.detach(), labels, weights, rows)

    def losses_of_targets(
        self, outputs: list[torch.Tensor], labels: torch.Tensor, weights: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the losses [B] of each target, times the weights of the target and the rows."""
        return [
            target.weight * weights[:, number] * losses_of(target, outputs[number], labels[:, number])
            for number, target in enumerate(self.targets)
        ]

    def total(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the targets' mean losses; with learnt s: exp(-s) * loss + s / 2."""
        means = torch.stack([each.mean() for each in losses])
        if self.log_variances is None:
            return means.sum()
        return (torch.exp(-self.log_variances) * means + self.log_variances / 2).sum()

    def losses(self, prediction: LabelsPrediction) -> torch.Tensor:
        """Return the loss of each row [batch]."""
        return prediction.losses

    def clicks(self, prediction: LabelsPrediction) -> dict[str, Prediction]:
        """Return the predictions of binary targets, to rank groups, by their metrics' prefix."""
        return {
            prefix: self.of_target(prediction, number).as_click()
            for number, (prefix, target) in enumerate(zip(self.prefixes, self.targets, strict=True))
            if target.kind == "binary"
        }

    def of_target(self, prediction: LabelsPrediction, number: int) -> TargetPrediction:
        return TargetPrediction(
            prediction.loss,
            prediction.outputs[:, self._columns[number]],
            prediction.labels[:, number],
            prediction.sample_weights[:, number],
        )

    def number_of(self, name: str | None) -> int:
        """Return the position of the target of this name. None: the main target, which is first."""
        return 0 if name is None else [target.name for target in self.targets].index(name)

    @property
    def prefixes(self) -> list[str]:
        """Return the prefixes of metrics' names: <label>/, or nothing if there is one label."""
        return [f"{target.name}/" for target in self.targets] if len(self.targets) > 1 else [""]

    def training_measure(self, context: DistributedContext, batch_size: int, window_samples: int) -> Measure:
        measures = [training_measure(target, context, batch_size, window_samples) for target in self.targets]
        return LabelsMeasure(self, measures)

    def evaluation_measure(self, context: DistributedContext, batch_size: int) -> Measure:
        return LabelsMeasure(self, [evaluation_measure(target, context, batch_size) for target in self.targets])


class LabelsMeasure:
    """Measure each target's metrics, named <label>/<metric> if there are several targets."""

    def __init__(self, task: LabelsTask, measures: list[TargetMeasure]) -> None:
        self._task, self._measures = task, measures

    def update(self, prediction: LabelsPrediction) -> None:
        for number, measure in enumerate(self._measures):
            measure.update(self._task.of_target(prediction, number))

    def compute(self) -> dict[str, float]:
        """Collective: return the metrics. num_samples is the largest number of any target."""
        found: dict[str, float] = {}
        for prefix, measure in zip(self._task.prefixes, self._measures, strict=True):
            found |= {prefix + name: value for name, value in measure.compute().items()}
        counts = [value for name, value in found.items() if name.endswith("num_samples")]
        return found | ({"num_samples": max(counts)} if counts else {})
