"""What is compiled ahead is what training runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.devices.cpu.process import limit_openmp_spin, use_huge_pages

TRAIN = """
import os, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from pipeline.cli.command_line import TrainJob, load_config
from pipeline.training.train import train
for overrides in {runs!r}:
    train(load_config(TrainJob, overrides))
"""


def _compiled(folder: Path) -> set[str]:
    return {file.name for file in folder.rglob("*.nbc")}


@pytest.mark.campaign
def test_training_compiles_nothing_after_it(prepared_clicks: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, "-m", "pipeline", "precompile"], env=environment, check=True, capture_output=True)
    before = _compiled(cache)
    assert before
    overrides = [
        "experiment=quickstart",
        "hardware=cpu",
        "trainer.global_batch_size=256",
        f"data.path={prepared_clicks}",
        "trainer.max_steps=3",
        "trainer.precision=bf16",
        "trainer.evaluate_max_batches=1",
    ]
    half = ["tables.cat_3.data_type=fp16", "tables.cat_3.sharding.sharding_types=[table_wise]"]
    runs = [[*overrides, f"run_dir={tmp_path / 'whole'}"], [*overrides, *half, f"run_dir={tmp_path / 'half'}"]]
    code = TRAIN.format(runs=runs)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, timeout=300)
    assert _compiled(cache) == before


@pytest.mark.parametrize(
    ("ask", "variable", "usual", "own"),
    [(limit_openmp_spin, "GOMP_SPINCOUNT", "1000", "7"), (use_huge_pages, "THP_MEM_ALLOC_ENABLE", "1", "0")],
    ids=["openmp", "huge_pages"],
)
def test_libraries_have_our_settings_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[], None], variable: str, usual: str, own: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    ask()
    assert os.environ[variable] == usual
    monkeypatch.setenv(variable, own)
    ask()
    assert os.environ[variable] == own
