"""Raw rows score as the rows that prepare made of them: the same dense values, ids and scores, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import load_dataset
from pipeline.data.prepare.run import prepare
from pipeline.runtime.errors import ServingError, UserError
from pipeline.serving.artifact.export import ExportSummary
from pipeline.serving.scoring.predictor import Predictor
from pipeline.serving.scoring.scorer import ColumnLists, schema_of
from tests.serving.exports import assert_raw_rows_are_prepared_rows, raw_blocks, run_export
from tests.support.jobs import train_on_rank
from tests.support.messages import mentions, names
from tests.support.ranks import RankPool

MIXED_CONF = """
name: mixed
format: csv
columns: {label: click, dense: [price, age], sparse: [colour, city], multi_hot: [tags]}
feature_ids: {city: {kind: hash, hash_size: 50, hash_seed: 7}, colour: {min_frequency: 3}}
rows_per_row_group: 128
"""
MADE = """
transforms:
  price_cut: {kind: clip, column: price, low: -5, high: 50}
  price_band: {kind: bucketise, column: price_cut, quantiles: 10}
  age_std: {kind: standardise, column: age}
  hue: {kind: lower, column: colour}
  hue_city: {kind: cross, columns: [hue, city]}
  parts: {kind: split, column: colour, separator: ","}
