"""Several labels from raw rows to batches: their kinds, masks, weights and sampled negatives, and one label as it always was."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.cli.command_line import load_config
from pipeline.config.columns import ColumnsConfig, LabelConfig, NegativeSamplingConfig
from pipeline.config.data import DataConfig, ReaderConfig, SplitConfig
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import Dataset, load_dataset
from pipeline.data.prepare.run import prepare
from pipeline.data.read.reader import ShardReader
from pipeline.data.targets import Target, targets_of
from pipeline.runtime.errors import ConfigError, DataError
from tests.support.messages import mentions, names

NUM_ROWS = 400
LABELS = {
    "click": LabelConfig(),
    "order": LabelConfig(mask="click"),
    "stars": LabelConfig("ordinal", num_buckets=5),
    "seconds": LabelConfig("regression", weight=0.5, mask="click"),
}
COLUMNS = ColumnsConfig(labels=LABELS, weight="worth", sparse=["item"])


def raw_rows(num_rows: int = NUM_ROWS) -> list[dict[str, Any]]:
    """What is masked is missing where there was no click, in half of the rows; `item` is the row's number."""
    random, rows = np.random.default_rng(0), []
    for number in range(num_rows):
        click = int(random.random() < 0.3)
        masked = None if not click and number % 2 else 0
        rows.append(
            {
                "click": click,
                "order": int(random.random() < 0.5) if click else masked,
                "stars": int(random.integers(5)),
                "seconds": round(float(random.gamma(2.0)), 3) if click else masked,
                "worth": round(float(random.random()), 3),
                "item": f"i{number}",
            }
        )
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        lines = [",".join("" if value is None else str(value) for value in row.values()) for row in rows]
        path.write_text("\n".join([",".join(rows[0]), *lines]) + "\n")
    return str(path)


