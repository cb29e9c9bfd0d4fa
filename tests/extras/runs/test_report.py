"""A run's page opens from disk and loads nothing, says what the run folder holds, and reads well on every screen."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.extras.pages.charts import LEFT, MAX_POINTS, WIDTH, Line, line_chart, thinned
from pipeline.extras.runs.cli import report as verb
from pipeline.extras.runs.cli import runs as runs_verb
from pipeline.extras.runs.config import ReportJob, RunsJob
from pipeline.extras.runs.evaluation_stats import Slice
from pipeline.extras.runs.folder import open_run
from pipeline.extras.runs.report import render_report, warnings_of
from pipeline.extras.runs.report_features import _finite, worst_slices
from pipeline.runtime.errors import ConfigError
from tests.support.browser import open_page
from tests.support.messages import names

VOID = {"meta", "br"}


class Outline(HTMLParser):
    """Headings, tables and pictures of a page; fails where an element is closed that is not open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.found if found == tag]


@pytest.fixture(scope="module")
def page(run_as_trained: Path) -> str:
    return render_report(open_run(str(run_as_trained)))


def test_training_ends_with_a_page_that_loads_nothing(run_as_trained: Path) -> None:
    page = (run_as_trained / "report.html").read_text()
    assert "finished at step" in page and "running at step" not in page
    assert not re.search(r"(src|href)=|url\(|@import|https?:|<script", page)
    assert "default-src 'none'" in page and len(page.encode()) < 2_000_000


def test_the_page_is_well_formed_and_says_what_the_run_holds(page: str) -> None:
    outline = Outline(page)
    assert len(outline.all("h1")) == 1
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        "Quality",
        "Reliability",
        "Rates, speed and memory",
        "Features",
        "Worst slices",
        "Evaluations",
        "Sharding plan",
        "Data set",
        "Starts",
        "Config",
    ]
    charts = [
        picture for picture in outline.all("svg") if "aria-hidden" not in picture
    ]  # other pictures are of legends
    assert all(picture["aria-label"] and picture["role"] == "img" for picture in charts)
    assert len(charts) == 10
    assert all(cell.get("scope") == "col" for cell in outline.all("th"))
    assert {attributes.get("lang") for attributes in outline.all("html")} == {"en"}
    for text in (
        "dlrm on 2 rank(s), finished at step 30",
        "on the validation split, step 30",
        "cat_25",
        "row_wise",
        "best possible AUC",
    ):
        assert text in page


def test_a_comparison_has_a_page_too(run_as_trained: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run_as_trained, tmp_path / "other", ignore=shutil.ignore_patterns("checkpoints"))
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(
        config.replace("model: {", "model: {dropout: 0.5, ").replace("dropout: 0.5, dropout", "dropout")
    )
    words = ["command=compare", f"runs=[{run_as_trained},{other}]", f"html={tmp_path}/page.html"]
    runs_verb.run(load_config(RunsJob, words))
    page = (tmp_path / "page.html").read_text()
    assert (
        len([picture for picture in Outline(page).all("svg") if "aria-hidden" not in picture]) == 4
        and str(other) in page
    )


def test_what_a_colleague_would_point_at_stands_on_top(run_as_trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(run_as_trained, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints")))
    (run / "summary.json").unlink()
    for file in run.glob("*.parquet"):
        file.unlink()
    found = " ".join(warnings_of(open_run(str(run)), {"calibration": 1.2}, None))
    for text in ("stopped at step 30", "20% too high", "has no statistics"):
        assert text in found
    page = render_report(open_run(str(run)))  # without what is gone
    assert "Reliability" not in page and 'aria-label="warnings"' in page
    assert Outline(page).all("h1")


def test_slices_that_chance_explains_are_not_among_the_worst() -> None:
    off = Slice("a", 1, 1000, 1000.0, 1000.0, 100.0, 200.0, 400.0)
    fine = Slice("a", 2, 1000, 1000.0, 1000.0, 100.0, 101.0, 400.0)
    few = Slice("a", 3, 50, 50.0, 50.0, 0.0, 25.0, 40.0)
    assert worst_slices([fine, few, off]) == [off, fine]
    assert off.calibration == 2.0 and fine.ne == pytest.approx(400.0 / 1000 / 0.32508, rel=1e-3)


def test_long_lines_are_thinned_and_odd_ones_drawn() -> None:
    points = [(float(step), 1.0 / (step + 1)) for step in range(10_000)]
    assert len(thinned(points)) == MAX_POINTS and thinned(points)[-1] == points[-1]
    assert line_chart("none", "", [Line("a", "train", [(1.0, float("nan"))])]) == ""
    for values in ([0.0], [5.0, 5.0], [-1.0, 3.0], [1e-9, 2e-9], [1e6, 3e6], [1.39614848, 1.39614855]):
        drawn = line_chart("l", "u", [Line("a", "train", [(float(x), y) for x, y in enumerate(values)])])
        assert "<polyline" in drawn and "nan" not in drawn and "inf" not in drawn
        ticks = re.findall(r'text-anchor="end"[^>]*>([^<]*)<', drawn)[:-1]
        assert len(set(ticks)) == len(ticks) > 1 and max(map(len, ticks)) < 10, ticks
    assert ">0.01<" in line_chart("l", "u", [Line("a", "train", [(0.0, 0.02), (1.0, 0.5)])], log=True)
    for only in ([(31.0, 0.5)], [(31.0, 0.5), (31.0, 0.6)]):
        drawn = line_chart("l", "u", [Line("a", "train", [point], marks=True) for point in only])
        assert drawn.count(">31<") == 1 and f'cx="{LEFT + WIDTH / 2:.1f}"' in drawn, "in the middle, under its step"


def test_what_a_slice_does_not_have_is_a_dash() -> None:
    assert (_finite(float("nan"), ".3f"), _finite(2.0, ".3f")) == ("-", "2.000")


def test_the_verb_writes_where_it_is_told(run_as_trained: Path, tmp_path: Path) -> None:
    job = load_config(ReportJob, [f"run={run_as_trained}", f"output={tmp_path}/deep/page.html"])
    assert verb.report(job) == f"{tmp_path}/deep/page.html" and Path(verb.report(job)).stat().st_size > 10_000
    with pytest.raises(ConfigError, match=names("output=page.txt .html")):
        load_config(ReportJob, [f"run={run_as_trained}", "output=page.txt"])
    with pytest.raises(ConfigError, match="not a run folder"):
        verb.report(load_config(ReportJob, [f"run={tmp_path}"]))


SCREENS = [
    (390, "dark"),
    *(
        pytest.param(width, scheme, marks=pytest.mark.campaign)
        for width, scheme in [(390, "light"), (1280, "light"), (1280, "dark")]
    ),
]


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_the_page_fits_the_screen_and_has_no_accessibility_fault(
    page: str, tmp_path: Path, width: int, scheme: str
) -> None:
    seen = open_page(page, tmp_path, width, scheme)
    assert seen.requests == [] and seen.violations == []
    assert seen.content <= seen.width == width
    assert seen.background == {"dark": "rgb(20, 24, 28)", "light": "rgb(255, 255, 255)"}[scheme]
