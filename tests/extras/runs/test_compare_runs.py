"""Equal configs under other seeds are not called different, and two thousandths of NE are, on the quickstart's data."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.data.prepare.run import prepare
from pipeline.extras.runs.compare import Comparison, compare
from pipeline.extras.runs.evaluation_stats import read_stats, write_stats
from pipeline.extras.runs.folder import Run, open_run
from tests.support.jobs import train_on_rank
from tests.support.ranks import RankPool

NUM_SEEDS, NUM_PAIRS, PLANTED = 8, 40, 0.002


@pytest.fixture(scope="module")
def seeds(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("seeds")
    source, data = f"{folder}/quickstart.tsv", f"{folder}/data"
    generate(load_config(GenerateJob, ["data=quickstart", f"output={source}"]))
    prepare(load_config(PrepareJob, ["data=quickstart", f"source={source}", f"data.path={data}"]))
    for seed in range(NUM_SEEDS):
        ranks.run(
            1,
            train_on_rank,
            [
                "experiment=quickstart",
                "hardware=cpu",
                f"data.path={data}",
                f"run_dir={folder}/seed{seed}",
                f"trainer.seed={seed}",
                "logger=jsonl",
                "trainer.global_batch_size=1024",
            ],
        )
    return [folder / f"seed{seed}" for seed in range(NUM_SEEDS)]


def _other_variant(run: Path, folder: Path, planted: float) -> Run:
    """A copy under a config that changes nothing, so that it is another variant; `planted` is added to its NE."""
    made = Path(shutil.copytree(run, folder / run.name, ignore=shutil.ignore_patterns("checkpoints")))
    config = yaml.safe_load((made / "config.yaml").read_text())
    config["comms"]["timeout_s"] += 1
    (made / "config.yaml").write_text(yaml.safe_dump(config))
    copied = open_run(str(made))
    step, metrics = copied.metrics("validation")
    stats = read_stats(copied.stats["validation", step])
    blocks = replace(stats.blocks, loss=stats.blocks.loss * (1 + planted / metrics["ne"]))
    write_stats(copied.stats["validation", step], replace(stats, blocks=blocks))
    lines = (made / "metrics.jsonl").read_text().replace(f'"ne": {metrics["ne"]}', f'"ne": {metrics["ne"] + planted}')
    (made / "metrics.jsonl").write_text(lines)
    return open_run(str(made))


def _is_called(comparison: Comparison, how: str = "is_called") -> bool:
    (row,) = (row for row in comparison.as_rows() if row["metric"] == "ne" and row["variant"] == "B")
    return bool(row[how])


@pytest.mark.campaign
def test_a_a_pairs_are_called_in_5_percent_at_most_and_a_planted_difference_is_found(
    seeds: list[Path], tmp_path: Path
) -> None:
    runs = [open_run(str(seed)) for seed in seeds]
    same = [_other_variant(seed, tmp_path / "same", 0.0) for seed in seeds]
    worse = [_other_variant(seed, tmp_path / "worse", PLANTED) for seed in seeds]
    draw = np.random.default_rng(0)
    called, paired, unpaired, single, models = 0, 0, 0, 0, 0
    for _ in range(NUM_PAIRS):
        order = draw.permutation(NUM_SEEDS)
        a, b = order[:3], order[3:6]
        called += _is_called(compare([*(runs[i] for i in a), *(same[i] for i in b)]))
        paired += _is_called(compare([*(runs[i] for i in a), *(worse[i] for i in a)]))
        unpaired += _is_called(compare([*(runs[i] for i in a), *(worse[i] for i in b)]))
        alone = compare([runs[a[0]], same[b[0]]])
        single, models = single + _is_called(alone), models + _is_called(alone, "is_significant")
    nes = [run.metrics("validation")[1]["ne"] for run in runs]
    print(f"NE {np.mean(nes):.4f}, standard deviation between seeds {np.std(nes, ddof=1):.5f}")
    print(f"A/A, three seeds of each: {called} of {NUM_PAIRS} pairs called")
    print(
        f"{PLANTED} NE planted: {paired} of {NUM_PAIRS} called with the same three seeds, {unpaired} with other seeds"
    )
    print(f"A/A, one seed of each: {single} called; {models} pairs of models differ on these rows")
    assert called <= 0.05 * NUM_PAIRS and single == 0
    assert paired >= 0.95 * NUM_PAIRS
