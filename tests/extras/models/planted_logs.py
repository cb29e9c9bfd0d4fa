"""Logs with planted truths: lists of items whose clicks depend on the item and on its place in the list."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.prepare.run import prepare
from pipeline.training.summary import TrainSummary
from tests.support.jobs import evaluate_on_rank, train_on_rank
from tests.support.ranks import RankPool

NUM_LISTS, PLACES, NUM_ITEMS = 2000, 6, 12
ITEM_LOGITS = np.linspace(-2.0, 1.0, NUM_ITEMS)
PLACE_LOGITS = -0.5 * np.arange(PLACES)  # of clicks, because a place is seen less often
LABELS = "{click: {}, seconds: {kind: regression LOSS}, place: {kind: regression}, teacher: {kind: regression}}"


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def write_logs(path: Path) -> None:
    """Better items are shown in earlier places. `seconds` is log-normal around an item's median."""
    random = np.random.default_rng(0)
    lines = ["click,seconds,place,teacher,list,item"]
    for number in range(NUM_LISTS):
        items = random.choice(NUM_ITEMS, PLACES, replace=False)
        items = items[np.argsort(-(ITEM_LOGITS[items] + random.normal(0, 1.0, PLACES)))]
        clicks = random.random(PLACES) < sigmoid(ITEM_LOGITS[items] + PLACE_LOGITS)
        seconds = np.exp(1.0 + items / NUM_ITEMS + random.normal(0, 0.7, PLACES))
        for place, item in enumerate(items):
            teacher = sigmoid(ITEM_LOGITS[item] + PLACE_LOGITS[place])
            lines.append(f"{clicks[place]:d},{seconds[place]:.4f},{place},{teacher:.5f},{number + 1},{item}")
    path.write_text("\n".join([*lines, ""]))


def words(folder: Path, loss: str = "") -> list[str]:
    return [
        "data=default", "data.name=lists", "data.format=csv", f"data.columns.labels={LABELS.replace('LOSS', loss)}",
        "data.columns.sparse=[item]", f"data.path={folder}/ds", "data.group_column=list", "data.rows_per_row_group=1000",
    ]  # fmt: skip


def prepared(folder: Path) -> Path:
    write_logs(folder / "rows.csv")
    prepare(load_config(PrepareJob, [*words(folder), f"source={folder}/rows.csv", "threads=1"]))
    return folder


def job(folder: Path, run: Path, *more: str, loss: str = "") -> list[str]:
    """A training of one weight for each item."""
    return [
        *words(folder, loss), "model=logistic_regression", f"run_dir={run}", "hardware=cpu", "trainer.global_batch_size=384",
        "trainer.epochs=8", "tables.default.embedding_dim=4", "optimizer.dense.lr=0.05", "optimizer.sparse.lr=0.05", "data.reader.num_streams=4",
        "checkpoint=at_end", "logger.report=false", "logger.tensorboard=false", *more,
    ]  # fmt: skip


def measured(ranks: RankPool, run: Path) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
    """The metrics of the validation split, and its labels and scores [rows]."""
    found = ranks.run(1, evaluate_on_rank, [f"run={run}", "split=validation", f"predictions={run}/rows.parquet"])[0]
    table = pq.read_table(run / "rows.parquet")
    return found.metrics, table[1].to_numpy(), table[2].to_numpy()


def train_on(ranks: RankPool, num_ranks: int, overrides: list[str]) -> TrainSummary:
    return ranks.run(num_ranks, train_on_rank, overrides)[0]
