"""Make a small registry with everything that may hold a user: raw rows, data set, chain of steps, artifact, delta, logs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.prepare.run import prepare
from pipeline.extras.publish.job import PublishJob
from pipeline.extras.publish.publish import publish
from pipeline.retraining.find_artifact import find_artifact
from pipeline.retraining.ledger import ADDED, Ledger, Record
from pipeline.retraining.promotion import Candidate, files_of_artifact, finished_run, promote
from pipeline.retraining.registry import Registry
from pipeline.runtime.storage.signature import requiring, signing
from pipeline.serving.artifact.export import export
from pipeline.training.train import train
from tests.runtime.test_signature import make_keys

USER = 'mémber "7"'  # JSON escapes it, and so does CSV
NAMES = [USER, *(f"member-{number:04d}" for number in range(1, 24))]


def rows_of(count: int) -> pa.Table:
    draw = np.random.default_rng(0)
    effects = draw.normal(0, 1.5, (2, 24))
    user, item = draw.integers(0, 24, (2, count))
    price = draw.random(count)
    click = draw.random(count) < 1 / (1 + np.exp(1 - effects[0, user] - effects[1, item] - 2 * price))
    names = np.array(NAMES)
    return pa.table(
        {"click": click.astype(np.int64), "price": price, "user": names[user], "item": [f"i{each}" for each in item]}
    )


def make_world(folder: Path) -> Path:
    """Everything is signed by keys/key.pem."""
    (folder / "keys").mkdir()
    make_keys(folder / "keys", "key")
    with signing(f"{folder}/keys/key.pem"), requiring(f"{folder}/keys/key.pub"):
        return _make_world(folder)


def _make_world(folder: Path) -> Path:
    rows = rows_of(1200)
    pq.write_table(rows, folder / "rows.parquet", compression="zstd")
    data = [
        "data=default", "data.name=small", "data.format=parquet", "data.columns.label=click", "data.columns.dense=[price]",
        "data.columns.sparse=[user,item]", f"data.path={folder}/ds", "data.group_column=user",
        "data.split={kind: random, validation_fraction: 0.2, test_fraction: 0.0}", "data.rows_per_row_group=256",
    ]  # fmt: skip
    prepare(load_config(PrepareJob, [*data, f"source={folder}/rows.parquet", "threads=1"]))
    train_to(folder, 15)
    logs = folder / "logs"
    logs.mkdir()
    pq.write_table(pa.table({"user": NAMES, "price": np.arange(24) / 24}), logs / "users.parquet")
    words = ["precision=int8", f"feature_tables.user={logs}/users.parquet", *LIMITS]
    export(load_config(ExportJob, [f"run={folder}/run", f"output={folder}/artifact", *words]))
    registry = Registry(f"{folder}/registry")
    run = finished_run(f"{folder}/run")
    for key in ("older", "newer"):
        files = files_of_artifact(f"{folder}/artifact")
        candidate = Candidate(run, key, Record(ADDED), registry.pointer(), files)
        promote(registry, Ledger(registry.path), candidate, None, lambda: None)
    train_to(folder, 20)
    publish(load_config(PublishJob, [f"artifact={folder}/registry"]), find_artifact)
    request = {"user": USER, "item": "i3", "score": 0.25}
    lines = "".join(json.dumps({**request, "user": name}) + "\n" for name in (USER, NAMES[1], USER))
    (logs / "requests.jsonl").write_text(lines)
    (logs / "requests.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (logs / "server.log").write_text(f"12:00 scored {USER} and {NAMES[1]}\n12:01 idle\n")
    (logs / "rows.csv").write_text(f'item,user\ni1,"{USER.replace(chr(34), chr(34) * 2)}"\ni2,{NAMES[1]}\n')
    return folder


LIMITS = ["parity.max_ne_increase=1", "parity.max_auc_decrease=1", "parity.max_score_difference=1"]


def train_words(folder: Path, steps: int) -> list[str]:
    return [
        "data=default", "data.name=small", "data.format=parquet", "data.columns.label=click", "data.columns.dense=[price]",
        "data.columns.sparse=[user,item]", f"data.path={folder}/ds", "data.group_column=user",
        "data.split={kind: random, validation_fraction: 0.2, test_fraction: 0.0}", "data.rows_per_row_group=256",
        "model=dlrm", "model.dense_arch_layer_sizes=[8,8]", "model.over_arch_layer_sizes=[8,1]", "name=small",
        f"run_dir={folder}/run", "hardware=cpu", "trainer.global_batch_size=64", f"trainer.max_steps={steps}",
        "trainer.epochs=3", "checkpoint.save_every_steps=5", "checkpoint.keep_last_n=9", "checkpoint.differential=true",
        "checkpoint.compress_links=true", "checkpoint.max_links=1", "tables.default.embedding_dim=8",
        "optimizer.sparse.name=rowwise_adagrad", "logger.tensorboard=false",
    ]  # fmt: skip


def train_to(folder: Path, steps: int) -> None:
    train(load_config(TrainJob, train_words(folder, steps)))
