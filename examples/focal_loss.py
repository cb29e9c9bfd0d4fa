"""A loss of your own in one file: DeepFM by the focal loss (arXiv 1708.02002), from the folder above:

python -m pipeline train data=quickstart plugins=[examples.focal_loss] model=focal_deepfm model.gamma=1.5
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pipeline.config.registry import register
from pipeline.models.deepfm import DeepFMConfig
from pipeline.models.tasks.click import ClickTask, Prediction, logit_a_row


@register("model", "focal_deepfm")
@dataclass
class FocalDeepFMConfig(DeepFMConfig):
    kind: str = "focal_deepfm"
    gamma: float = 2.0  # 0: plain cross-entropy

    @property
    def task(self):
        return "focal_click"


@register("task", "focal_click")
class FocalClick(ClickTask):  # its metrics: NE, AUC, calibration
    def __init__(self, config, tables):
        super().__init__(config, tables)
        self.gamma = config.gamma

    def forward(
        self, output, batch
    ):  # what the model's forward returned -> the loss to go back from, and what is measured
        logits = logit_a_row(output, len(batch.labels))
        prediction = Prediction(torch.zeros(()), logits, batch.labels, batch.sample_weights)
        loss = self.losses(prediction).mean()
        return loss, prediction._replace(loss=loss.detach(), logits=logits.detach())

    def losses(self, prediction):  # [batch]
        logits, labels = prediction.logits, prediction.labels
        plain = F.binary_cross_entropy_with_logits(logits, labels, weight=prediction.sample_weights, reduction="none")
        return plain * torch.sigmoid(torch.where(labels > 0.5, -logits, logits)) ** self.gamma
