"""The example of a model of one's own fits on a page, and trains by the command that it gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "custom_model.py"


def test_the_example_trains_by_its_command(prepared_clicks: str, tmp_path: Path) -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) <= 40
    command = next(line.strip() for line in lines if " train " in line).removeprefix("python -m ").split()
    small = ["hardware=cpu", "trainer.global_batch_size=256", "trainer.max_steps=3", "tables.default.embedding_dim=8",
             "trainer.evaluate_batch_size=512", "trainer.evaluate_max_batches=1"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", *command, *small, f"data.path={prepared_clicks}", f"run_dir={tmp_path}/run"],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "kind: gated_mlp" in (tmp_path / "run" / "config.yaml").read_text()
