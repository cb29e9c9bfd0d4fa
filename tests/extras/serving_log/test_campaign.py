"""Load, deltas, switches and kill -9 at once: every logged score is computed again, to the bit.

python -m pytest -m campaign -s tests/extras/serving_log/test_campaign.py
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving_load import post
from pipeline.cli.command_line import load_config
from pipeline.extras.publish.publish import publish
from pipeline.extras.serving_log.job import SkewJob
from pipeline.extras.serving_log.skew import skew
from pipeline.serving.artifact.export import ExportSummary
from pipeline.serving.http.request_rows import JSON_TYPE
from pipeline.serving.scoring.load import find_folder
from tests.extras.publish.test_deltas import export_step, job_of
from tests.extras.serving_log.test_serving_log import kill_server
from tests.serving.servers import running
from tests.serving.test_artifacts_served import raw_rows
from tests.serving.test_switching import point, wait_until

RATE = float(os.environ.get("LOG_RATE", "2000"))  # requests a second
SECONDS = float(os.environ.get("LOG_SECONDS", "60"))


class _Posting:
    """Posts in threads of one process until it is stopped; a killed server ends a connection."""

    def __init__(self, port: int, bodies: list[bytes], seconds: float) -> None:
        self.answered, self.clock_s = 0, 0.0
        self._thread = threading.Thread(target=self._post, args=(port, bodies, seconds))
        self._thread.start()

    def _post(self, port: int, bodies: list[bytes], seconds: float) -> None:
        found = post(port, bodies, JSON_TYPE, 32, seconds, RATE)
        self.answered, self.clock_s = len(found.seconds), found.clock_s

    def wait(self) -> None:
        self._thread.join()


@pytest.mark.campaign
def test_every_logged_score_is_reproduced_under_load_deltas_switches_and_kills(
    small_run: Path, small_artifact: ExportSummary, prepared_clicks: str, tmp_path: Path
) -> None:
    rows = raw_rows(Path(prepared_clicks).parent / "clicks.tsv", 2000).to_pylist()
    bodies = [json.dumps({"rows": rows[begin : begin + 1 + begin % 3]}).encode() for begin in range(0, 1900, 5)]
    artifacts, folder, link = tmp_path / "artifacts", tmp_path / "log", tmp_path / "current"
    first = Path(export_step(small_run, 10, artifacts / "first"))
    second = Path(shutil.copytree(small_artifact.artifact, artifacts / "second"))
    point(link, first)
    options = [
        "server.port=0", "server.watch_s=0.05", f"observers.log.folder={folder}", "observers.log.flush_s=0.5",
        "batching.latency_budget_ms=60000", "threads=1",
    ]  # fmt: skip
    answered = clock_s = drops = 0.0
    rounds: list[dict[str, Any]] = []
    for number in range(4):
        with running("pipeline serve", f"artifact={link}", *options) as server:
            posting = _Posting(server.port, bodies, SECONDS / 4)
            if number in (0, 1):
                publish(job_of(first, f"step={20 + 10 * number}"), find_folder)
                wait_until(lambda: server.metric("delta_sequence") == number + 1)  # noqa: B023
            for to in (second, first) * 2:
                switches = server.metric("artifact_switches_total")
                point(link, to)
                wait_until(lambda: server.metric("artifact_switches_total") > switches)  # noqa: B023
            posting.wait()
            answered, clock_s = answered + posting.answered, clock_s + posting.clock_s
            drops += server.metric("observer_drops_total")
            kill_server(server)
        rounds.append({"answered": posting.answered, "per_s": round(posting.answered / posting.clock_s)})
    words = [f"artifact={artifacts}", f"log={folder}", f"data_path={prepared_clicks}", "max_psi=99"]
    found = skew(load_config(SkewJob, words))
    print(f"\n{answered / clock_s:.0f} requests/s of {RATE:.0f} asked, {rounds}, {drops:.0f} dropped by the log")
    print(f"{found['requests']:,} requests logged, {found['rows']:,} rows, {found['artifacts']}")
    print(f"equal ids {found['replay']['equal_rows']:,}, equal scores {found['replay']['equal_scores']:,}")
    replayed = found["replay"]
    assert found["passed"], found["problems"]
    assert replayed["equal_scores"] == replayed["equal_rows"] == replayed["scores"] == found["rows"] > 1000
    versions = sorted(sorted(each) for each in found["artifacts"].values())
    assert len(versions) == 2 and {"0", "1", "2"} <= set(versions[1])