"""
TINY = ["hardware=cpu", "trainer.global_batch_size=64", "trainer.max_steps=3", "trainer.evaluate_max_batches=1"]


def _write_mixed(path: Path) -> None:
    draw = random.Random(0)
    lines = ["click,price,colour,city,tags,age,ignored"]
    for _ in range(3000):
        colour = draw.choice(["red", "green", "", "blue", f"rare{draw.randint(0, 400)}", '"a ""quoted"", one"', "Ünï"])
        tags = "|".join(draw.choices(["a", "b", "ccc", "", "dd", f"t{draw.randint(0, 30)}"], k=draw.randint(0, 4)))
        price = draw.choice(["", "nan", "3.25", "-7", "1e3", str(draw.random() * 100)])
        lines.append(f"{draw.randint(0, 1)},{price},{colour},c{draw.randint(0, 200)},{tags},{draw.randint(0, 90)},x")
    lines[500] = "2,1,red,c1,a,3,x"
    lines[2900] = "1,word,red,c1,a,3,x"
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def mixed(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, TrainJob, str]:
    """(artifact, its train job, raw file) of lists, hashed ids, mean pooling, missing values and bad rows."""
    return _mixed_artifact(ranks, tmp_path_factory.mktemp("mixed"), MIXED_CONF)


def _mixed_artifact(ranks: RankPool, folder: Path, described: str) -> tuple[str, TrainJob, str]:
    (folder / "conf" / "data").mkdir(parents=True)
    (folder / "conf" / "data" / "mixed.yaml").write_text(described)
    source = folder / "mixed.csv"
    _write_mixed(source)
    conf = ["--config-dir", str(folder / "conf"), "data=mixed", f"data.path={folder / 'prepared'}"]
    prepare(load_config(PrepareJob, [*conf, f"source={source}", "data.max_quarantined_fraction=0.01"]))
    overrides = [
        *conf, "name=mixed", f"run_dir={folder / 'run'}", "model=deepfm", "tables.default.embedding_dim=8",
        "tables.tags.pooling=mean", *TINY,
    ]  # fmt: skip
    ranks.run(1, train_on_rank, overrides)
    summary = run_export(folder / "run", folder / "artifact", "precision=int4", "tables.colour=fp32", "parity.max_ne_increase=1", "parity.max_auc_decrease=1")  # fmt: skip
    return summary.artifact, load_config(TrainJob, overrides), str(source)


@pytest.mark.long
def test_raw_rows_with_lists_hashes_missing_values_and_bad_rows_score_as_prepared(
    mixed: tuple[str, TrainJob, str],
) -> None:
    assert assert_raw_rows_are_prepared_rows(*mixed) == 2998


@pytest.mark.campaign
def test_raw_rows_score_as_prepared_where_columns_are_made_of_others(ranks: RankPool, tmp_path: Path) -> None:
    artifact, job, source = _mixed_artifact(ranks, tmp_path, MIXED_CONF + MADE)
    assert assert_raw_rows_are_prepared_rows(artifact, job, source) == 2998
    manifest = Predictor.load(artifact).manifest
    assert set(manifest.columns) == {"price", "age", "colour", "city", "tags"}
    assert {"price_cut", "price_band", "hue", "hue_city", "parts"} <= {
        each["column"] for each in manifest.schema.transforms
    }


def test_raw_criteo_rows_score_as_prepared(small_artifact: ExportSummary, prepared_clicks: str) -> None:
    job = load_config(TrainJob, ["experiment=quickstart", f"data.path={prepared_clicks}"])
    source = Path(prepared_clicks).parent / "clicks.tsv"
    assert assert_raw_rows_are_prepared_rows(small_artifact.artifact, job, str(source), splits=["test"]) == 3_000


@pytest.mark.parametrize(
    ("data", "pattern", "extra"),
    [
        pytest.param(
            "criteo_kaggle",
            "criteo_kaggle_head10k.txt",
            ["data.synthetic_multi_hot={cat_0: 3, cat_7: 2}"],
            marks=pytest.mark.campaign,
        ),
        pytest.param("criteo_1tb", "criteo_1tb_day*.tsv", [], marks=pytest.mark.campaign),
        pytest.param("open_bandit", "open_bandit_random_men.csv", [], marks=pytest.mark.campaign),
    ],
)
def test_raw_real_rows_score_as_prepared(
    ranks: RankPool, samples: Path, tmp_path: Path, data: str, pattern: str, extra: list[str]
) -> None:
    conf = [f"data={data}", f"data.path={tmp_path / 'prepared'}", "data.rows_per_row_group=256"]
    prepare(load_config(PrepareJob, [*conf, f"source={samples}/{pattern}"]))
    overrides = [
        *conf, *extra, "name=real", f"run_dir={tmp_path / 'run'}", "model=dlrm", "tables.default.embedding_dim=8",
        "model.dense_arch_layer_sizes=[16,8]", "model.over_arch_layer_sizes=[16,1]", *TINY,
    ]  # fmt: skip
    ranks.run(1, train_on_rank, overrides)
    artifact = run_export(tmp_path / "run", tmp_path / "artifact").artifact
    compared = assert_raw_rows_are_prepared_rows(artifact, load_config(TrainJob, overrides), f"{samples}/{pattern}")
    assert compared == load_dataset(str(tmp_path / "prepared")).accepted_rows > 1000


def test_rows_as_json_gives_them_score_as_rows_of_a_file(mixed: tuple[str, TrainJob, str]) -> None:
    artifact, job, source = mixed
    predictor, rows = Predictor.load(artifact), raw_blocks(job.data, source).slice(0, 50)
    wanted = predictor.score(rows).scores
    separator = job.data.columns.list_separator
    as_json = [
        {**row, "tags": None if row["tags"] is None else row["tags"].split(separator)}
        for row in rows.drop_columns(["click"]).to_pylist()
    ]
    assert predictor.score(pa.Table.from_pylist(as_json)).scores.tobytes() == wanted.tobytes()
    nothing = dict.fromkeys(predictor.manifest.columns)
    assert np.isfinite(predictor.score(pa.Table.from_pylist([nothing])).scores).all()
    assert (
        len(predictor.score(pa.Table.from_pylist(as_json[:0], schema=pa.Table.from_pylist(as_json).schema)).scores) == 0
    )


def test_bad_rows_get_no_score_and_a_reason_and_missing_columns_are_named(mixed: tuple[str, TrainJob, str]) -> None:
    predictor = Predictor.load(mixed[0])
    row = {"price": 1.0, "age": 30.0, "colour": "red", "city": "c1", "tags": ["a"]}
    scored = predictor.score(pa.Table.from_pylist([row, {**row, "price": 1e300}, row]))
    assert np.isnan(scored.scores).tolist() == [False, True, False] and scored.scores[0] == scored.scores[2]
    (bad,) = scored.bad_rows
    assert bad.line == 2 and mentions(bad.reason, "1e+300")
    with pytest.raises(ServingError, match=names("colour color")):
        predictor.score(pa.Table.from_pylist([{**{k: v for k, v in row.items() if k != "colour"}, "color": "red"}]))
    (bad,) = predictor.score(pa.Table.from_pylist([{**row, "price": "1"}, {**row, "price": "cheap"}])).bad_rows
    assert bad.line == 2 and mentions(bad.reason, "price 'cheap'")
    for column, value in (("price", [1.0]), ("colour", {"red": 1}), ("tags", [["a"]])):
        with pytest.raises(UserError):  # by the reader or the scorer
            predictor.score(pa.Table.from_pylist([{**row, column: value}]))


def test_rows_as_lists_are_encoded_as_rows_of_a_table(mixed: tuple[str, TrainJob, str]) -> None:
    """What JSON brings, a few rows at a time, by the short way; the table, whole, by prepare's."""
    artifact, job, source = mixed
    encoder, rows = Predictor.load(artifact).encoder, raw_blocks(job.data, source)
    wanted = encoder.encode_as_prepare(rows)
    lists = ColumnLists(
        schema_of(encoder.layout.columns),
        [
            [tags and tags.split(job.data.columns.list_separator) for tags in rows[name].to_pylist()]
            if name == "tags"
            else rows[name].to_pylist()
            for name in schema_of(encoder.layout.columns).names
        ],
        rows.num_rows,
    )
    for _ in range(2):  # what the first round looked up, the second one knows
        parts = [encoder.encode(lists.slice(begin, 50)) for begin in range(0, rows.num_rows, 50)]
        assert torch.cat([part.dense for part in parts]).numpy().tobytes() == wanted.dense.numpy().tobytes()
        num_features = len(encoder.schema.features)
        for feature in range(num_features):
            ids = []
            for part in parts:
                count = (len(part.offsets) - 1) // num_features
                ids.append(part.values[part.offsets[feature * count] : part.offsets[(feature + 1) * count]])
            ends = wanted.offsets[feature * rows.num_rows], wanted.offsets[(feature + 1) * rows.num_rows]
            assert torch.equal(torch.cat(ids), wanted.values[ends[0] : ends[1]])
    table = lists.slice(0, 100).to_table()
    assert torch.equal(encoder.encode(table).values, encoder.encode_as_prepare(table).values)
