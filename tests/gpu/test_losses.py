"""A loss of groups, and a loss of sampled negatives, train on a GPU as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extras.models.planted_logs import prepared, words
from tests.gpu import data
from tests.gpu.conftest import Gpus
from tests.gpu.test_matrix import EXACT, assert_same, words_of_layouts


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


def test_sampled_and_hard_negatives_equal_the_cpus(
    gpus: Gpus, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    keys = {"kind": "mixed", "count": 31, "power": 0.5, "hard.count": 4, "hard.every_steps": 2}
    job = ["experiment=user_item_two_tower", *EXACT, *data.prepared(tmp_path_factory, "user_item"),
           *(f"model.negatives.{key}={value}" for key, value in keys.items())]  # fmt: skip
    cpu = gpus.train(1, job, tmp_path / "cpu", on="cpu")
    gpu = gpus.train(2, [*job, *words_of_layouts("user_item", 1)], tmp_path / "gpu")
    assert_same(gpu, cpu)
