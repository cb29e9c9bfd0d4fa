"""Run folders are listed, compared, shown, tagged and removed from what lies in them alone."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.cli.command_line import load_config, read_arguments
from pipeline.extras.pages.charts import Line
from pipeline.extras.runs.cli import runs as verb
from pipeline.extras.runs.compare import compare
from pipeline.extras.runs.config import RunsJob
from pipeline.extras.runs.evaluation_stats import list_stats, read_stats, write_stats
from pipeline.extras.runs.folder import Run, find_runs, open_run
from pipeline.extras.runs.report_comparison import by_samples, render_comparison
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.storage.lease import RunFolderHeldError, take_lease
from tests.support.messages import mentions, names

Copy = Callable[..., Path]


def _say(*words: str) -> str:
    return verb.run(load_config(RunsJob, read_arguments(words, verb.COMMANDS, "list").overrides()))


@pytest.fixture
def copy(run_as_trained: Path, tmp_path: Path) -> Copy:
    """A copy of run_as_trained under another seed or rate, whose loss is `worse` times as high in each block."""

    def make(name: str, seed: int = 0, lr: float | None = None, worse: float = 1.0) -> Path:
        run = Path(
            shutil.copytree(run_as_trained, tmp_path / "runs" / name, ignore=shutil.ignore_patterns("checkpoints"))
        )
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["trainer"]["seed"] = seed
        config["optimizer"]["sparse"]["lr"] = lr or config["optimizer"]["sparse"]["lr"]
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        for path in list_stats(str(run)).values():
            stats = read_stats(path)
            draw = np.random.default_rng(seed).normal(worse, 0.01, len(stats.blocks.loss))
            loss = stats.blocks.loss * draw
            factor = loss.sum() / stats.blocks.loss.sum()
            metrics = {**stats.metrics, "ne": stats.metrics["ne"] * factor}
            write_stats(path, replace(stats, metrics=metrics, blocks=replace(stats.blocks, loss=loss)))
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            for line in lines:
                if line["kind"] == "validation" and line["step"] == stats.step:
                    line["ne"] = metrics["ne"]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    return make


def test_training_keeps_what_its_last_and_its_best_evaluation_saw(run_as_trained: Path) -> None:
    run = open_run(str(run_as_trained))
    assert ("validation", 30) in run.stats and len(run.stats) <= 2
    stats = read_stats(run.stats["validation", 30])
    step, metrics = run.metrics("validation")
    assert (step, run.state, run.seed) == (30, "finished", 0)
    assert stats.metrics == pytest.approx(metrics)
    blocks = stats.blocks
    assert blocks.rows.sum() == metrics["num_samples"] == 1024
    assert blocks.loss.sum() / blocks.rows.sum() == pytest.approx(metrics["logloss"], rel=1e-5)
    assert blocks.predictions.sum() / blocks.labels.sum() == pytest.approx(metrics["calibration"], rel=1e-5)
    assert sum(each.rows for each in stats.reliability) == 1024
    by_feature = {each.feature: 0 for each in stats.slices}
    for each in stats.slices:
        by_feature[each.feature] += each.rows
    assert len(by_feature) == 26 and max(by_feature.values()) == 1024


def test_a_run_says_when_where_and_by_which_code_it_was_started(run_as_trained: Path) -> None:
    run = open_run(str(run_as_trained))
    (start,) = run.starts
    assert (start.from_step, start.world_size) == (0, 2) and start.host and start.command
    assert 0 < run.seconds < 3600 and run.rank_hours == pytest.approx(2 * run.seconds / 3600)
    assert mentions(_say("show", str(run_as_trained)), "seed validation step 30 ne auc start cost rank-hours")


def test_a_planted_difference_is_called_and_one_between_seeds_is_not(copy: Copy) -> None:
    same = [open_run(str(copy(f"a{seed}", seed))) for seed in (1, 2)]
    worse = [open_run(str(copy(f"b{seed}", seed, lr=0.5, worse=1.1))) for seed in (3, 4)]
    comparison = compare([*same, *worse])
    assert [len(variant.runs) for variant in comparison.variants] == [2, 2]
    assert list(comparison.config) == ["optimizer.sparse.lr"]
    assert [variant.letter for variant, _, _ in comparison.ranking] == ["A", "B"]
    assert re.search(r"1   A +\S+ +baseline", comparison.as_text()) and "note" not in comparison.as_text()
    assert re.search(r"2   B +\S+ +0\.\d+ ± 0\.\d+ worse", comparison.as_text())
    (row,) = (row for row in comparison.as_rows() if row["metric"] == "ne" and row["variant"] == "B")
    assert row["is_called"] and row["seeds_known"] and row["difference"] > 0
    text = compare(same).as_text()
    assert "only in their seed" in text and " better" not in text and " worse" not in text
    text = compare([same[0], open_run(str(copy("c", 5, lr=0.1)))]).as_text()
    assert text.count("one seed of each") == 1


def test_a_comparison_ranks_the_runs_and_states_each_fact_once(copy: Copy) -> None:
    runs = [
        open_run(str(copy(f"r{number}", lr=0.1 * number, worse=worse)))
        for number, worse in ((1, 1.2), (2, 1.0), (3, 1.1))
    ]
    config = yaml.safe_load(Path(runs[2].path, "config.yaml").read_text())
    config["model"] |= {"kind": "fm", "rank": 7}
    config["trainer"]["global_batch_size"] = 512
    Path(runs[2].path, "config.yaml").write_text(yaml.safe_dump(config))
    comparison = compare([*runs[:2], open_run(runs[2].path)])
    assert [(each.letter, difference) for each, _, difference in comparison.ranking][2] == ("A", "baseline")
    assert [each.letter for each, _, _ in comparison.ranking] == ["B", "C", "A"]
    # the ranking has NE, and the differences of the log loss would repeat those of NE
    rows = comparison.metric_rows()
    assert "ne" not in [row[0] for row in rows]
    assert [row[0].strip()[:7] for row in rows if row[0] in ("logloss", "auc") or row[0].startswith(" ")].count(
        "against"
    ) == 2
    assert comparison.own_config()[-1].startswith("only C: ") and "model.rank=7" in comparison.own_config()[-1]
    assert "model.rank" not in comparison.shared_config()
    assert "data set: " in comparison.common_facts() and "data set" not in comparison.differing_facts()
    # curves: 30 steps of 256 samples end where 15 steps of 512 samples do
    lines = [by_samples(run, Line("", "", [(30.0, 0.5)])).points[0][0] for run in (runs[0], open_run(runs[2].path))]
    assert lines == [30 * 256, 30 * 512] and "samples</text>" in render_comparison(comparison)


def test_runs_over_other_rows_or_without_details_are_compared_without_intervals(copy: Copy) -> None:
    first, second = (open_run(str(copy(name, lr=lr))) for name, lr in (("a", 0.1), ("b", 0.2)))
    path = second.stats["validation", 30]
    stats = read_stats(path)
    write_stats(path, replace(stats, blocks=replace(stats.blocks, labels=stats.blocks.labels + 1)))
    assert "measured on other rows" in compare([first, second]).as_text()
    Path(path).unlink()
    second = open_run(second.path)
    text = compare([first, second]).as_text()
    assert "no intervals" in text and f"run={second.path} split=validation step=30" in text


def test_runs_are_listed_sorted_tagged_and_removed(copy: Copy, tmp_path: Path) -> None:
    good, bad = copy("good"), copy("bad", worse=1.2)
    (tmp_path / "runs" / "notes").mkdir()
    assert [run.path for run in find_runs(str(tmp_path))] == sorted([str(good), str(bad)])
    assert "tags: baseline, keep" in _say("tag", str(good), "baseline", "keep", "note='the first'")
    assert _say("tag", str(good), "tags=[-keep]").endswith("tags: baseline")
    lines = _say("list", str(tmp_path / "runs"), "sort=ne", f"output={tmp_path / 'runs.parquet'}").splitlines()
    assert [line.split()[0] for line in lines] == ["run", str(good), str(bad)]
    assert mentions(lines[0], "state step seed split ne auc rank-hours tags") and "baseline" in lines[1]
    table = pq.read_table(tmp_path / "runs.parquet").to_pylist()
    assert [row["note"] for row in table] == ["the first", ""]
    assert table[0]["validation.ne"] < table[1]["validation.ne"] and table[0]["config.optimizer.sparse.lr"]
    with pytest.raises(ConfigError, match=names("force=true")):
        _say("remove", str(good))
    lease = take_lease(str(bad), 60.0)
    assert open_run(str(bad)).state == "running"
    with pytest.raises(RunFolderHeldError):
        _say("remove", str(bad))
    lease.release()
    _say("remove", str(bad))
    _say("remove", str(good), "force=true")
    assert find_runs(str(tmp_path)) == []


def test_old_logs_and_damaged_checkpoints_are_cleaned_away(copy: Copy) -> None:
    run = copy("clean")
    aged, fresh, damaged = run / "logs" / "7_a_x", run / "logs" / "8_a_y", run / "checkpoints" / ".damaged-00000010-1"
    kept = run / "checkpoints" / "step_00000030"
    for folder in (aged, fresh, damaged, kept):
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text("text")
    os.utime(aged / "stderr.log", (0, 0))
    (run / "logs" / "rank_0.stderr.log").symlink_to("7_a_x/stderr.log")
    assert _say("clean", str(run)).splitlines() == [f"removed {aged}", f"1 removed from {run}"]
    assert {path.name for path in (run / "logs").iterdir()} == {"8_a_y"}
    lease = take_lease(str(run), 60.0)
    with pytest.raises(RunFolderHeldError):
        _say("clean", str(run), "keep_days=0")
    lease.release()
    assert damaged.exists()
    assert mentions(_say("clean", str(run), "keep_days=0"), f"{damaged} {fresh} 2 removed")
    assert kept.exists() and not damaged.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("compare", "runs/a"), "two runs"),
        (("show", "runs/absent"), "config.yaml"),
        (("tag", "runs/a"), "note="),
        (("list", "absent"), "not a folder"),
        (("compare", "a", "a", "output=x.csv"), ".parquet"),
    ],
)
def test_what_cannot_be_done_is_one_line(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _say(*words)


def test_a_saved_config_whose_aliases_stand_for_billions_of_values_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 12)]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=names("aliases")):
        Run(str(tmp_path)).flat_config  # noqa: B018
