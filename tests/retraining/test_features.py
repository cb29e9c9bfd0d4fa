"""A job may read other features and labels than its champion: each model reads its own columns of the same rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from pipeline.checkpoint.chains import open_tensors
from pipeline.checkpoint.steps import read_manifest
from pipeline.checkpoint.tables import inventory_of_step
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.data.dataset import load_dataset
from pipeline.data.quality import binary_entropy
from pipeline.retraining.find_artifact import find_artifact
from pipeline.retraining.ledger import PROMOTED, Ledger, describe_record
from pipeline.retraining.registry import Registry, Version
from pipeline.retraining.tick import retrain
from pipeline.runtime.errors import UserError
from pipeline.serving.scoring.predictor import Predictor
from tests.support.messages import mentions, names

ROWS = 1200
LOOSE = [
    "gate.calibration_min=0.1", "gate.calibration_max=10", "gate.ne_tolerance=1", "gate.max_ne=5", "gate.min_rows=100",
    "checks.min_history=14", "checks.repeated_share=null",
]  # fmt: skip


def write_day(source: Path, day: int, columns: str, bad: str = "") -> None:
    """Rows of clicks that follow from the columns a and x. `bad`: a column whose first cell cannot be read."""
    random = np.random.default_rng(day)
    a, b = random.integers(0, 20, ROWS), random.integers(0, 9, ROWS)
    x = random.normal(size=ROWS)
    click = (random.random(ROWS) < 1 / (1 + np.exp(-(a - 10) / 4 - x))).astype(int)
    cells = {"click": click, "buy": click & (b > 4), "x": x.round(3), "h": b * 2.0, "a": [f"a{i}" for i in a], "b": [f"b{i}" for i in b],
             "c": [f"c{i % 3}" for i in a]}  # fmt: skip
    folder = source / f"dt=2026-11-{day:02d}"
    folder.mkdir(parents=True)
    chosen = columns.split()
    lines = [",".join(map(str, row)) for row in zip(*(cells[name] for name in chosen), strict=True)]
    if bad:
        first = lines[0].split(",")
        first[chosen.index(bad)] = "what?"
        lines[0] = ",".join(first)
    (folder / "rows.csv").write_text("\n".join([",".join(chosen), *lines, ""]))
    (folder / "_SUCCESS").touch()


def feature_words(folder: Path, dense: str, sparse: str, *words: str) -> list[str]:
    return [
        "experiment=quickstart", "hardware=cpu", f"source={folder / 'source'}", f"run_dir={folder / 'work'}", f"registry.path={folder / 'registry'}",
        "data=open_bandit", "data.format=csv", "data.columns.label=click", f"data.columns.dense=[{dense}]", f"data.columns.sparse=[{sparse}]",
        "data.columns.multi_hot=[]", "data.split.kind=row_range", "data.columns.timestamp=null", "data.feature_ids={}", "data.ids.min_frequency=1", "model=deepfm",
        "model.hidden_layer_sizes=[8]", "model.batch_norm=false", "trainer.global_batch_size=128", "tables.default.embedding_dim=4",
        "data.rows_per_row_group=256", "threads=1", "windows.lateness_hours=0", "max_catchup=1", *LOOSE, *words,
    ]  # fmt: skip


def feature_job(folder: Path, dense: str, sparse: str, *words: str) -> RetrainJob:
    return load_config(RetrainJob, feature_words(folder, dense, sparse, *words))


def rows_of(version: Version) -> dict[str, dict[str, bytes]]:
    """table -> value -> the bits of its row."""
    dataset, tensors = load_dataset(version.data), open_tensors(version.checkpoint, read_manifest(version.checkpoint))
    found = {}
    for name, table in inventory_of_step(tensors).tables.items():
        rows = tensors.read(table.key, [0, 0], [table.rows, table.dim]).numpy()
        vocabulary = pq.read_table(Path(version.data) / str(dataset.sparse_feature(name).vocabulary)).to_pydict()
        found[name] = {
            value: rows[row].tobytes() for value, row in zip(vocabulary["value"], vocabulary["id"], strict=True)
        }
    return found


@pytest.mark.long
def test_features_are_added_and_removed_by_the_job_that_retrains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Column h and b come on day 3; c is gone on day 4, and a cell of h cannot be read there."""
    for day, columns in ((1, "click x a c"), (2, "click x a c"), (3, "click x h a b c"), (4, "click x h a b")):
        write_day(tmp_path / "source", day, columns, bad="h" if day == 4 else "")
    plain = ["gate.export.enabled=false", "data.max_quarantined_fraction=0.01"]
    (first,) = retrain(feature_job(tmp_path, "x", "a,c", *plain)).records
    assert first.state == PROMOTED and "changes" not in first.data
    with pytest.raises(UserError, match=names("dt=2026-11-02 'h' v000001 windows.first")):
        retrain(feature_job(tmp_path, "x,h", "a,b", *plain))
    frozen = ["windows.first=2026-11-03", "optimizer.sparse.lr=1e-30"]  # rows keep the champion's bits
    with caplog.at_level("INFO"):
        (second,) = retrain(feature_job(tmp_path, "x,h", "a,b", *plain, *frozen)).records
    assert second.state == PROMOTED and second.metrics["eval_rows"] == ROWS - 1, second.reasons
    assert second.data["changes"] == {"added": ["h", "b"], "removed": ["c"]}
    assert mentions(describe_record(second), "added h, b removed c")
    listed = next(text for text in caplog.messages if "reads other columns than v000001" in text)
    assert mentions(listed, "kept 2 features 21 initialized h (dense) b (categorical, 10 dropped c (categorical, 4")
    registry = Registry(str(tmp_path / "registry"))
    before, after = (rows_of(registry.version(name)) for name in ("v000001", "v000002"))
    assert after["a"] == before["a"] and len(after["a"]) == 20 and set(after) == {"a", "b"}


