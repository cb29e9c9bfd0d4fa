"""Exporting takes memory for blocks of tables, not for tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import train_on_rank
from tests.support.ranks import RankPool

ROWS, DIM = 2_000_000, 32


@pytest.mark.campaign
def test_a_table_larger_than_the_memory_it_may_take_is_exported(
    ranks: RankPool, small_run: Path, prepared_clicks: str, tmp_path: Path
) -> None:
    overrides = [
        "experiment=quickstart", "hardware=cpu", "trainer.global_batch_size=256", "trainer.max_steps=2",
        f"data.path={prepared_clicks}", f"run_dir={tmp_path / 'run'}", "trainer.evaluate_max_batches=1",
        "model.dense_arch_layer_sizes=[16,32]", f"tables.default.embedding_dim={DIM}",
        f"tables.cat_25.num_embeddings={ROWS}", "optimizer.sparse.name=sgd",
    ]  # fmt: skip
    ranks.run(1, train_on_rank, overrides)
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.memory_worker", small_run, tmp_path / "run", tmp_path / "artifact"],
        capture_output=True, text=True, timeout=400, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tables"] > ROWS * DIM * 4
    assert found["grown"] < found["tables"] / 2, found
