"""Pages of a sweep, a comparison, a registry and a plan: small, loading nothing, and readable on every screen, as a run's page is."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import numpy as np
import optuna
import pytest

from pipeline.extras.pages.charts import Bar, bar_chart
from pipeline.extras.pages.plan_page import render_page as render_plan
from pipeline.extras.pages.registry_page import reigns, render_registry
from pipeline.extras.runs.compare import compare
from pipeline.extras.runs.folder import open_run
from pipeline.extras.runs.report_comparison import render_comparison
from pipeline.extras.sweep.outcome import render_page as render_sweep
from pipeline.extras.sweep.run import SweepResult
from pipeline.retraining.ledger import ADDED, PROMOTED, REJECTED, ROLLED_BACK, SKIPPED, Ledger, Record
from pipeline.retraining.registry import Registry
from tests.planner.plans import drawn_plan
from tests.support.browser import open_pages

BACKGROUND = {"dark": "rgb(20, 24, 28)", "light": "rgb(255, 255, 255)"}


def sweep_page(folder: Path) -> str:
    draw, study = np.random.default_rng(0), optuna.create_study()
    lr, models = optuna.distributions.FloatDistribution(1e-4, 1.0, log=True), ["dlrm", "dlrm_dcn"]
    spaces = {
        "optimizer.sparse.lr": lr,
        "optimizer.dense.lr": lr,
        "model": optuna.distributions.CategoricalDistribution(models),
    }
    for number in range(30):
        point = {
            "optimizer.sparse.lr": float(10 ** draw.uniform(-2.3, -0.7)),
            "optimizer.dense.lr": float(10 ** draw.uniform(-3.5, -2)),
            "model": str(draw.choice(models)),
        }
        ne = 0.68 + 0.05 * abs(math.log10(point["optimizer.sparse.lr"]) + 1.3)
        rungs = {
            3**rung: float(ne + 0.02 / (rung + 1) + draw.normal(0, 0.003))
            for rung in range(3 if number % 3 == 0 else 1)
        }
        state = optuna.trial.TrialState.PRUNED if number % 3 else optuna.trial.TrialState.COMPLETE
        study.add_trial(
            optuna.trial.create_trial(
                state=state,
                params=point,
                distributions=spaces,
                intermediate_values=rungs,
                value=list(rungs.values())[-1],
            )
        )
    words = ["experiment=quickstart", "data.path=datasets/<a & b>"]
    return render_sweep(SweepResult(f"{folder}/rates_sweep", "ne", study, words, 4_000, 10_000), "rates & dims")


def comparison_page(run_as_trained: Path, folder: Path) -> str:
    other = shutil.copytree(run_as_trained, folder / "other", ignore=shutil.ignore_patterns("checkpoints"))
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(re.sub(r"seed: \d+", "seed: 5", text).replace("lr: 0.0", "lr: 0.1"))
    return render_comparison(compare([open_run(str(run_as_trained)), open_run(str(other))]))


def registry(folder: Path) -> tuple[Registry, Ledger]:
    """Forty windows: promoted, rejected and skipped; a rollback that holds at the end."""
    found, ledger = Registry(f"{folder}/registry"), Ledger(f"{folder}/registry")
    draw, source, pointer, champion = np.random.default_rng(0), folder / "weights", None, ""
    source.write_bytes(b"weights")
    for number in range(1, 41):
        time = f"2026-10-{1 + number // 2:02d}T{12 * (number % 2):02d}:05:00Z"
        window, ne = f"dt=2026-10-{1 + number // 2:02d}", 0.7 - 0.0005 * number + float(draw.normal(0, 0.002))
        metrics = {
            "challenger_ne": ne,
            "champion_ne": ne + float(draw.normal(0.001, 0.002)),
            "judged_on": window,
            "challenger_calibration": 1.0 + float(draw.normal(0, 0.02)),
            "champion_calibration": 1.01,
        }
        metrics["ne_ratio"] = metrics["challenger_ne"] / metrics["champion_ne"]
        if number % 11 == 0:
            ledger.append(
                Record(SKIPPED, window, time=time, reasons=["data: 31 % fewer rows than in the last seven windows"])
            )
        elif number == 1 or metrics["ne_ratio"] < 1.0:
            name = found.next_name()
            files = {"checkpoint/step_00000001/a.distcp": str(source), "config.yaml": str(source)}
            version = found.publish(
                name, files, {"window": window, "parent": champion or None, "metrics": metrics, "created_at": time}
            )
            pointer = found.promote(version, pointer)
            state = ADDED if number == 1 else PROMOTED
            ledger.append(
                Record(state, window, name, champion, metrics=metrics, time=time, seconds=700 + 10.0 * number)
            )
            champion = name
        else:
            reasons = [f"NE {ne:.4f} to the champion's {metrics['champion_ne']:.4f}: worse than is allowed"]
            ledger.append(
                Record(REJECTED, window, parent=champion, metrics=metrics, reasons=reasons, time=time, seconds=650.0)
            )
    found.pin("v000002", "calibration <fell>")
    ledger.append(
        Record(
            ROLLED_BACK, version="v000002", parent=champion, reasons=["calibration <fell>"], time="2026-10-23T01:00:00Z"
        )
    )
    return found, ledger


@pytest.fixture
def pages(run_as_trained: Path, tmp_path: Path) -> dict[str, str]:
    return {
        "sweep": sweep_page(tmp_path),
        "comparison": comparison_page(run_as_trained, tmp_path),
        "registry": render_registry(*registry(tmp_path)),
        "plan": render_plan("plan", *drawn_plan(26, 4)),
    }


SCREENS = [
    (360, "dark"),
    *(
        pytest.param(width, scheme, marks=pytest.mark.campaign)
        for width, scheme in [(390, "light"), (1280, "light"), (1280, "dark")]
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_every_page_fits_the_screen_and_has_no_accessibility_fault(
    pages: dict[str, str], tmp_path: Path, width: int, scheme: str
) -> None:
    assert max(len(page.encode()) for page in pages.values()) < 2_000_000
    for name, seen in zip(pages, open_pages(list(pages.values()), tmp_path, width, scheme), strict=True):
        assert (name, seen.requests, seen.violations) == (name, [], [])
        assert seen.content <= seen.width == width, name
        assert seen.background == BACKGROUND[scheme]


def test_a_registrys_page_says_who_was_champion_when_and_why(tmp_path: Path) -> None:
    found, ledger = registry(tmp_path)
    page = render_registry(found, ledger)
    reigned = reigns(sorted(ledger.newest(), key=lambda record: record.number))
    assert [reign.until for reign in reigned] == [*(reign.since for reign in reigned[1:]), ""]
    assert reigned[-1].version == "v000002" and page.count("<h2>") == 3
    for text in (
        "v000002 is pinned (calibration &lt;fell&gt;)",
        "challengers promoted",
        "31 % fewer rows",
        "rolled back",
    ):
        assert text in page
    assert not re.search(r"(src|href)=|https?:", page)


def test_a_registry_that_has_rejected_all_has_a_page_too(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    assert "no champion yet" in render_registry(Registry(str(tmp_path)), ledger)
    ledger.append(Record(REJECTED, "dt=2026-11-01", reasons=["NE 1.0001 is not below gate.max_ne=1"]))
    page = render_registry(Registry(str(tmp_path)), ledger)
    assert "no champion yet" in page and "NE 1.0001 is not below" in page and reigns(list(ledger.newest())) == []


def test_a_sweeps_page_names_what_matters_and_the_winners_command(tmp_path: Path) -> None:
    page = sweep_page(tmp_path)
    assert 'aria-label="importance of each knob"' in page and "rates &amp; dims" in page
    assert "run_dir=" in page.partition("<h2>The winner</h2>")[2] and "40%" in page


def test_bars_of_long_keys_show_their_last_parts() -> None:
    names = ["optimizer.sparse.lr", "optimizer.dense.lr", "model", "a_feature_with_a_long_name"]
    drawn = bar_chart("importance", [Bar(name, 1.0) for name in names])
    assert re.findall(r'text-anchor="end">([^<]+)<', drawn) == ["sparse.lr", "dense.lr", "model", "…_with_a_long_name"]
    whole = bar_chart("effects", [Bar(name, 1.0) for name in names], whole_names=True)
    assert re.findall(r'text-anchor="end">([^<]+)<', whole) == names