DAYS = [  # dense, sparse and label columns of the job; h, the table c and the label buy come and go twice
    ("x", "a,b", "click"), ("x,h", "a,b", "click"), ("x,h", "a,b,c", "click"), ("x,h", "a,b,c", "click,buy"), ("x", "a,b,c", "click,buy"),
    ("x", "a,b", "click,buy"), ("x", "a,b", "click"), ("x,h", "a,b,c", "click"), ("x,h", "a,b,c", "click,buy"), ("x", "a,b", "click"),
]  # fmt: skip


@pytest.mark.campaign
@pytest.mark.parametrize("world_size", [1, 2])
def test_features_a_table_and_a_label_come_and_go_twice_in_ten_days(tmp_path: Path, world_size: int) -> None:
    """A column stays in the source for one day after the job has removed it."""
    used = [set(",".join(columns).split(",")) for columns in DAYS]
    for day in range(1, 12):
        now, earlier = used[min(day, 10) - 1], used[max(day - 2, 0)]
        write_day(tmp_path / "source", day, " ".join(["click", *sorted((now | earlier) - {"click"})]))
    registry = Registry(str(tmp_path / "registry"))
    rows: dict[str, dict[str, dict[str, bytes]]] = {}
    for number, (dense, sparse, labels) in enumerate(DAYS, 1):
        settings = [
            "model=mmoe", "model.expert_layer_sizes=[8]", "optimizer.sparse.lr=1e-30", "gate.export.precision=fp32", "registry.keep=20",
            f"data.columns.labels={{{','.join(f'{name}: {{}}' for name in labels.split(','))}}}",
        ]  # fmt: skip
        of_deepfm = ("model=", "model.")
        plain = [word for word in feature_words(tmp_path, dense, sparse) if not word.startswith(of_deepfm)]
        parent = registry.champion()
        run_tick([*plain, *settings], world_size)
        champion, record = registry.champion(), next(Ledger(registry.path).newest())
        assert champion is not None
        before = parent.name if parent else ""
        assert (record.state, record.window) == (PROMOTED, f"dt=2026-11-{number:02d}"), record.reasons
        assert (record.version, record.parent) == (champion.name, before)
        changed = {name for names in record.data.get("changes", {}).values() for name in names}
        assert changed == (used[number - 1] ^ used[number - 2] if number > 1 else set())
        assert registry.verify(champion) == ("", champion.size_bytes)
        rows[champion.name] = rows_of(champion)
        assert rows[champion.name].keys() == set(sparse.split(","))
        for table in rows[champion.name].keys() & rows.get(before, {}).keys():
            assert rows[champion.name][table] == rows[before][table]
        ne = record.metrics["challenger_ne"]
        assert served_ne(registry, tmp_path, number + 1) == pytest.approx(ne, abs=1e-5)
        if number == 5 and parent is not None:  # the champion of other columns serves again, then this one
            registry.pin(before, "a drill")
            assert served_ne(registry, tmp_path, 5) == pytest.approx(
                parent.lineage["metrics"]["challenger_ne"], abs=1e-5
            )
            registry.pin(champion.name, "its end")
            registry.unpin()
    assert len(registry.names()) == 10 and rows["v000010"]["a"] == rows["v000001"]["a"]


def run_tick(words: list[str], world_size: int) -> None:
    if world_size == 1:
        retrain(load_config(RetrainJob, words))
        return
    agent = [sys.executable, "-m", "pipeline", "agent", "--nproc-per-node", str(world_size)]
    command = [*agent, "-m", "pipeline", "retrain", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr


def served_ne(registry: Registry, folder: Path, day: int) -> float:
    """NE of the artifact that `serve artifact=REGISTRY` loads, on a day's raw rows."""
    rows = csv.read_csv(folder / "source" / f"dt=2026-11-{day:02d}" / "rows.csv")
    predictor = Predictor.load(find_artifact(registry.path).path)
    scored = predictor.score(rows.select([name for name in rows.column_names if name not in ("click", "buy")]))
    p, labels = scored.scores.reshape(len(rows), -1)[:, 0].astype(float), rows["click"].to_numpy()
    logloss = -np.mean(labels * np.log(p) + (1 - labels) * np.log1p(-p))
    return float(logloss / binary_entropy(float(labels.mean())))
