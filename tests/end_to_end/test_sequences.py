"""Sequences from a generated file to served scores: two ranks, stopped and resumed, other ranks and shards, raw rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import SequenceFeature
from pipeline.data.prepare.run import prepare
from pipeline.data.read.value_index import index_values
from pipeline.serving.artifact.export import ExportSummary
from pipeline.serving.artifact.raw_schema import RawFeature, RawSchema
from pipeline.serving.scoring.predictor import Predictor
from pipeline.serving.scoring.raw_rows import RowEncoder
from pipeline.serving.scoring.scorer import ColumnLists, schema_of
from pipeline.training.evaluate import evaluate
from tests.serving.exports import assert_raw_rows_are_prepared_rows, raw_blocks, run_export
from tests.support.examples import examples
from tests.support.jobs import train_on_rank
from tests.support.ranks import RankPool
from tests.support.stored_tensors import step_tensors

NUM_ROWS = 4000
SMALL = [
    "data.generator.num_rows=4000",
    "data.generator.num_items=120",
    "data.generator.num_categories=8",
    "data.generator.max_length=6",
    "data.columns.sequence.history.max_length=5",
    "data.rows_per_row_group=128",
]
TRAIN = [
    "experiment=histories_din",
    "trainer.global_batch_size=256",
    "trainer.max_steps=6",
    "trainer.epochs=1",
    "trainer.evaluate_max_batches=1",
    "model.hidden_layer_sizes=[16]",
    "model.attention_layer_sizes=[8]",
    "checkpoint.save_every_steps=3",
]


def _evaluate(rank: int, run: str, *more: str) -> dict[str, float]:
    return evaluate(load_config(EvaluateJob, [f"run={run}", "split=validation", *more])).metrics


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """(raw file, overrides that name the prepared data)."""
    folder = tmp_path_factory.mktemp("histories")
    raw = str(folder / "histories.tsv")
    generate(load_config(GenerateJob, ["data=histories", *SMALL, f"output={raw}"]))
    named = [f"data.path={folder / 'prepared'}"]
    prepare(load_config(PrepareJob, ["data=histories", *SMALL, *named, f"source={raw}"]))
    return raw, named


@pytest.fixture(scope="module")
def run(ranks: RankPool, source: tuple[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on two ranks without a stop."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    ranks.run(2, train_on_rank, [*TRAIN, *SMALL, *source[1], f"run_dir={folder}"])
    return folder


@pytest.mark.campaign
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    ranks: RankPool, run: Path, source: tuple[str, list[str]], tmp_path: Path
) -> None:
    words = [*TRAIN, *SMALL, *source[1], f"run_dir={tmp_path / 'run'}"]
    ranks.run(2, train_on_rank, [*words, "trainer.max_steps=3"])
    shutil.copytree(tmp_path / "run", tmp_path / "moved")
    ranks.run(2, train_on_rank, words)
    resumed, uninterrupted = step_tensors(tmp_path / "run", 6), step_tensors(run, 6)
    assert resumed.keys() == uninterrupted.keys()
    assert any("dice.norm.running_mean" in key or "norm.running_mean" in key for key in resumed)
    assert all(torch.equal(resumed[key], uninterrupted[key]) for key in resumed)
    # The same step, on one rank and by other shards.
    other = [f"run_dir={tmp_path / 'moved'}", "tables.default.sharding.sharding_types=[column_wise]"]
    ranks.run(1, train_on_rank, [*TRAIN, *SMALL, *source[1], *other])
    moved = step_tensors(tmp_path / "moved", 6)
    tables = [key for key in uninterrupted if key.startswith("model.") and key.endswith(".weight")]
    assert tables and all(torch.allclose(moved[key], uninterrupted[key], atol=1e-5) for key in tables)


@pytest.fixture(scope="module")
def artifact(run: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportSummary:
    return run_export(run, tmp_path_factory.mktemp("exported") / "artifact", "precision=fp32")


@pytest.mark.long
def test_an_artifact_scores_as_the_trainer_evaluates(ranks: RankPool, run: Path, artifact: ExportSummary) -> None:
    metrics = ranks.run(1, _evaluate, str(run))[0]
    served = artifact.parity["validation"]
    assert served["max_score_difference"] < 1e-6
    assert served["ne"] == pytest.approx(metrics["ne"], abs=1e-6)
    assert ranks.run(2, _evaluate, str(run))[0]["ne"] == pytest.approx(metrics["ne"], abs=1e-7)


def test_raw_rows_score_as_prepared_rows(run: Path, source: tuple[str, list[str]], artifact: ExportSummary) -> None:
    raw, named = source
    job = load_config(TrainJob, [*TRAIN, *SMALL, *named, f"run_dir={run}"])
    assert assert_raw_rows_are_prepared_rows(artifact.artifact, job, raw) == NUM_ROWS
    predictor, rows = Predictor.load(artifact.artifact), raw_blocks(job.data, raw).slice(0, 40)
    lists = {"history", "history_category", "history_dwell"}
    as_lists = [
        {
            key: (value or "").split("|") if key in lists and value else ([] if key in lists else value)
            for key, value in row.items()
        }
        for row in rows.drop_columns(["label"]).to_pylist()
    ]
    schema = schema_of(predictor.columns)
    served = ColumnLists(schema, [[row[name] for row in as_lists] for name in schema.names], len(as_lists))
    assert predictor.score(served).scores.tobytes() == predictor.score(rows).scores.tobytes()
    uneven = [list(column) for column in served.columns]
    uneven[schema.names.index("history_dwell")][3] = [*(uneven[schema.names.index("history_dwell")][3] or []), "1"]
    found = predictor.score(ColumnLists(schema, uneven, len(as_lists)))
    assert [row.line for row in found.bad_rows] == [4] and "history_dwell" in found.bad_rows[0].reason


@pytest.mark.campaign
@pytest.mark.parametrize(
    "words",
    [
        ["model.search=history_category", "model.num_positions=2"],
        ["experiment=histories_bst"],
        ["experiment=histories_dien"],
        ["experiment=histories_hstu"],
        ["experiment=histories_encoders"],
        ["tables.item_id.compression={kind: hash, ratio: 2}"],
        ["trainer.precision=bf16"],
    ],
    ids=["search", "bst", "dien", "hstu", "encoders", "hash", "bf16"],
)
def test_other_models_are_exported_and_serve_raw_rows_too(
    ranks: RankPool, source: tuple[str, list[str]], tmp_path: Path, words: list[str]
) -> None:
    raw, named = source
    kept = [word for word in TRAIN if "experiment" not in word and "attention_layer" not in word]
    first = [] if words[0].startswith("experiment") else ["experiment=histories_din"]
    overrides = [*first, *kept, *SMALL, *named, *words, f"run_dir={tmp_path / 'run'}"]
    ranks.run(2, train_on_rank, overrides)
    exported = run_export(tmp_path / "run", tmp_path / "artifact", "precision=fp32")
    limit = 5e-3 if "trainer.precision=bf16" in words else 1e-5  # the artifact's layers are fp32
    assert exported.parity["validation"]["max_score_difference"] < limit
    job = load_config(TrainJob, overrides)
    assert assert_raw_rows_are_prepared_rows(exported.artifact, job, raw) == NUM_ROWS


def _encoder() -> RowEncoder:
    names = ["item", *(f"v{number}" for number in range(9))]
    indexed = index_values([(1, names)])
    features = [
        RawFeature("item", 11, False),
        RawFeature("history", 11, True, sequence=SequenceFeature(3, "last", None, "item")),
        RawFeature("first", 11, True, sequence=SequenceFeature(2, "first")),
        RawFeature("beside", 50, True, hash_size=50, sequence=SequenceFeature(3, "last", "history")),
    ]
    schema = RawSchema([], features, "none", "|")
    return RowEncoder(schema, dict.fromkeys(["item", "history", "first"], indexed))


VALUES = st.one_of(st.none(), st.sampled_from(["v1", "v2", "v8", "", "new"]))
LISTS = st.one_of(st.none(), st.lists(VALUES, max_size=6))


@examples(200)
@given(st.lists(st.tuples(VALUES, LISTS, LISTS, st.booleans(), st.randoms()), min_size=1, max_size=6))
def test_few_rows_and_whole_tables_are_encoded_alike(rows: list[Any]) -> None:
    encoder, columns = _encoder(), {"item": [], "history": [], "first": [], "beside": []}
    for item, history, first, is_even, draw in rows:
        length = len(history or ()) + (0 if is_even else draw.randint(0, 1))
        beside = [draw.choice(["x", "y", None]) for _ in range(length)]
        for name, value in zip(columns, (item, history, first, beside), strict=True):
            columns[name].append(value)
    schema = schema_of(encoder.layout.columns)
    table = pa.table([pa.array(columns[name], schema.field(name).type) for name in schema.names], schema=schema)
    whole = encoder.encode_as_prepare(table)
    few = encoder.encode(ColumnLists(schema, [columns[name] for name in schema.names], len(rows)))
    for part in ("values", "offsets"):
        assert getattr(whole, part).tolist() == getattr(few, part).tolist()
    assert whole.kept.tolist() == few.kept.tolist()
    assert [row.line for row in whole.bad_rows] == [row.line for row in few.bad_rows]
    wanted = [
        number for number, each in enumerate(columns["history"]) if len(each or ()) == len(columns["beside"][number])
    ]
    assert whole.kept.tolist() == wanted
    lengths = whole.offsets.diff().view(4, -1)
    assert lengths[1].tolist() == [min(3, len(columns["history"][number] or ())) for number in wanted]
