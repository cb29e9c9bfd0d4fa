"""The example of a model of one's own fits on a page, and trains by the command that it gives."""

from __future__ import annotations

from pathlib import Path

from tests.support.forks import run_warm

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "custom_model.py"


def test_the_example_trains_by_its_command(prepared_clicks: str, tmp_path: Path) -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) <= 40
    command = next(line.strip() for line in lines if " train " in line).removeprefix("python -m ").split()
    small = ["hardware=cpu", "trainer.global_batch_size=256", "trainer.max_steps=3", "tables.default.embedding_dim=8",
             "trainer.evaluate_batch_size=512", "trainer.evaluate_max_batches=1"]  # fmt: skip
    assert command[0] == "pipeline"
    done = run_warm(
        "pipeline.__main__", *command[1:], *small, f"data.path={prepared_clicks}", f"run_dir={tmp_path}/run"
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "kind: gated_mlp" in (tmp_path / "run" / "config.yaml").read_text()
