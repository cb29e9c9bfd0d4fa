"""A package from outside adds one component of each kind, and goes with them from raw rows to scores."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.dataset import load_dataset
from tests.plugins.whole_way import ROWS
from tests.support.forks import run_warm


@pytest.fixture(scope="module")
def gone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests.plugins.whole_way prints; a process of its own, for what a plugin registers stays registered."""
    done = run_warm("tests.plugins.whole_way", tmp_path_factory.mktemp("shop"))
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.long
def test_its_format_is_prepared_and_bad_lines_are_quarantined(gone: dict[str, Any]) -> None:
    dataset = load_dataset(gone["prepared"])
    assert (dataset.source_rows, dataset.quarantined_rows) == (ROWS + 3, 3)
    lines = (Path(gone["prepared"]) / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in lines] == [9, 73, 704]


@pytest.mark.long
def test_its_model_trains_with_its_task_and_optimizer_and_resumes(gone: dict[str, Any]) -> None:
    assert gone["steps"] == [10, 20]
    logged = [json.loads(line) for line in gone["log"].splitlines()]
    assert [line["step"] for line in logged if line["kind"] == "train"] == [5, 10, 15, 20]
    assert 0.5 < gone["metrics"]["auc"] < 1.0


@pytest.mark.long
def test_its_hook_counts_steps_and_goes_on_counting_after_a_resume(gone: dict[str, Any]) -> None:
    logged = [json.loads(line) for line in gone["log"].splitlines()]
    counted = [line["counted_steps"] for line in logged if line["kind"] == "train"]
    assert counted == [4, 9, 14, 19]  # a step's line is written before a plugin's hooks hear of its end


@pytest.mark.long
def test_its_metric_is_measured_in_training_and_after_it(gone: dict[str, Any]) -> None:
    logged = [json.loads(line) for line in gone["log"].splitlines()]
    measured = [line["accuracy_at_30"] for line in logged if line["kind"] == "validation"]
    assert len(measured) == 2 and all(0.3 < value < 1.0 for value in [*measured, gone["metrics"]["accuracy_at_30"]])


def test_its_tracker_gets_the_lines_of_both_starts(gone: dict[str, Any]) -> None:
    lines = gone["tracked"].splitlines()
    assert [line for line in lines if line[0] in "bge"] == ["begins shop", "ends", "goes on with shop", "ends"]
    steps = [line.split()[:2] for line in lines if line.startswith("train ")]
    assert steps == [["train", "5"], ["train", "10"], ["train", "15"], ["train", "20"]]


def test_its_run_names_it_without_an_import_path(gone: dict[str, Any]) -> None:
    assert "plugins: [tests.plugins.sample_plugin]" in gone["config"]
    for kind in (
        "kind: summed_mlp",
        "name: signed_momentum",
        "kind: modulo",
        "format: json_rows",
        "hooks: [step_counter]",
    ):
        assert kind in gone["config"]
    assert gone["config"].count("sample_plugin") == 1


def test_its_compression_is_trained_and_its_collisions_are_counted(gone: dict[str, Any]) -> None:
    found = json.loads(gone["summary"])["compression"]["item"]
    assert (found["kind"], found["collisions"]["ids"]) == ("modulo", 1.0)


def test_its_model_is_exported_and_scores_its_raw_rows(gone: dict[str, Any]) -> None:
    scores = [row["score"] for row in csv.DictReader(gone["scores"].splitlines())]
    assert len(scores) == ROWS + 3
    assert scores.count("") == 2  # what is no JSON; a label is not asked for
    assert all(0.0 < float(score) < 1.0 for score in scores if score)


def test_its_transform_makes_a_column_of_prepared_rows(gone: dict[str, Any]) -> None:
    features = {feature.name: feature for feature in load_dataset(gone["prepared"]).sparse_features}
    assert features["last_digit"].cardinality == 11  # ten digits, and row 0 of unknown ones


def test_its_index_finds_what_the_exact_one_finds(gone: dict[str, Any]) -> None:
    assert gone["items"]["found"] == gone["items"]["exact"]


def test_its_loss_is_found_by_its_name(gone: dict[str, Any]) -> None:
    assert gone["loss"] == 2.0


def test_its_verb_runs_by_its_name(gone: dict[str, Any]) -> None:
    assert gone["printed"] == f"{ROWS + 3} lines\n"
