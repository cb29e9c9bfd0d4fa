"""Planted noise is left out, and the run is trained again without it, from the same files, on any number of ranks."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli.command_line import load_config, validate_train
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import load_saved_job
from pipeline.data.dataset import load_dataset
from pipeline.data.prepare.run import prepare
from pipeline.extras.runs.folder import open_run
from pipeline.extras.select_features.cli.select_features import SelectFeaturesJob
from pipeline.extras.select_features.selection import choose, select_features
from pipeline.runtime.errors import ConfigError, UserError
from tests.support.jobs import train_on_rank
from tests.support.messages import mentions, names
from tests.support.ranks import RankPool

NUM_ROWS = 4000


def select_on_rank(rank: int, words: list[str]) -> str:
    try:
        return select_features(load_config(SelectFeaturesJob, words))
    except UserError as error:
        return f"error: {error}"


@pytest.fixture(scope="module")
def run(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("select")
    draw = np.random.default_rng(0)
    effects = draw.normal(0, 1.5, (2, 12))
    lines = ["click,worth,price,dice,user,item,coin"]
    for user, item in draw.integers(0, 12, (NUM_ROWS, 2)):
        price = draw.random()
        click = int(draw.random() < 1 / (1 + math.exp(4 - effects[0, user] - effects[1, item] - 6 * price)))
        noise = draw.random(), draw.integers(0, 12)
        lines.append(f"{click},{1 + draw.random():.2f},{price:.3f},{noise[0]:.3f},u{user},i{item},c{noise[1]}")
    (folder / "rows.csv").write_text("\n".join([*lines, ""]))
    data = [
        "data=default", "data.name=select", "data.format=csv", "data.columns.label=click", "data.columns.weight=worth",
        "data.columns.dense=[price,dice]", "data.columns.sparse=[user,item,coin]", f"data.path={folder}/ds",
        "data.split={kind: random, validation_fraction: 0.25, test_fraction: 0.25}", "data.dense_transforms={dice: none}",
    ]  # fmt: skip
    prepare(load_config(PrepareJob, [*data, f"source={folder}/rows.csv", "threads=1"]))
    job = [
        *data, "model=logistic_regression", "name=select", f"run_dir={folder}/run", "hardware=cpu", "trainer.global_batch_size=64",
        "trainer.epochs=2", "tables.default.embedding_dim=4", "optimizer.sparse.lr=0.3", "optimizer.dense.lr=0.3", "logger.tensorboard=false",
        "tables.coin.embedding_dim=4",
    ]  # fmt: skip
    ranks.run(1, train_on_rank, job)
    return folder / "run"


@pytest.mark.long
def test_noise_is_left_out_and_the_rest_is_trained_again(ranks: RankPool, run: Path) -> None:
    words = [f"run={run}", "drop=2", "rows=1000"]
    text, _ = ranks.run(2, select_on_rank, words)
    print(text)
    folder = Path(f"{run}_selected")
    selected, trained = (open_run(str(path)) for path in (folder / "selected_seed_0", run))
    assert {line.split()[0] for line in text.splitlines() if line.endswith("left out")} == {"dice", "coin"}
    assert selected.summary and "coin" not in selected.flat_config["data.columns.sparse"]
    aucs = [each.metrics("test")[1]["auc"] for each in (trained, selected)]
    assert aucs[1] > aucs[0] - 0.005 and mentions(text, f"{aucs[1]:.5g} {aucs[0]:.5g} against A")

    whole, part = (load_dataset(str(path)) for path in (run.parent / "ds", folder / "data"))
    assert part.sparse_feature_names == ["user", "item"] and part.dense_features == ["price"]
    for file in part.splits["train"].files:
        assert os.path.samefile(run.parent / "ds" / file.path, folder / "data" / file.path)
    job = load_config(TrainJob, [f"from={folder}/selected_seed_0", f"run_dir={folder}/again"])
    validate_train(job)
    saved = load_saved_job(TrainJob, str(folder / "selected_seed_0/config.yaml")).data
    again = PrepareJob(data=saved, source=str(run.parent / "rows.csv"), threads=1)
    again.data.path = str(folder / "prepared")
    prepare(again)
    assert load_dataset(again.data.path).schema_hash() == part.schema_hash() != whole.schema_hash()

    steps = sorted((folder / "selected_seed_0").glob("checkpoints/*"))
    assert ranks.run(1, select_on_rank, words)[0] == text  # nothing is measured or trained again
    assert sorted((folder / "selected_seed_0").glob("checkpoints/*")) == steps
    (error,) = ranks.run(1, select_on_rank, [*words, "drop=1"])
    assert mentions(error, f"error: {folder}/selection.json 'drop': 2 run_dir")


def _importance(**features: tuple[float, float]) -> dict:
    return {"features": {name: {"ne_increase": rise, "error": error} for name, (rise, error) in features.items()}}


def test_a_feature_counts_by_the_label_that_needs_it_most() -> None:
    click = _importance(a=(0.1, 0.01), b=(-0.001, 0.002), c=(0.0, 0.0))
    order = _importance(a=(0.0, 0.01), b=(0.2, 0.002), c=(0.001, 0.002))
    alone, both = choose(click, None, set()), choose({**click, "others": {"order": order}}, None, set())
    assert [name for name, entry in alone.items() if entry["dropped"]] == ["b", "c"]
    assert [(name, entry["dropped"]) for name, entry in both.items()] == [("c", True), ("a", False), ("b", False)]
    needed = choose(click, None, {"b"})
    assert (needed["b"]["dropped"], needed["b"]["note"]) == (False, "needed by the model")


@pytest.mark.parametrize(
    ("drop", "needed", "named"),
    [(3, {"a"}, "drop=3 2 of the 3"), (3, set(), "all 3"), (None, {"b", "c"}, "drop=<how many>")],
)
def test_a_choice_that_leaves_nothing_is_refused(drop: int | None, needed: set[str], named: str) -> None:
    with pytest.raises(ConfigError, match=names(named)):
        choose(_importance(a=(0.1, 0.01), b=(-0.001, 0.002), c=(0.0, 0.0)), drop, needed)
