"""Runs of several labels: each label is shown by its name, and a main label's metric is never another label's."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import yaml

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import Dataset, Label
from pipeline.extras.diagnose.rules import find_problems
from pipeline.extras.runs.compare import compare
from pipeline.extras.runs.evaluation_stats import Bin, Blocks, EvaluationStats, Slice, read_stats, write_stats
from pipeline.extras.runs.folder import Run, open_run
from pipeline.extras.runs.listing import as_text, describe_run, sorted_runs
from pipeline.extras.runs.report import render_report
from pipeline.extras.runs.report_comparison import render_comparison
from pipeline.training.summary import describe, summarize
from tests.support.browser import open_pages

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


def test_a_page_shows_each_label_and_never_takes_one_label_for_another(tmp_path: Path) -> None:
    page = render_report(make_run(tmp_path / "run", "spend", {**THREE, "buy": {**BINARY, "calibration": 1.3}}))
    assert re.findall(r"<h3>(.*?)</h3>", page) == 2 * ["spend", "click", "buy"]  # charts, evaluations
    quality = page.partition("<h3>spend</h3>")[2].partition("<h3>")[0]
    assert "Mean squared error" in quality and "AUC" not in quality and ">NE<" not in quality
    for text in (
        "Labels: spend (the main label), click, buy",
        "buy: AUC on the validation",
        "Predictions of buy are 30% too high",
    ):
        assert text in page
    assert "click/ne" not in page and 'aria-label="evaluations of buy"' in page
    alone = render_report(make_run(tmp_path / "alone", "click", {"click": BINARY}))
    assert "<h3>" not in alone and 'aria-label="evaluations"' in alone and "<span>NE on the" in alone


@pytest.mark.campaign
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_of_three_labels_fit_the_screen(tmp_path: Path, width: int) -> None:
    runs = [make_run(tmp_path / name, name, THREE) for name in THREE]
    pages = [render_report(runs[0]), render_report(runs[2]), render_comparison(compare(runs))]
    for seen in open_pages(pages, tmp_path, width):
        assert seen.violations == [] and seen.content <= seen.width == width


def test_a_fault_of_one_label_is_diagnosed_by_its_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "click", {**THREE, "buy": {**BINARY, "calibration": 2.0}})
    (problem,) = find_problems(run)
    assert problem.text.startswith("buy: predictions are too high") and "2.000" in problem.text
    every = {name: {**BINARY, "calibration": 2.0} for name in ("click", "buy")}
    (problem,) = find_problems(make_run(tmp_path / "every", "click", every))
    assert problem.text.startswith("predictions are too high")


def test_statistics_of_each_label_come_back_from_one_file(tmp_path: Path) -> None:
    ones = np.ones(4)
    blocks = Blocks(ones, ones, ones, ones, ones, ones)
    metrics = {"spend/mse": 1.0, "click/auc": 0.7, "buy/auc": 0.6}
    made = [
        EvaluationStats("test", 1, "data", metrics, blocks, [Bin(4, 0.2, 0.3)], label=name) for name in ("click", "buy")
    ]
    buy = replace(made[1], blocks=replace(blocks, loss=2 * ones), slices=[Slice("item", 3, 4, 4.0, 4.0, 1.0, 1.0, 2.0)])
    write_stats(str(tmp_path / "stats.parquet"), replace(made[0], others=(buy,)))
    read = read_stats(str(tmp_path / "stats.parquet"))
    found = {label: read.of_label(label) for label in ("click", "buy", "spend")}
    assert found["spend"] is None and found["click"] is read and read.auc == 0.7
    assert found["buy"] is not None and found["buy"].auc == 0.6 and found["buy"].blocks.loss.tolist() == [2.0] * 4
    assert found["buy"].slices == buy.slices and found["buy"].reliability == buy.reliability


def test_a_sweep_and_the_best_step_go_by_the_main_label() -> None:
    words = ["experiment=conversions_mmoe", "data.columns.label=conversion"]
    job = load_config(TrainJob, words)
    assert [job.full_name(metric) for metric in (None, "auc", "click/auc")] == [
        "conversion/ne",
        "conversion/auc",
        "click/auc",
    ]
    assert job.best_metric == job.early_stop_metric == "conversion/ne"


def test_the_last_lines_of_train_give_the_limit_of_the_main_label_and_name_labels_not_learnt(tmp_path: Path) -> None:
    best = {"validation": 0.8, "validation/conversion": 0.7}
    labels = [Label("click"), Label("conversion", mask="click")]
    dataset = Dataset("conversions", "click", [], [], {}, 0, 0, 0, "log1p", bayes_auc=best, labels=labels)
    words = ["data=conversions", "data.columns.label=conversion", f"run_dir={tmp_path}"]
    measured = {"click/auc": 0.65, "click/ne": 0.9, "click/calibration": 1.0}
    result = SimpleNamespace(step=9, stopped_early=False, throughput={}, num_bad_rows=0, metrics={})
    for model, metrics in (("dlrm", {"auc": 0.6, "ne": 0.9, "calibration": 1.0}), ("mmoe", {})):
        result.metrics = metrics or {f"conversion/{key[6:]}": value for key, value in measured.items()} | measured
        job = load_config(TrainJob, [*words, f"model={model}"])
        text = describe(
            summarize(job, cast(Any, SimpleNamespace(folder=str(tmp_path))), cast(Any, result), dataset, {})
        )
        assert "of 0.7000, the best" in text and "of 0.8" not in text
        assert ("conversion only; the model does not learn click" in text) == (model == "dlrm")
        assert ("\n            click: AUC 0.6500, NE" in text) == (model == "mmoe")


def test_variants_of_a_comparison_have_different_lines(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(number), "click", {"click": BINARY}, f"m{number}") for number in range(9)]
    page = render_comparison(compare(runs))
    lines = re.findall(r'<path class="line" style="stroke:var\((.*?)\)" stroke-dasharray="(.*?)"', page)
    assert len(lines) == len(set(lines)) == 9
    for colour, dash in lines:
        drawn = f'style="stroke:var({colour})"' + (f' stroke-dasharray="{dash}"' if dash != "none" else "")
        assert f'<polyline class="line" {drawn} points=' in page
