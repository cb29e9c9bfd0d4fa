"""Each example of a kind of data runs as its first line says, from nothing to scores or measures."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEEDS_A_SERVER = {"retrieve"}
TESTED_ELSEWHERE = {
    *("accuracy", "custom_model", "focal_loss"),  # tests/plugins
    *(
        "airflow_tasks",
        "bentoml_service",
        "duckdb_udf",
        "mlflow_model",
        "ray_serve",
        "sklearn_model",
        "spark_udf",
    ),  # tests/api
}
LEAST_AUC = {"several_labels": 0.55, "sequences": 0.6, "transforms": 0.55}  # on a split of some 400 rows
RUN_HERE = sorted(LEAST_AUC)


def test_every_example_is_run_by_a_test() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*RUN_HERE, *NEEDS_A_SERVER, *TESTED_ELSEWHERE}


@pytest.mark.parametrize("name", RUN_HERE)
def test_an_example_begins_with_its_command(name: str) -> None:
    doc = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    assert doc.splitlines()[0].endswith(f":  python -m examples.{name} [folder]")


@pytest.mark.campaign
@pytest.mark.parametrize("name", RUN_HERE)
def test_an_example_learns_what_its_rows_hold(name: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", f"examples.{name}", str(tmp_path)], check=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [
        value for line in lines if line["kind"] == "validation" for key, value in line.items() if key.endswith("auc")
    ]
    assert max(found) > LEAST_AUC[name]
    if (tmp_path / "artifact").exists():
        assert pq.read_table(tmp_path / "scores.parquet").num_rows == 4000
