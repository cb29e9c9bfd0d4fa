"""The cost of a run over all ranks and attempts, and budgets that end a run or a sweep with its results so far."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.extras.price import meter
from pipeline.extras.price.cost import describe_cost
from pipeline.extras.runs.compare import compare
from pipeline.extras.runs.folder import open_run
from pipeline.extras.runs.listing import as_text, describe_run
from pipeline.runtime.errors import ConfigError
from pipeline.training.summary import describe
from tests.support import forks
from tests.support.jobs import train_on_rank
from tests.support.messages import mentions, names
from tests.support.ranks import RankPool

WORDS = [
    "experiment=quickstart", "hardware=cpu", "hardware.price_per_hour=36", "trainer.global_batch_size=256", "logger=jsonl",
    "trainer.max_steps=12", "trainer.log_every_steps=4", "trainer.evaluate_every_epochs=0", "trainer.evaluate_max_batches=2",
]  # fmt: skip


def test_counters_are_read_from_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter of energy that begins again counts on; one that cannot be read is not known, and not 0."""
    package = tmp_path / "intel-rapl:0"
    for folder in (package, tmp_path / "intel-rapl:0:0"):
        folder.mkdir()
        (folder / "energy_uj").write_text("9000000")
        (folder / "max_energy_range_uj").write_text("10000000")
    network = tmp_path / "dev"
    network.write_text("head\nhead\n  lo: 5 0 0 0 0 0 0 0 5 0\neth0: 100 0 0 0 0 0 0 0 50 0\n")
    monkeypatch.setattr(meter, "POWERCAP", tmp_path)
    monkeypatch.setattr(meter, "NETWORK", network)
    counted, other = meter.Meter(of_host=True), meter.Meter(of_host=False)
    (package / "energy_uj").write_text("2000000")
    network.write_text("head\nhead\n  lo: 99 0 0 0 0 0 0 0 5 0\neth0: 300 0 0 0 0 0 0 0 51 0\n")
    found = counted.read()
    assert (found["energy_j"], found["network_bytes"]) == (pytest.approx(3.0), 201.0)
    assert found["cpu_s"] >= 0.0 and found["gpu_s"] == 0.0
    assert (other.read()["energy_j"], other.read()["network_bytes"]) == (0.0, 0.0)
    network.unlink()
    (package / "energy_uj").unlink()
    assert (lost := meter.Meter(of_host=True).read())["energy_j"] is None and lost["network_bytes"] is None


@pytest.mark.long
def test_a_budget_ends_a_run_with_its_results_and_a_larger_one_continues_it(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    words = [*WORDS, f"data.path={prepared_clicks}", f"run_dir={tmp_path}/run"]
    stopped = ranks.run(2, train_on_rank, [*words, "budget.price=1e-6"])[0]
    assert (stopped.step, stopped.stopped_early) == (4, True)
    assert stopped.checkpoint.endswith("step_00000004") and stopped.validation["ne"] > 0
    cost = json.loads((tmp_path / "run/cost.json").read_text())
    assert cost["rank_hours"] == pytest.approx(2 * cost["seconds"] / 3600)
    assert cost["price"] == pytest.approx(36 * cost["rank_hours"]) and cost["cpu_s"] > 0.0
    assert mentions(describe(stopped), "cost rank-hours CPU-seconds price ended budget.price=1e-06 step 4")

    again = ranks.run(2, train_on_rank, [*words, "budget.price=1e-6"])[0]
    assert (again.step, again.cost["ended_by"] != "") == (4, True)
    done = ranks.run(2, train_on_rank, words)[0]
    assert (done.step, done.stopped_early, done.cost["ended_by"]) == (12, False, "")
    assert done.cost["seconds"] > cost["seconds"] and done.cost["cpu_s"] > cost["cpu_s"]

    run = open_run(f"{tmp_path}/run")
    price = f"{done.cost['price']:.4g}"
    assert mentions(as_text([run]), f"price {price}") and mentions(describe_run(run), f"cost price {price} CPU-seconds")
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (copy / "config.yaml").write_text((copy / "config.yaml").read_text().replace("max_steps: 12", "max_steps: 13"))
    assert mentions(compare([run, open_run(str(copy))], "validation").as_text(), f"price {price} ne")


def test_a_budget_of_a_price_needs_a_price() -> None:
    with pytest.raises(ConfigError, match=names("budget.price=5 hardware.price_per_hour")):
        load_config(TrainJob, ["experiment=quickstart", "hardware=cpu", "budget.price=5"])
    with pytest.raises(ConfigError, match=names("budget.hours")):
        load_config(TrainJob, ["experiment=quickstart", "hardware=cpu", "budget.hours=0"])
    known = {"rank_hours": 2.0, "cpu_s": 10.0, "gpu_s": 0.0, "energy_j": 7200.0, "network_bytes": None, "price": None}
    assert mentions(describe_cost(known), "2 rank-hours 10 CPU-seconds 2.0 Wh") and "MiB" not in describe_cost(known)


@pytest.mark.long
def test_a_budget_ends_a_sweep_and_a_larger_one_continues_it(
    prepared_clicks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna", reason="a sweep needs Optuna: pip install 'torchrec-pipeline[sweep]'")
    from pipeline.extras.sweep.cli.sweep import compose, training_words
    from pipeline.extras.sweep.config import SweepJob
    from pipeline.extras.sweep.outcome import describe as describe_sweep
    from pipeline.extras.sweep.outcome import render_page
    from pipeline.extras.sweep.run import SweepResult, sweep

    monkeypatch.setenv(forks.ADDRESS, forks.server_address())

    def run(*more: str) -> SweepResult:
        words = [
            *WORDS, f"data.path={prepared_clicks}", f"run_dir={tmp_path}/sweep", "sweep.sampler=grid", "sweep.trials=3",
            "sweep.params={optimizer.dense.lr: {choices: [0.1, 0.2, 0.3]}}",
            f"sweep.launch=['{sys.executable}','-m',tests.support.trial]", *more,
        ]  # fmt: skip
        return sweep(load_config(SweepJob, words), training_words(words), compose)

    first = run("budget.price=0.0001")
    assert mentions(describe_sweep(first), "budget.price=0.0001 cost price rank-hours") and len(first.ranked) == 1
    assert json.loads((tmp_path / "sweep/trials/0000/summary.json").read_text())["stopped_early"]
    second = run("budget.price=1000")
    assert second.ended_by == "" and len(second.ranked) == 3
    assert second.cost["price"] > first.cost["price"] > 0.0001
    assert "over price" in render_page(second, "s")