def run(folder: Path, source: str, columns: ColumnsConfig = COLUMNS, **settings: Any) -> Dataset:
    settings = {
        "format": "parquet" if source.endswith("parquet") else "csv",
        "split": SplitConfig(validation_fraction=0.25, test_fraction=0.0),
        "rows_per_row_group": 64,
        **settings,
    }
    data = DataConfig(name="small", path=str(folder), columns=columns, **settings)
    prepare(PrepareJob(data=data, source=source, threads=1))
    return load_dataset(str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    run(folder / "ds", write(folder / "rows.csv", raw_rows()))
    return folder


def read(
    folder: Path, targets: list[Target] | None, split: str = "train", drop_last: bool = False
) -> dict[str, torch.Tensor]:
    """Labels, weights and items of the rows that are present, in the order of the file."""
    dataset = load_dataset(str(folder))
    reader = ShardReader(
        str(folder),
        dataset,
        split,
        global_batch_size=50,
        rank=0,
        world_size=1,
        seed=0,
        drop_last=drop_last,
        config=ReaderConfig(num_streams=1, shuffle="none"),
        targets=targets,
    )
    parts: dict[str, list[torch.Tensor]] = {"labels": [], "weights": [], "items": []}
    for batch in reader.batches(0):
        parts["labels"].append(batch.labels[batch.is_present])
        parts["weights"].append(batch.sample_weights[batch.is_present])
        parts["items"].append(batch.sparse_features["item"].values())
    return {name: torch.cat(found) for name, found in parts.items()}


def test_batches_have_each_label_where_it_counts_weighed_as_the_column_says(folder: Path) -> None:
    rows, dataset = raw_rows()[: NUM_ROWS * 3 // 4], load_dataset(str(folder / "ds"))
    targets = targets_of(COLUMNS, dataset, learns_all=True)
    assert [target.name for target in targets] == ["click", "order", "stars", "seconds"]
    assert [target.width for target in targets] == [1, 1, 4, 1] and targets[3].weight == 0.5
    found = read(folder / "ds", targets)
    wanted = [[row["click"], row["order"] or 0, row["stars"], row["seconds"] or 0] for row in rows]
    assert torch.equal(found["labels"], torch.tensor(wanted, dtype=torch.float32))
    weights = [[row["worth"] * (1 if i in (0, 2) else row["click"]) for i in range(4)] for row in rows]
    torch.testing.assert_close(found["weights"], torch.tensor(weights), rtol=1e-6, atol=0)


def test_one_label_of_several_makes_batches_of_one(folder: Path) -> None:
    dataset = load_dataset(str(folder / "ds"))
    every = read(folder / "ds", targets_of(COLUMNS, dataset, learns_all=True))
    (target,) = targets_of(replace(COLUMNS, label="order"), dataset, learns_all=False)
    order = read(folder / "ds", [target])
    assert torch.equal(order["labels"], every["labels"][:, 1])
    assert torch.equal(order["weights"], every["weights"][:, 1])


def test_parquet_gives_the_same_shards_and_old_keys_the_same_description(folder: Path, tmp_path: Path) -> None:
    run(tmp_path / "ds", write(tmp_path / "rows.parquet", raw_rows()))
    mine, theirs = (path / "ds" / "train" / "00000.parquet" for path in (tmp_path, folder))
    assert pq.read_table(mine).equals(pq.read_table(theirs))
    alone = run(tmp_path / "one", str(folder / "rows.csv"), ColumnsConfig(label="click", sparse=["item"]))
    text = json.loads(alone.to_json())
    assert not {"labels", "weight_column", "negative_sampling"} & text.keys()
    assert text["recipe"]["columns"] == {
        "label": "click",
        "dense": [],
        "sparse": ["item"],
        "multi_hot": [],
        "timestamp": None,
        "list_separator": "|",
    }
    assert pq.read_schema(tmp_path / "one" / "train" / "00000.parquet").field("click").type == pa.int8()


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_values_that_are_no_label_are_quarantined(tmp_path: Path, suffix: str) -> None:
    bad = {
        "click": 2,
        "order": 0.5,
        "stars": 5,
        "seconds": math.nan if suffix == "parquet" else "fast",
        "worth": -1.0,
    }
    rows = raw_rows(40)
    for number, (name, value) in enumerate(bad.items()):
        rows[number] = {**rows[number], "click": 1, "order": 0, "seconds": 0.0, name: value}
    rows[5] = {**rows[5], "click": 1, "order": None}  # counts there, and is missing
    if suffix == "parquet":
        rows = [
            {name: value if name == "item" or value is None else float(value) for name, value in row.items()}
            for row in rows
        ]
    dataset = run(tmp_path / "ds", write(tmp_path / f"rows.{suffix}", rows), max_quarantined_fraction=0.5)
    lines = [json.loads(line) for line in (tmp_path / "ds" / "quarantine.jsonl").read_text().splitlines()]
    assert dataset.quarantined_rows == 6
    for line, word in zip(
        lines, ["click 1", "order 1", "stars 4", "seconds", "worth data.columns.weight", "order"], strict=True
    ):
        assert mentions(line["reason"], word)


def test_shards_that_lost_a_label_are_refused_with_the_row(folder: Path, tmp_path: Path) -> None:
    run(tmp_path / "ds", str(folder / "rows.csv"))
    path = tmp_path / "ds" / "train" / "00000.parquet"
    table, groups = pq.read_table(path), load_dataset(str(tmp_path / "ds")).splits["train"].files[0].row_groups
    stars = table["stars"].to_numpy().copy()
    stars[7] = 9
    spoilt = table.set_column(table.schema.get_field_index("stars"), table.schema.field("stars"), pa.array(stars))
    with pq.ParquetWriter(path, table.schema, write_page_checksum=True) as out:
        for start, size in zip(np.cumsum([0, *groups]), groups, strict=False):
            out.write_table(spoilt.slice(int(start), size))
    text = json.loads((tmp_path / "ds" / "dataset.json").read_text())
    text["splits"]["train"]["files"][0]["size_bytes"] = path.stat().st_size
    (tmp_path / "ds" / "dataset.json").write_text(json.dumps(text))
    with pytest.raises(DataError, match=names("row 7 'stars' 9 0 4")):
        read(tmp_path / "ds", None)


SAMPLING = NegativeSamplingConfig("click", keep=0.25, seed=3)


@pytest.fixture(scope="module")
def sampled(folder: Path) -> Path:
    run(folder / "sampled", str(folder / "rows.csv"), negative_sampling=SAMPLING)
    return folder / "sampled"


def test_negatives_are_left_out_of_the_training_rows_alone(folder: Path, sampled: Path) -> None:
    whole, kept = load_dataset(str(folder / "ds")), load_dataset(str(sampled))
    clicks = whole.splits["train"].num_positives
    negatives = kept.splits["train"].num_rows - clicks
    assert kept.splits["train"].num_positives == clicks and kept.splits["validation"].num_rows == 100
    assert 0.15 < negatives / (300 - clicks) < 0.35
    assert kept.negative_sampling == {"label": "click", "keep": 0.25, "dropped_rows": 300 - clicks - negatives}
    # Ids are those of what trains: each of these items has one row.
    assert kept.sparse_feature("item").cardinality == 1 + kept.splits["train"].num_rows
    again = run(folder / "again", str(folder / "rows.csv"), negative_sampling=replace(SAMPLING, seed=4))
    assert again.splits["train"].num_rows != kept.splits["train"].num_rows or again.splits != kept.splits


def test_a_sampled_label_trains_with_an_offset_and_others_with_weights(sampled: Path) -> None:
    dataset = load_dataset(str(sampled))
    targets = targets_of(replace(COLUMNS, weight=None), dataset, learns_all=True)
    assert [target.train_offset for target in targets] == pytest.approx([math.log(4), 0, 0, 0])
    trained = read(sampled, targets, drop_last=True)
    measured = read(sampled, targets)
    negative = measured["labels"][:, 0] == 0
    rows = len(trained["labels"])
    assert torch.equal(measured["weights"][:rows, 0], trained["weights"][:, 0] * (1 + 3 * negative[:rows]))
    assert torch.equal(measured["weights"][:rows, 1:], trained["weights"][:, 1:])
    stars = trained["weights"][:, 2] / trained["weights"][:, 0]
    assert torch.equal(stars.round(), 1.0 + 3.0 * negative[:rows])
    validation = read(sampled, targets, "validation")
    assert torch.equal(validation["weights"][:, 0], validation["weights"][:, 2])


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"click": LabelConfig(), "order": LabelConfig(mask="clik")}, "order.mask 'clik' 'click'"),
        ({"click": LabelConfig(mask="click")}, "click.mask"),
        ({"stars": LabelConfig("regression"), "order": LabelConfig(mask="stars")}, "order.mask regression"),
        ({"a": LabelConfig(), "b": LabelConfig(mask="a"), "c": LabelConfig(mask="b")}, "c.mask masked 'a'"),
    ],
)
def test_masks_are_binary_labels_that_all_rows_have(labels: dict[str, LabelConfig], words: str) -> None:
    with pytest.raises(ConfigError, match=names(words)):
        ColumnsConfig(labels=labels)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "ordinal"}, "num_buckets"),
        ({"num_buckets": 3}, "num_buckets=3 binary"),
        ({"kind": "ordnal"}, "ordinal"),
        ({"weight": 0.0}, "weight"),
        ({"kind": "ordinal", "num_buckets": 1}, "num_buckets 2"),
    ],
)
def test_a_label_that_cannot_be_is_refused_with_what_it_wants(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=names(words)):
        LabelConfig(**settings)


