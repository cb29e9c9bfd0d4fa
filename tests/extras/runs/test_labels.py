"""Runs of several labels: each label is shown by its name, and a main label's metric is never another label's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pipeline.data.dataset import Dataset
from pipeline.extras.runs.compare import compare
from pipeline.extras.runs.folder import Run, open_run
from pipeline.extras.runs.listing import as_text, describe_run, sorted_runs
from pipeline.extras.runs.report_comparison import render_comparison

BINARY = {"ne": 0.9, "logloss": 0.5, "calibration": 1.0, "label_rate": 0.2, "auc": 0.7, "num_samples": 1000}
NUMBER = {"mse": 0.8, "mae": 0.7, "r2": 0.2, "num_samples": 900}
THREE = {"click": BINARY, "buy": {**BINARY, "ne": 0.95, "auc": 0.65}, "spend": NUMBER}


def make_run(folder: Path, main: str, labels: dict[str, dict[str, float]], model: str = "mmoe") -> Run:
    """Write the folder of a run with two evaluations, in which the metrics have the given values."""
    folder.mkdir(parents=True)
    config = {
        "model": {"kind": model},
        "data": {"path": str(folder / "no_data"), "columns": {"label": main}},
        "trainer": {"seed": 0, "log_every_steps": 10, "global_batch_size": 100},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    order = [main, *(name for name in labels if name != main)]
    measured = {(f"{name}/" if len(labels) > 1 else "") + key: x for name in order for key, x in labels[name].items()}
    lines = [
        {"kind": kind, "step": step, "time": float(step), **measured, "num_samples": 1000}
        for step in (10, 20)
        for kind in ("train", "validation")
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"step": 20}))
    return open_run(str(folder))


def test_the_list_has_a_line_for_each_label_and_ranks_runs_by_their_main_labels(tmp_path: Path) -> None:
    of_buy = make_run(tmp_path / "of_buy", "buy", THREE)
    of_spend = make_run(tmp_path / "of_spend", "spend", THREE)
    alone = make_run(tmp_path / "alone", "click", {"click": {**BINARY, "ne": 0.92}}, "dlrm")
    assert of_buy.labels == ["buy", "click", "spend"] and alone.labels == ["click"]
    header, *lines = as_text([of_buy, alone]).splitlines()
    assert header.split()[4:9] == ["split", "label", "ne", "auc", "mse"]
    assert lines[0].split()[5:9] == ["buy", "0.9500", "0.6500", "-"] and lines[3].split()[5] == "click"
    assert [line.split() for line in lines[1:3]] == [["click", "0.9000", "0.7000", "-"], ["spend", "-", "-", "0.8000"]]
    assert "label" not in as_text([alone]).splitlines()[0]
    assert [run.name for run in sorted_runs([of_buy, of_spend, alone], "ne")] == ["alone", "of_buy", "of_spend"]
    assert [run.name for run in sorted_runs([alone, of_buy], "click/ne")] == ["of_buy", "alone"]
    assert sum("spend: mse 0.8" in line for line in describe_run(of_buy)) == 2


def test_a_comparison_has_a_row_for_each_label_whatever_label_is_the_main_one(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "two", "click", {name: THREE[name] for name in ("click", "buy")}),
        make_run(tmp_path / "three", "buy", THREE, "ple"),
        make_run(tmp_path / "one", "buy", {"buy": {**BINARY, "ne": 0.91}}, "dlrm"),
    ]
    compared = compare(runs)
    means = {row.name: row.means for row in compared.metrics}
    assert means["buy/ne"] == [0.95, 0.95, 0.91] and means["click/ne"] == pytest.approx(
        [0.9, 0.9, float("nan")], nan_ok=True
    )
    assert "ne" not in means and "spend/mse" in means and "buy/num_samples" not in means
    page = render_comparison(compared)
    assert "buy: Validation NE" in page and "click: Training NE" in page
    alike = compare([runs[2], make_run(tmp_path / "other", "buy", {"buy": BINARY}, "fm")])
    assert "ne" in {row.name for row in alike.metrics}
    assert "<figcaption>Validation NE" in render_comparison(alike)


def test_the_best_possible_auc_is_of_the_label_that_is_asked_for() -> None:
    best = {"test": 0.8, "test/buy": 0.7}
    dataset = Dataset("shop", "click", [], [], {}, 0, 0, 0, "log1p", bayes_auc=best)
    assert [dataset.best_auc("test", label) for label in ("click", "buy", "spend")] == [0.8, 0.7, None]
