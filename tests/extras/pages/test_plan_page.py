from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.extras.pages.plan_page import MAX_MAPPED, page_path, render_page
from pipeline.extras.tiers.forecast import TierForecast
from pipeline.runtime.byte_counts import show_bytes
from tests.planner.plans import drawn_plan

VOID = ("meta",)


class Balanced(HTMLParser):
    """Counts what a page holds, and fails where an element is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> Balanced:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def charts(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.S)]


@pytest.mark.parametrize(("num_tables", "num_ranks"), [(1, 1), (26, 2), (850, 128)])
def test_a_page_is_well_formed_and_loads_nothing(num_tables: int, num_ranks: int) -> None:
    page = render_page("a <plan> & more", *drawn_plan(num_tables, num_ranks))
    tags = parsed(page).tags
    assert not {"script", "link", "img", "iframe", "object"} & tags.keys()
    assert not re.search(r"(src|href)=|url\(|@import|https?:", page)
    assert "a &lt;plan&gt; &amp; more" in page
    assert len(page) < 1_000_000


@pytest.mark.parametrize(("num_tables", "num_ranks"), [(26, 2), (850, 128)])
def test_every_mark_says_what_it_is_and_lies_inside_its_chart(num_tables: int, num_ranks: int) -> None:
    drawn = charts(render_page("p", *drawn_plan(num_tables, num_ranks)))
    assert len(drawn) == 4  # HBM, host memory, time, map
    for chart in drawn:
        assert chart.get("role") == "img" and chart.get("aria-label")
        _, _, width, height = map(float, (chart.get("viewBox") or "").split())
        marks = chart.findall("rect")
        assert marks
        for mark in marks:
            title = mark.find("title")
            assert title is not None and "rank" in (title.text or "")
            x, y, wide, high = (float(mark.get(name) or "nan") for name in ("x", "y", "width", "height"))
            assert x >= 0 and x + wide <= width + 0.01 and y >= 0 and y + high <= height + 0.01


def test_memory_and_time_columns_add_up_to_the_loads() -> None:
    plan, shardings = drawn_plan(26, 4)
    hbm, host, time, _ = charts(render_page("p", plan, shardings))
    for chart, loads in (
        (hbm, [load.hbm_bytes for load in plan.ranks]),
        (host, [load.ddr_bytes for load in plan.ranks]),
        (time, [load.cost_ms for load in plan.ranks]),
    ):
        heights: dict[str, float] = {}
        for mark in chart.findall("rect"):
            heights[mark.get("x") or ""] = heights.get(mark.get("x") or "", 0) + float(mark.get("height") or 0)
        ratios = [height / load for height, load in zip(heights.values(), loads, strict=True)]
        assert max(ratios) == pytest.approx(min(ratios), rel=0.01)


def test_the_map_draws_each_table_on_its_ranks_and_small_ones_together() -> None:
    plan, shardings = drawn_plan(30, 8)
    page = render_page("p", plan, shardings)
    titles = {title.text or "" for title in charts(page)[-1].iter("title")}
    assert "smaller tables" not in page
    for choice in plan.tables:
        mine = [title for title in titles if title.startswith(f"{choice.name}, ")]
        ranks = {rank for title in mine for rank in _ranks_of(title)}
        assert ranks == set(choice.ranks), choice
    many, shardings = drawn_plan(300, 8)
    page = render_page("p", many, shardings)
    assert f"<summary>{300 - MAX_MAPPED} smaller tables</summary>" in page
    rows = [text.text or "" for text in charts(page)[-1].findall("text")]
    grouped = sum(int(row.split()[0]) for row in rows if re.fullmatch(r"\d+ smaller tables", row))
    assert grouped == 300 - MAX_MAPPED


def _ranks_of(title: str) -> set[int]:
    numbers = [int(number) for number in re.findall(r"\d+", title.split(", ")[1].split(":")[0])]
    return set(range(numbers[0], numbers[-1] + 1))


def test_both_objectives_gap_and_torchrecs_result_are_told_where_they_are_known() -> None:
    plan, shardings = drawn_plan(5, 2)
    page = render_page("p", plan, shardings)
    objective = plan.objective
    for text in (
        f"{objective.max_rank_ms:.4g} ms",
        f"{objective.critical_path_ms:.4g} ms",
        "1.23 %",
        "5.6 ms",
        "4.5 ms",
    ):
        assert text in page
    unknown = replace(plan, objective=replace(objective, gap=None, lower_bound_ms=None), torchrec_objective=None)
    page = render_page("p", unknown, shardings)
    assert "best possible" not in page and "TorchRec" not in page


def test_the_head_says_time_memory_and_gap_and_the_foot_when_and_by_what() -> None:
    plan, shardings = drawn_plan(5, 2)
    page = render_page("p", plan, shardings, "2026-11-22 10:00 UTC by `python -m pipeline plan a<b`")
    assert len(re.findall("<li><b>", page.split("<h2>")[0])) == 3
    other = plan.torchrec_objective
    assert other is not None
    share = 1 - plan.objective.critical_path_ms / other.critical_path_ms
    assert (
        f"{100 * abs(share):.0f} % {'less' if share > 0 else 'more'} than TorchRec" in page
        or "as much as TorchRec" in page
    )
    foot = page[page.index("<footer") :]
    assert "2026-11-22" in foot and "a&lt;b" in foot and "torch 2" in foot
    assert '<div class="pair">' in page and '<div class="pair">' not in render_page("p", *drawn_plan(26, 128))


def test_no_colour_stands_for_two_things() -> None:
    css = (Path(render_page.__code__.co_filename).with_name("plan.css")).read_text()
    for block in css.split("@media"):
        colours = re.findall(r"--[a-z_]+: (#[0-9a-f]{6})", block)
        assert len(colours) >= 8 and [each for each, count in Counter(colours).items() if count > 1] == []


def test_a_cpu_plan_has_one_tier_and_reasons_are_escaped() -> None:
    page = render_page("p", *drawn_plan(5, 2, device="cpu"))
    assert len(charts(page)) == 3 and "HBM of each rank" not in page and "host memory of each rank" in page
    assert "&lt;row_wise&gt; &amp; &#34;so&#34;" in page or "&lt;table_wise&gt; &amp; &#34;so&#34;" in page


def test_a_limit_far_above_the_columns_is_said_in_place_of_drawn() -> None:
    plan, shardings = drawn_plan(5, 2, device="cpu")
    roomy = replace(plan, usable_ddr_bytes=100 * plan.usable_ddr_bytes)
    memory = ElementTree.tostring(charts(render_page("p", roomy, shardings))[0], encoding="unicode")
    assert "far above this scale" in memory and 'class="limit"' not in memory


def test_the_page_is_next_to_its_plan_and_is_rendered_without_torch() -> None:
    assert page_path("s3://b/plans/a.b.json") == "s3://b/plans/a.b.html"
    assert "</html>" in render_page("p", *drawn_plan(3, 2))
    code = "import sys, pipeline.extras.pages.plan_page; assert not {'torch', 'torchrec'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tables_on_ssd_have_a_chart_of_their_own() -> None:
    plan, shardings = drawn_plan(4, 2)
    first, *others = plan.tables
    ranks = [replace(load, ssd_bytes=(40 + load.rank) << 30) for load in plan.ranks]
    stored = replace(
        plan, tables=[replace(first, compute_kernel="key_value"), *others], ranks=ranks, usable_ssd_bytes=1 << 40
    )
    page = render_page("on SSD", stored, shardings)
    assert "SSD: rank 1 is the fullest, 41.00 GiB of 1,024.00 GiB for tables" in page
    assert "SSD: rank" not in render_page("in memory", plan, shardings)


def test_tables_in_tiers_are_listed_with_hits_and_reads_and_count_their_slots_in_memory() -> None:
    plan, shardings = drawn_plan(4, 2)
    first, *others = plan.tables
    tiers = TierForecast(slots=first.num_embeddings // 4, hit_rate=0.875, rows_a_step=1234)
    page = render_page("tiers", replace(plan, tables=[replace(first, tiers=tiers), *others]), shardings)
    for text in ("Tables on an SSD", "87.5 %", "1,234", f"{first.num_embeddings // 4:,}", show_bytes(tiers.read_bytes)):
        assert text in page
    assert "Tables on an SSD" not in render_page("memory", plan, shardings)


def test_the_input_is_the_first_phase() -> None:
    plan, shardings = drawn_plan(4, 2)
    page = render_page("phases", plan, shardings)
    assert page.index("input dist") < page.index("forward compute") < page.index("backward comms")
    assert f"input dist: {plan.ranks[1].input_dist_ms:.4g} ms" in page and "the five phases" in page
