"""A canary from one tick of retrain to the next, by the commands that a user gives, a real server and labels that come late.

python -m pytest -m campaign -s tests/extras/canary/test_retrain_canary.py
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.extras.canary.pair_log import read_pairs
from pipeline.extras.canary.router import is_in_share
from pipeline.retraining.ledger import Ledger, Record
from pipeline.retraining.registry import Registry
from pipeline.serving.scoring.predictor import Predictor
from tests.retraining.streams import FILE, JOB_WORDS, window_name, write_window
from tests.serving.servers import Server, running
from tests.serving.test_artifacts_served import raw_rows
from tests.serving.test_switching import wait_until
from tests.support.forks import run_warm

ROWS, PER_REQUEST, SHARE = 8000, 20, 0.3
GATE = ["gate.calibration_min=0.7", "gate.calibration_max=1.4", "gate.ne_tolerance=0.05", "gate.bootstrap_samples=200"]
CHECKS = ["checks.label_rate_change=null", "checks.champion_ne_rise=null", "checks.unknown_share_rise=null"]


@dataclass
class Shop:
    """A registry that `retrain` and `canary` work on, and the labels of its live requests."""

    folder: Path
    labels: dict[str, list[Any]] = field(default_factory=lambda: {"request_id": [], "row": [], "label": []})

    @property
    def registry(self) -> Registry:
        return Registry(str(self.folder / "registry"))

    def retrain(self) -> str:
        places = [f"source={self.folder}/source", f"run_dir={self.folder}/work", f"registry.path={self.registry.path}"]
        words = [
            *places,
            *JOB_WORDS,
            *GATE,
            *CHECKS,
            "registry.keep=2",
            f"registry.canary_share={SHARE}",
            "max_catchup=1",
        ]
        return said("pipeline retrain", *words)

    def evaluate(self) -> str:
        pq.write_table(pa.table(self.labels), self.folder / "labels.parquet")
        words = [self.registry.path, f"log={self.folder}/log", f"labels={self.folder}/labels.parquet", *GATE]
        return said("pipeline canary", "evaluate", *words)

    def newest(self) -> Record:
        return next(Ledger(self.registry.path).newest())

    def predictor(self, name: str) -> Predictor:
        artifact = self.registry.version(name).artifact
        assert artifact is not None
        return Predictor.load(artifact)

    def ask(self, server: Server, clicks: Path, champion: str, challenger: str | None) -> None:
        """Send a window's rows, and check which version answers each request, and all its scores."""
        rows = raw_rows(clicks, ROWS)
        models = {name: self.predictor(name) for name in (champion, challenger) if name is not None}
        salt = models[challenger].version if challenger else ""
        if challenger:
            server.wait_for(f"challenger {salt} serves now", 300.0)

        def ask(begin: int) -> str:
            asked, name = rows.slice(begin, PER_REQUEST), f"{champion}-{challenger}-{begin}"
            wanted = challenger if challenger and is_in_share(name, salt, SHARE) else champion
            answer = server.client.post(
                f"{server.url}/score", json={"rows": asked.to_pylist()}, headers={"X-Request-ID": name}
            )
            assert answer.json()["artifact"] == models[wanted].version
            np.testing.assert_allclose(answer.json()["scores"], scores[wanted][begin : begin + PER_REQUEST], atol=1e-5)
            return wanted

        scores = {name: model.score(rows).scores for name, model in models.items()}
        begins = range(0, rows.num_rows, PER_REQUEST)
        with ThreadPoolExecutor(4) as pool:
            answered = list(pool.map(ask, begins))
        share = answered.count(str(challenger)) / len(answered)
        assert abs(share - SHARE * bool(challenger)) < 4 * np.sqrt(SHARE * (1 - SHARE) / len(answered))
        names = [f"{champion}-{challenger}-{begin}" for begin in begins]
        self.labels["request_id"] += np.repeat(names, PER_REQUEST).tolist()
        self.labels["row"] += list(range(PER_REQUEST)) * len(names)
        self.labels["label"] += [int(line[0]) for line in clicks.read_text().splitlines()]

    def wait_for_log(self) -> None:
        """Wait until all requests of the canary that runs are in the log."""
        wanted = {name for name in self.labels["request_id"] if "None" not in name}

        def is_there() -> bool:
            return any((self.folder / "log").glob("*.parquet")) and wanted <= set(
                read_pairs(f"{self.folder}/log")["request_id"].to_pylist()
            )

        wait_until(is_there)


def said(*words: str) -> str:
    done = run_warm(*words, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def flip(path: Path) -> None:
    """A broken join: each click is stored as a non-click and the other way round."""
    lines = path.read_text().splitlines()
    path.write_text("".join(("0" if line[0] == "1" else "1") + line[1:] + "\n" for line in lines))


@pytest.mark.campaign
def test_retrain_offers_a_canary_and_live_labels_promote_a_sound_one_and_stop_a_bad_one(tmp_path: Path) -> None:
    """Before it is trained on, window 3 and the next one are delivered again with flipped labels. So the gate of retrain,
    which judges 3 on 4, lets the bad model pass."""
    shop = Shop(tmp_path)
    windows = [write_window(tmp_path / "source", number, ROWS, drift=0.03, churn=0.05) / FILE for number in range(1, 6)]
    live = [Path(shutil.copy(path, tmp_path / f"{number}.tsv")) for number, path in enumerate(windows)]
    shop.retrain()
    assert (shop.newest().state, shop.newest().version) == ("promoted", "v000001")
    words = [
        f"artifact={shop.registry.path}",
        "server.port=0",
        "server.watch_s=0.2",
        f"router.canary.log={tmp_path}/log",
    ]
    words += [
        f"router.canary.artifact={shop.registry.path}",
        "router.canary.shadow=1.0",
        "batching.latency_budget_ms=60000",
    ]
    with running("pipeline serve", *words) as server:
        shop.ask(server, live[1], "v000001", None)
        print(shop.retrain())
        assert (shop.newest().state, shop.newest().version) == ("offered", "v000002")
        shop.ask(server, live[2], "v000001", "v000002")
        assert "v000002 is the canary" in shop.retrain() and shop.newest().state == "offered"
        shop.wait_for_log()
        print(text := shop.evaluate())
        assert "decision    promote" in text
        record = shop.newest()
        assert (record.state, record.window, record.version) == ("promoted", window_name(2), "v000002")
        wait_until(lambda: server.log().count("serves no longer") == 1 and "in place of" in server.log())
        shop.ask(server, live[3], "v000002", None)

        for path in windows[2:4]:
            flip(path)
        print(shop.retrain())
        record = shop.newest()
        assert (record.state, record.version, record.parent) == ("offered", "v000003", "v000002")
        shop.ask(server, live[4], "v000002", "v000003")
        shop.wait_for_log()
        print(text := shop.evaluate())
        assert "decision    stop" in text
        record = shop.newest()
        assert (record.state, record.window, record.version) == ("rejected", window_name(3), "v000003")
        wait_until(lambda: server.log().count("serves no longer") == 2)
        shop.ask(server, live[0], "v000002", None)
        print(shop.retrain())
        record = shop.newest()
        assert (record.state, record.window, record.parent) == ("rejected", window_name(4), "v000002")
        print(server.log())
        assert "WARNING" not in server.log() and "ERROR" not in server.log()
    states = [(record.state, record.version) for record in Ledger(shop.registry.path).newest()]
    assert states[::-1] == [
        ("promoted", "v000001"), ("offered", "v000002"), ("promoted", "v000002"), ("offered", "v000003"),
        ("rejected", "v000003"), ("rejected", ""),
    ]  # fmt: skip
