"""Compressed tables are exported by their parts, and score as the trainer evaluates them, from raw rows too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.tables import CompressionConfig
from pipeline.serving.artifact.composed import ComposedTables
from pipeline.serving.artifact.manifest import read_manifest
from pipeline.training.evaluate import evaluate
from tests.embeddings.compressed import NUM_IDS, as_features, table_of
from tests.serving.exports import assert_raw_rows_are_prepared_rows, run_export
from tests.support.jobs import train_on_rank
from tests.support.ranks import RankPool

KINDS = {
    "cat_25": "{kind: quotient_remainder, ratio: 8, operation: multiply}",
    "cat_24": "{kind: hash, ratio: 4}",
    "cat_23": "{kind: mixed_dimension, dims: [16, 4]}",
    "cat_22": "{kind: path_based, ratio: 2}",
    "cat_21": "{kind: tensor_train, rank: 4}",
    "cat_20": "{kind: frequency_split, head_rows: 40}",
    "cat_19": "{kind: managed_collision, num_rows: 40, buckets: 2, eviction_interval: 1}",
}


def _evaluate(rank: int, run: str) -> dict[str, float]:
    return evaluate(load_config(EvaluateJob, [f"run={run}", "split=validation"])).metrics


@pytest.mark.campaign
def test_every_kind_of_compressed_table_scores_as_the_trainer_evaluates_it(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    overrides = [
        "experiment=quickstart", "hardware=cpu", "trainer.global_batch_size=256", "trainer.max_steps=3",
        f"data.path={prepared_clicks}", f"run_dir={tmp_path / 'run'}", "trainer.evaluate_max_batches=1",
        "data.synthetic_multi_hot={cat_22: 3, cat_21: 2}",
        *(f"tables.{name}.compression={what}" for name, what in KINDS.items()),
    ]  # fmt: skip
    ranks.run(1, train_on_rank, overrides)
    words = ["precision=int8", "tables.cat_25=fp32"]
    summary = run_export(tmp_path / "run", tmp_path / "artifact", *words)
    measured = ranks.run(1, _evaluate, str(tmp_path / "run"))[0]
    model, artifact = summary.certificate["model"]["validation"], summary.parity["validation"]
    assert model["ne"] == pytest.approx(measured["ne"], abs=1e-6)
    assert abs(artifact["ne_delta"]) < 1e-3
    precisions = {table.name: table.precision for table in read_manifest(summary.artifact).tables}
    assert {precisions[name] for name in precisions if name.startswith("cat_25__")} == {"fp32"}
    assert any(name.startswith("cat_20__") for name in precisions) and precisions["cat_0"] == "int8"
    source = Path(prepared_clicks).parent / "clicks.tsv"
    assert_raw_rows_are_prepared_rows(summary.artifact, load_config(TrainJob, overrides), str(source))


@pytest.mark.parametrize("in_tail", [False, True])
def test_an_artifact_holds_the_classes_that_a_file_gave(in_tail: bool, tmp_path: Path) -> None:
    """The file is of the machine that trained, also where the partitions are those of a split table's tail."""
    path, num_ids = tmp_path / "groups.npy", NUM_IDS - 20 * in_tail
    np.save(path, np.stack([np.arange(num_ids) % 7, np.arange(num_ids) // 7]))
    config = CompressionConfig("quotient_remainder", scheme="given", assignments_file=str(path))
    if in_tail:
        config = CompressionConfig("frequency_split", head_rows="20", tail=config)
    table = table_of("t", config)
    keys, bags = ["t_one", "t_many"], {"t_one": [[7], [40]], "t_many": [[0, 9, 52], []]}
    content = ComposedTables([table], keys).to_bytes()
    before = ComposedTables([table], keys).split(as_features(bags, slice(None)))
    path.unlink()
    after = ComposedTables.from_bytes(content).split(as_features(bags, slice(None)))
    assert after.keys() == before.keys()
    assert torch.equal(after.values(), before.values()) and torch.equal(after.lengths(), before.lengths())
