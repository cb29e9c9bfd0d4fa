"""A loss that reads groups and columns of its own trains on a GPU as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extras.models.planted_logs import prepared, words
from tests.gpu.conftest import Gpus


def test_a_loss_of_groups_places_and_a_teacher_equals_the_cpus(gpus: Gpus, tmp_path: Path) -> None:
    losses = ["ranking=jrc", "position=place", "teacher=teacher", "fake_negatives=true"]
    job = [*words(prepared(tmp_path)), "name=losses", "model=logistic_regression", "data.reader.shuffle=groups", "tables.default.embedding_dim=4",
           *(f"trainer.loss.{key}" for key in losses)]  # fmt: skip
    cpu = gpus.train(2, job, tmp_path / "cpu", on="cpu")
    gpu = gpus.train(2, job, tmp_path / "gpu")
    assert gpu.summary.step == cpu.summary.step == 3
    for name, value in cpu.summary.validation.items():
        assert gpu.summary.validation[name] == pytest.approx(value, rel=1e-5), name
    assert all(report.problems == [] for report in filter(None, gpu.reports))