def test_labels_of_another_preparation_are_refused(folder: Path) -> None:
    dataset = load_dataset(str(folder / "ds"))
    other = replace(COLUMNS, labels={**LABELS, "stars": LabelConfig("ordinal", num_buckets=6)})
    with pytest.raises(DataError, match=names("labels.stars num_buckets=6 num_buckets=5 data.path")):
        targets_of(other, dataset, learns_all=True)
    with pytest.raises(DataError, match=names("data.columns.labels none click, order, stars, seconds")):
        targets_of(ColumnsConfig(), dataset, learns_all=True)
    with pytest.raises(DataError, match=names("data.columns.weight='price' 'worth'")):
        targets_of(ColumnsConfig(weight="price"), dataset, learns_all=False)
    with pytest.raises(DataError, match=names("data.columns.label='oder' 'order'")):
        targets_of(ColumnsConfig(label="oder"), dataset, learns_all=False)
    assert [target.name for target in targets_of(ColumnsConfig(), dataset, learns_all=False)] == ["click"]
    with pytest.raises(ConfigError, match=names("data.columns.label='clik' 'click'")):
        replace(COLUMNS, label="clik")
    with pytest.raises(ConfigError, match=names("negative_sampling.label='order' click")):
        DataConfig(
            name="x", path="y", format="csv", columns=COLUMNS, negative_sampling=NegativeSamplingConfig("order", 0.5)
        )


@pytest.mark.long
def test_metrics_to_go_by_are_named_by_label_the_main_one_first(tmp_path: Path) -> None:
    words = ["experiment=conversions_mmoe", f"run_dir={tmp_path}"]
    job = load_config(TrainJob, words)
    assert job.metrics[:3] == ("click/ne", "click/auc", "click/logloss") and "conversion/auc" in job.metrics
    assert load_config(TrainJob, [*words, "data.columns.label=conversion"]).early_stop_metric == "conversion/ne"
    with pytest.raises(ConfigError, match=names("checkpoint.best_metric model=mmoe click/ne")):
        load_config(TrainJob, [*words, "checkpoint.best_metric=nee"])
    alone = load_config(TrainJob, ["experiment=conversions_mmoe", "model=dlrm", f"run_dir={tmp_path}"])
    assert alone.metrics == ("ne", "auc", "logloss")
    retrain = [*words, "source=rows.tsv"]
    with pytest.raises(ConfigError, match=names("gate.held 'clicks' click conversion")):
        load_config(RetrainJob, [*retrain, "+gate.held.clicks=0.1"])
    with pytest.raises(ConfigError, match=names("gate.task='order' click")):
        load_config(RetrainJob, [*retrain, "gate.task=order"])
    assert load_config(RetrainJob, [*retrain, "gate.task=conversion", "+gate.held.click=0.01"]).gate.held == {
        "click": 0.01
    }
