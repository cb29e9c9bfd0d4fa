"""A data set with rows of weight 2 gives the page, files and metrics of the one with each of these rows twice."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.dataset import load_dataset
from pipeline.data.prepare.run import describe, prepare
from pipeline.extras.runs.evaluation_stats import SUFFIX, read_stats
from pipeline.extras.runs.folder import open_run
from pipeline.extras.runs.report import render_report
from pipeline.retraining.statistics import measure
from tests.support.jobs import evaluate_on_rank, train_on_rank
from tests.support.ranks import RankPool

SPLITS = {"train": 1200, "validation": 500, "test": 400}
OTHER = {"split", "num_samples"}


def _write(folder: Path, repeats: bool) -> list[str]:
    """Rows of a positive have weight 2. Rows of training are never repeated, so both have the same vocabularies."""
    draw = np.random.default_rng(0)
    folder.mkdir()
    effects = draw.normal(0, 1.5, (2, 12))
    for name, count in SPLITS.items():
        lines = ["click,worth,price,user,item"]
        for user, item in draw.integers(0, [3, 12], (count, 2)):
            click = int(draw.random() < 1 / (1 + math.exp(1 - effects[0, user] - effects[1, item])))
            twice = repeats and click and name != "train"
            row = f"{click},{1 if twice else 1 + click},{item + draw.random():.3f},u{user},i{item}"
            lines += [row] * (2 if twice else 1)
        (folder / f"{name}.csv").write_text("\n".join([*lines, ""]))
    files = ",".join(f"{name}: {folder}/{name}.csv" for name in SPLITS)
    words = [
        "data=default", "data.name=weights", "data.format=csv", "data.columns.label=click", "data.columns.weight=worth",
        "data.columns.dense=[price]", "data.columns.sparse=[user,item]", "data.group_column=user", f"data.path={folder / 'ds'}",
        f"data.split={{kind: given, max_shared_fraction: 1.0, {files}}}",
    ]  # fmt: skip
    summary = prepare(load_config(PrepareJob, [*words, "threads=1"]))
    assert re.search(r"test +\d+ rows, weighted label rate 0\.\d{4}", describe(summary))
    return words


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of one trained run, evaluated on either data set, in files of equal names."""
    top = tmp_path_factory.mktemp("weights")
    words = _write(top / "weighted", False)
    _write(top / "repeated", True)
    job = [
        *words, "model=dlrm", "name=weights", "hardware=cpu", "trainer.global_batch_size=96", "trainer.max_steps=24", "trainer.epochs=9",
        "tables.default.embedding_dim=8", "checkpoint.save_every_steps=24", "trainer.evaluate_every_steps=24",
        "optimizer.sparse.lr=0.3",
    ]  # fmt: skip
    folders = top / "weighted" / "run", top / "repeated" / "run"
    ranks.run(1, train_on_rank, [*job, f"run_dir={folders[0]}"])
    for file in folders[0].glob("evaluation*"):
        file.unlink()
    shutil.copytree(*folders)
    for folder in folders:
        config = folder / "config.yaml"
        config.write_text(config.read_text().replace(str(top / "weighted" / "ds"), str(folder.parent / "ds")))
        for split in ("validation", "test"):
            words = [
                f"run={folder}",
                f"split={split}",
                "other_data=true",
                "metrics=[brier,ece]",
                "slices=[price,user*item]",
            ]
            ranks.run(1, evaluate_on_rank, words)
        for file in folder.glob("evaluation*"):
            file.rename(folder / re.sub(r"\.data_\w+", "", file.name))
    return folders


@pytest.mark.long
def test_metrics_and_statistics_are_those_of_repeated_rows(runs: tuple[Path, Path]) -> None:
    for split in ("validation", "test"):
        weighted, repeated = (json.loads((run / f"evaluation.{split}.step_24.json").read_text()) for run in runs)
        assert {"gauc", "ndcg_at_10", "auprc", "brier", "ece"} <= weighted.keys()
        assert repeated["num_samples"] > weighted["num_samples"] == SPLITS[split]
        for name in weighted.keys() - OTHER:
            assert weighted[name] == pytest.approx(repeated[name], rel=1e-5), name
        stats = [read_stats(str(run / f"evaluation.{split}.step_24{SUFFIX}")) for run in runs]
        assert [each.id for each in stats[0].slices] == [each.id for each in stats[1].slices]
        for mine, theirs in zip(stats[0].slices, stats[1].slices, strict=True):
            assert (mine.rows, mine.weight) <= (theirs.rows, theirs.weight + 1e-9)
            for name in ("label_rate", "mean_prediction", "calibration", "ne"):
                assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=1e-5, nan_ok=True)
        bins = [[(each.prediction, each.label_rate) for each in every.reliability] for every in stats]
        assert np.allclose(*bins, rtol=1e-5)


def _shown(run: Path) -> dict[str, Any]:
    """The page's sections that are about rows, without counts of rows, and numbers in standard deviations."""
    page = render_report(open_run(str(run)))
    sections = dict(re.findall(r"<h2>(.*?)</h2>(.*?)(?=<h2>)", page, re.DOTALL))
    wanted = ("Reliability", "Features", "Worst slices", "Slices of the test split", "Evaluations", "Data set")
    cells = {name: re.findall(r"<td[^>]*>([^<]*)</td>", sections[name]) for name in wanted}
    counts, deviations = re.compile(r"[\d,]+|\d+ \(\d+%\)"), re.compile(r"[+-]\d+\.\d")
    found: dict[str, Any] = {
        # an interval counts independent rows
        name: sorted(
            each
            for each, _, _ in (cell.partition(" ±") for cell in each_of)
            if not counts.fullmatch(each) and not deviations.fullmatch(each)
        )
        for name, each_of in cells.items()
    }
    return found | {"cards": re.search(r"<h1>.*?(?=<h2>)", page, re.DOTALL)}


@pytest.mark.long
def test_the_page_shows_the_same_numbers(runs: tuple[Path, Path]) -> None:
    weighted, repeated = (_shown(run) for run in runs)
    for name in weighted.keys() - {"cards"}:
        assert weighted[name] == repeated[name] and len(weighted[name]) > 2, name
    assert weighted["cards"] and "calibration" not in weighted["cards"][0]


def test_label_rates_and_drift_of_a_data_set_are_weighted(runs: tuple[Path, Path]) -> None:
    folders = [str(run.parent / "ds") for run in runs]
    splits = [load_dataset(folder).splits for folder in folders]
    for name in SPLITS:
        assert splits[0][name].label_rate == pytest.approx(splits[1][name].label_rate)
    train = splits[0]["train"]
    assert (
        measure(folders[0], load_dataset(folders[0]), None).label_rate
        == train.label_rate
        > train.num_positives / train.num_rows
    )
