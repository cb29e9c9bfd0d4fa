"""Rows of another kind than the model was trained on are counted, named in predict's summary, in /metrics and in the log."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import PredictJob
from pipeline.serving.artifact.export import ExportSummary
from pipeline.serving.scoring.predict import describe, predict
from pipeline.serving.scoring.predictor import Predictor, count_row_zero, unusual, warning
from tests.serving.servers import running
from tests.support.messages import mentions


def test_lookups_of_row_zero_are_counted_by_feature() -> None:
    values, offsets = np.array([0, 3, 0, 0, 5, 1, 0]), np.array([0, 1, 2, 4, 5, 5, 7])  # 2 features of 3 rows
    assert count_row_zero(values, offsets, 3).tolist() == [[5 - 1, 3], [3, 1]]
    lookups = {"a": {"row_zero_share": 0.1}, "b": {"row_zero_share": 0.6}}
    assert unusual({"a": [1000, 340], "b": [1000, 849]}, lookups) == []
    assert [text.split()[0] for text in unusual({"a": [1000, 360], "b": [1000, 900]}, lookups)] == ["b", "a"]
    assert unusual({"a": [50, 50]}, lookups) == []
    assert mentions(warning({"a": [1000, 1000]}, lookups), "a 100.0% 10.0%")


def _rows(clicks: Path, count: int) -> list[str]:
    return clicks.read_text().splitlines()[:count]


def test_scoring_foreign_rows_is_not_silent(
    small_artifact: ExportSummary, prepared_clicks: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = _rows(Path(prepared_clicks).parent / "clicks.tsv", 300)
    foreign = [
        "\t".join(cell if number < 14 else f"x{cell}" for number, cell in enumerate(line.split("\t"))) for line in lines
    ]
    shares = {}
    for name, rows in (("own", lines), ("foreign", foreign)):
        (tmp_path / f"{name}.tsv").write_text("\n".join([*rows, ""]))
        job = load_config(
            PredictJob,
            [
                f"artifact={small_artifact.artifact}",
                f"source={tmp_path}/{name}.tsv",
                f"output={tmp_path}/{name}.parquet",
            ],
        )
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            summary = predict(job)
        said = [record.getMessage() for record in caplog.records if "does not know" in record.getMessage()]
        shares[name] = (summary.row_zero, said)
        known = sum(total - zeros for total, zeros in summary.row_zero.values())
        assert mentions(describe(summary), f"{known:,} of {300 * 26:,}")
        report = json.loads((tmp_path / f"{name}.parquet.json").read_text())
        assert report["summary"]["row_zero"] == summary.row_zero
    assert all(total == zeros == 300 for total, zeros in shares["foreign"][0].values())
    assert shares["own"][1] == [] and mentions(shares["foreign"][1][0], "cat_ 100.0% and 21 more")
    assert predict(job).row_zero == shares["foreign"][0]  # nothing to do: as the report says


@pytest.mark.long
def test_a_server_counts_unknown_values(small_artifact: ExportSummary) -> None:
    predictor = Predictor.load(small_artifact.artifact)
    names = predictor.columns.sparse
    few = predictor.score(
        pa.table({**{key: [1.0] for key in predictor.columns.dense}, **{key: ["nothing"] for key in names}})
    )
    assert few.row_zero == {key: [1, 1] for key in names}
    with running("pipeline serve", f"artifact={small_artifact.artifact}", "server.port=0") as server:
        server.client.post(f"{server.url}/score", json={"rows": [{"cat_0": "nothing"}] * 3}).raise_for_status()
        assert server.metric('values_total{feature="cat_0"}') == 3
        assert server.metric('unknown_values_total{feature="cat_0"}') == 3
