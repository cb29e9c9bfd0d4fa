"""Several sequence encoders in one model: each reads its own sequence and target, and a label that needs two sequences is learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.prepare.run import prepare
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.extras.generate.kinds import HistoriesConfig
from pipeline.extras.models.sequence_encoders import SequenceEncodersConfig
from pipeline.runtime.errors import ConfigError
from tests.extras.models.histories import build_task, generate, tables_of
from tests.extras.models.planted_logs import train_on
from tests.serving.exports import assert_raw_rows_are_prepared_rows, run_export
from tests.support.messages import names
from tests.support.ranks import RankPool

SMALL = HistoriesConfig(num_rows=64, num_items=60, num_categories=7, max_length=5, num_dwells=3)
ITEMS = {"kind": "din", "sequences": ["history", "history_dwell"], "targets": ["item_id"], "attention_layer_sizes": [8]}
ORDER = {"kind": "hstu", "sequences": ["history_category"], "targets": ["category"], "attention_dim": 8}
NUM_ROWS, NUM_ITEMS, NUM_CATEGORIES = 24_000, 48, 12


def test_each_encoder_reads_its_own_sequence_and_target() -> None:
    """The logits are those of plain sums over the tables' rows, computed without the model's inputs."""
    found, config = generate(SMALL), SequenceEncodersConfig(encoders={"items": ITEMS, "order": ORDER})
    tables = tables_of(config, found.dataset())
    task, batch = build_task(config, tables).eval(), found.batch(slice(None))
    batch.sparse_features = IdSplitter(tables)(batch.sparse_features)
    model = task.model
    weights = {name.split(".")[-2]: each for name, each in task.named_parameters() if "embedding_bags" in name}
    rows, lengths = found.rows, torch.from_numpy(found.rows.lengths)
    mask = torch.arange(5) < lengths[:, None]
    items, categories, dwells = (
        torch.from_numpy(each) + 1 for each in (rows.items, found.categories[rows.items], rows.dwells)
    )
    target = torch.from_numpy(rows.targets)
    item, category = weights["item_id"][target + 1], weights["category"][torch.from_numpy(found.categories)[target] + 1]
    of_items = torch.cat([weights["item_id"][items], weights["history_dwell"][dwells]], dim=2)
    unit, order = (model.encoders.encoders[name] for name in ("items%", "order"))
    near = unit(item, of_items * mask.unsqueeze(2), mask)
    last = order(category, weights["category"][categories] * mask.unsqueeze(2), mask)
    wanted = model.layers(torch.cat([item, category, near, last], dim=1))
    assert model.encoders.others == ["item_id", "category"]
    torch.testing.assert_close(task(batch)[1].logits, wanted[:, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("encoders", "said"),
    [
        ({"a": {"sequences": ["history"]}}, "model.encoders.a.kind bst dien din hstu"),
        ({"a": {"kind": "hstv"}}, "model.encoders.a.kind 'hstu'"),
        ({"a": {"kind": "dlrm"}}, "model.encoders.a.kind=dlrm"),
        ({"a": ITEMS | {"dropout": 0.5}}, "model.encoders.a.dropout model.dropout"),
        ({"a": {"kind": "dien", "auxiliary_weight": 0.5}}, "model.encoders.a.auxiliary_weight model=dien"),
        ({"a": ITEMS | {"sequence": ["history"]}}, "model.encoders.a.sequence 'sequences'"),
        ({"a": ITEMS | {"num_positions": "many"}}, "model.encoders.a.num_positions many"),
        ({"a": ITEMS | {"targets": []}}, "model.encoders.a.targets 0 model.encoders.a.sequences 2"),
        ({"a": ITEMS, "b": ITEMS | {"num_positions": 3}}, "model.encoders.a model.encoders.b 'history' None 3"),
    ],
)
def test_bad_encoders_are_refused(encoders: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=names(said)):
        SequenceEncodersConfig(encoders=encoders)


def test_encoders_that_do_not_fit_the_data_are_refused() -> None:
    for encoders, said in (
        ({}, "model.encoders sequences targets"),
        ({"a": ITEMS, "b": ORDER | {"targets": ["hour"]}}, "model.encoders.b.targets 'hour'"),
        ({"a": ITEMS, "b": ORDER | {"targets": ["history"]}}, "model.encoders.b.targets 'history'"),
    ):
        config = SequenceEncodersConfig(encoders=encoders)
        with pytest.raises(ConfigError, match=names(said)):
            config.check_tables(tables_of(config, generate(SMALL).dataset()), 0)


def _write_rows(path: Path) -> float:
    """A click is likely if the target's category was viewed or the target was bought, but not if both or neither happened.
    Return the log loss of the true probabilities, as NE."""
    random = np.random.default_rng(0)
    lines, truths, labels = ["label,item,category,views,purchases"], [], []
    for _ in range(NUM_ROWS):
        views = random.choice(NUM_CATEGORIES, random.integers(0, 5), replace=False)
        purchases = random.choice(NUM_ITEMS, random.integers(0, 4), replace=False)
        item = random.integers(NUM_ITEMS)
        if len(purchases) and random.random() < 0.6:
            item = random.choice(purchases)
        viewed, bought = item % NUM_CATEGORIES in views, item in purchases
        truths.append(0.9 if viewed != bought else 0.1)
        labels.append(random.random() < truths[-1])
        cells = ["|".join(f"c{each}" for each in views), "|".join(f"i{each}" for each in purchases)]
        lines.append(f"{labels[-1]:d},i{item},c{item % NUM_CATEGORIES},{','.join(cells)}")
    path.write_text("\n".join([*lines, ""]))
    truth, label = np.array(truths), np.array(labels)
    rate = label.mean()
    return float(-np.where(label, np.log(truth), np.log(1 - truth)).mean() / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)))  # fmt: skip


@pytest.mark.long
def test_a_label_of_two_histories_is_learnt_by_two_encoders_and_not_by_one(ranks: RankPool, tmp_path: Path) -> None:
    best = _write_rows(tmp_path / "rows.csv")
    sequences = "{views: {max_length: 4, shares: category}, purchases: {max_length: 3, shares: item}}"
    data = ["data=default", "data.name=two", "data.format=csv", "data.columns.sparse=[item, category]", f"data.columns.sequence={sequences}",
            f"data.path={tmp_path}/ds", "data.rows_per_row_group=500"]  # fmt: skip
    prepare(load_config(PrepareJob, [*data, f"source={tmp_path}/rows.csv", "threads=1"]))
    job = [*data, "model=sequence_encoders", "model.hidden_layer_sizes=[32]", "tables.default.embedding_dim=8", "tables.default.init={kind: normal, scale: 0.3}",
           "trainer.global_batch_size=128",
           "trainer.epochs=6", "optimizer=adam", "optimizer.dense.lr=0.005", "optimizer.sparse.lr=0.02", "hardware=cpu", "checkpoint=at_end",
           "logger.report=false", "logger.tensorboard=false"]  # fmt: skip
    views = "views: {kind: hstu, sequences: [views], targets: [category], attention_dim: 16}"
    purchases = "purchases: {kind: din, sequences: [purchases], targets: [item], attention_layer_sizes: [16]}"
    found = {}
    for name, encoders, num_ranks in (("two", f"{views}, {purchases}", 2), ("one", views, 1), ("other", purchases, 1)):
        words = [*job, f"model.encoders={{{encoders}}}", f"run_dir={tmp_path}/{name}"]
        found[name] = train_on(ranks, num_ranks, words).validation["ne"]
    print("NE of the truth", best, found)
    assert found["two"] < best + 0.08 and min(found["one"], found["other"]) > best + 0.18
    exported = run_export(tmp_path / "two", tmp_path / "artifact", "precision=fp32")
    assert exported.parity["validation"]["max_score_difference"] < 1e-5
    saved = load_config(TrainJob, [*job, f"model.encoders={{{views}, {purchases}}}", f"run_dir={tmp_path}/two"])
    assert assert_raw_rows_are_prepared_rows(exported.artifact, saved, f"{tmp_path}/rows.csv") == NUM_ROWS
