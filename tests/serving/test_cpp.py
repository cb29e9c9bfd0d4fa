"""examples/cpp/score.cpp scores raw rows from an artifact as Python does."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.prepare.run import prepare
from pipeline.serving.artifact.manifest import read_manifest
from pipeline.serving.scoring.predictor import Predictor
from tests.docs.pages import REPOSITORY
from tests.serving.exports import run_export
from tests.serving.test_artifacts_served import raw_rows
from tests.support.jobs import train_on_rank
from tests.support.ranks import RankPool

NUM_ROWS, LIMIT = 10_000, 1e-4  # the limit of ONNX files too
LIMITS = [
    "parity.max_rows=500",
    "parity.max_ne_increase=9",
    "parity.max_auc_decrease=1",
    "parity.max_score_difference=1",
]
pytestmark = pytest.mark.campaign


def test_the_program_has_at_most_300_lines() -> None:
    assert len((REPOSITORY / "examples/cpp/score.cpp").read_text().splitlines()) <= 300


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cmake") is None or shutil.which("g++") is None:
        pytest.skip("cmake and g++ build the program")
    folder = tmp_path_factory.mktemp("cpp")
    source, python = REPOSITORY / "examples" / "cpp", f"-DPython3_EXECUTABLE={sys.executable}"
    for command in (["cmake", "-S", source, "-B", folder, python], ["cmake", "--build", folder]):
        subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / "score"


def _difference(program: Path, artifact: str, rows: pa.Table, folder: Path) -> float:
    """The largest difference between the program's scores and Python's."""
    pq.write_table(rows, folder / "rows.parquet", row_group_size=3000)
    words = [program, artifact, folder / "rows.parquet", folder / "scores.csv"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with (folder / "scores.csv").open(newline="") as file:
        names, *lines = csv.reader(file)
    wanted = Predictor.load(artifact).score(rows).scores.reshape(rows.num_rows, -1)
    assert names == ([task.name for task in read_manifest(artifact).tasks] or ["score"])
    found = np.array(lines, np.float64)
    assert found.shape == wanted.shape and wanted.std(axis=0).min() > 1e-3
    difference = float(np.abs(found - wanted).max())
    print(f"{rows.num_rows:,} rows, {found.shape[1]} score(s) each: at most {difference:.3g} from Python's")
    return difference


def test_a_pruned_artifact_scores_ten_thousand_rows_as_python(
    program: Path, small_run: Path, prepared_clicks: str, tmp_path: Path
) -> None:
    words = [
        "compiled=true",
        "precision=int4",
        "tables.cat_0=fp32",
        "tables.cat_1=fp16",
        "tables.cat_2=int8",
        "tables.cat_3=int2",
    ]
    summary = run_export(
        small_run, tmp_path / "artifact", *words, "pruning.kind=frequency", "pruning.fraction=0.5", *LIMITS
    )
    tables = read_manifest(summary.artifact).tables
    assert {table.precision for table in tables} == {"fp32", "fp16", "int8", "int4", "int2"} and any(
        table.kept for table in tables
    )
    rows = raw_rows(Path(prepared_clicks).parent / "clicks.tsv", NUM_ROWS)
    assert _difference(program, summary.artifact, rows, tmp_path) < LIMIT
    refused = subprocess.run(
        [program, tmp_path, tmp_path / "rows.parquet", tmp_path / "x.csv"], capture_output=True, text=True
    )
    assert refused.returncode == 2 and "manifest.json" in refused.stderr
    table = tmp_path / "artifact" / "tables" / "00003.rows"
    table.write_bytes(table.read_bytes()[:-1] + b"\xff")
    refused = subprocess.run(
        [program, summary.artifact, tmp_path / "rows.parquet", tmp_path / "x.csv"], capture_output=True, text=True
    )
    assert refused.returncode == 2 and "00003.rows is damaged" in refused.stderr


def _mixed_rows() -> pa.Table:
    """Columns of every kind that the program reads, with missing values and texts beyond ASCII."""
    draw = np.random.default_rng(5)
    cities = np.array(["Zürich", "東京", "Paris", "none", "", "😀 park"], object)
    tags = [[f"t{tag}" for tag in draw.integers(0, 40, draw.integers(0, 5))] for _ in range(NUM_ROWS)]
    words = [
        [f"w{word}:{draw.random():.3f}" for word in draw.integers(0, 30, draw.integers(0, 4))] for _ in range(NUM_ROWS)
    ]
    price = draw.lognormal(1, 2, NUM_ROWS)
    logits = np.array([len(each) - 2 for each in tags]) + 0.3 * np.log(price)
    return pa.table({
        "label": (draw.random(NUM_ROWS) < 1 / (1 + np.exp(-logits))).astype(np.int64),
        "seconds": draw.gamma(2.0, 3.0, NUM_ROWS) + np.maximum(logits, 0),
        "price": pa.array(price, mask=draw.random(NUM_ROWS) < 0.1),
        "agé \"1\"": draw.integers(-20, 90, NUM_ROWS),
        "city": pa.array(cities[draw.integers(0, len(cities), NUM_ROWS)], mask=draw.random(NUM_ROWS) < 0.1),
        "item": draw.integers(0, 3000, NUM_ROWS),
        "tags": pa.array(tags, mask=draw.random(NUM_ROWS) < 0.1),
        "words": ["|".join(each) for each in words],
    })  # fmt: skip


def test_lists_weights_hashes_and_several_labels_are_scored_as_python(
    program: Path, ranks: RankPool, tmp_path: Path
) -> None:
    rows = _mixed_rows()
    pq.write_table(rows.slice(0, 6000), tmp_path / "rows.parquet")
    data = {
        "defaults": ["default", "_self_"], "name": "mixed", "format": "parquet", "path": str(tmp_path / "prepared"),
        "columns": {
            "dense": ["price", "agé \"1\""], "sparse": ["city", "item"], "multi_hot": ["tags", "words"], "weighted": ["words"],
            "null_values": ["none"], "list_separator": "|", "labels": {"label": {}, "seconds": {"kind": "regression"}},
        },
        "dense_transform": "signed_log1p", "dense_transforms": {"price": "standardize"},
        "feature_ids": {"item": {"kind": "hash", "hash_size": 500, "hash_seed": 7}},
    }  # fmt: skip
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mixed.yaml").write_text(yaml.safe_dump(data, allow_unicode=True))
    source = [f"--config-dir={tmp_path}", "data=mixed"]
    prepare(load_config(PrepareJob, [*source, f"source={tmp_path}/rows.parquet"]))
    words = [
        *source, "hardware=cpu", "model=mmoe", "tables.default.embedding_dim=8", "tables.tags.pooling=mean", "optimizer=adam",
        "optimizer.sparse.lr=0.05", "trainer.max_steps=15", "trainer.global_batch_size=256", "logger.report=false", f"run_dir={tmp_path}/run",
    ]  # fmt: skip
    ranks.run(1, train_on_rank, words)
    summary = run_export(
        tmp_path / "run", tmp_path / "artifact", "compiled=true", "tables.city=fp16", "tables.words=int4", *LIMITS
    )
    assert _difference(program, summary.artifact, rows, tmp_path) < LIMIT
