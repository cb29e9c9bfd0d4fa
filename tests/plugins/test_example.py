"""The examples of a model, a loss and a metric of one's own fit on a page, and train by the command that they give."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from pipeline.config import registry
from pipeline.models.deepfm import DeepFMConfig
from pipeline.models.tasks.click import ClickTask, Prediction
from tests.support.forks import run_warm

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "file", "named"),
    [
        ("custom_model", "config.yaml", "kind: gated_mlp"),
        ("focal_loss", "config.yaml", "kind: focal_deepfm"),
        ("accuracy", "metrics.jsonl", '"accuracy": 0.'),
    ],
)
def test_the_example_trains_by_its_command(
    prepared_clicks: str, tmp_path: Path, example: str, file: str, named: str
) -> None:
    lines = (REPOSITORY / "examples" / f"{example}.py").read_text().splitlines()
    assert len(lines) <= 45
    command = next(line.strip() for line in lines if " train " in line).removeprefix("python -m ").split()
    small = [
        "hardware=cpu",
        "trainer.global_batch_size=256",
        "trainer.max_steps=3",
        "tables.default.embedding_dim=8",
        "trainer.evaluate_batch_size=512",
        "trainer.evaluate_max_batches=1",
    ]
    assert command[0] == "pipeline"
    done = run_warm("pipeline", *command[1:], *small, f"data.path={prepared_clicks}", f"run_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr[-4000:]
    assert named in (tmp_path / "run" / file).read_text()


def test_the_examples_loss_is_the_focal_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, type] = {}
    monkeypatch.setattr(
        registry, "register", lambda kind, name: lambda component: registered.setdefault(kind, component)
    )
    runpy.run_path(str(REPOSITORY / "examples" / "focal_loss.py"))
    model, task = registered["model"], registered["task"]
    labels, logits, weights = (
        torch.tensor([1.0, 0.0, 1.0]),
        torch.tensor([0.3, 0.3, -2.0]),
        torch.tensor([1.0, 2.0, 0.5]),
    )
    prediction = Prediction(torch.zeros(()), logits, labels, weights)
    right = torch.where(labels > 0, torch.sigmoid(logits), 1 - torch.sigmoid(logits))
    found = task(model(gamma=1.5), []).losses(prediction)
    torch.testing.assert_close(found, -weights * (1 - right) ** 1.5 * right.log())
    plain = task(model(gamma=0.0), []).losses(prediction)
    torch.testing.assert_close(plain, ClickTask(DeepFMConfig(), []).losses(prediction))
