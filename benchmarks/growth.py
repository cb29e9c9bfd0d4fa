"""Measure how the costs of each stage grow with what grows it: rows, distinct values, tables, ranks, batches, requests:

    python -m benchmarks.growth [--stages save load ...] [--repeats 3] --folder DIR --output growth.json [--picture growth.svg]
    python -m benchmarks.growth --report --output growth.json --picture growth.svg

Each point is a process of its own (benchmarks/growth_stages.py) and costs CPU-seconds, which others on the machine move less than
the clock, and peak memory. The exponent is that of the last two sizes with the cost of the first taken off all of them,
log((c2 - c0) / (c1 - c0)) / log((n2 - n0) / (n1 - n0)): a start costs the same at every size (n0 is the cheapest size). `flat` is a cost that grew by less
than a quarter from the first size to the last. With --repeats a stage's sizes take turns, and of each point the least CPU-seconds and the most memory count:
what else the machine does adds to the first, and an exponent is made of differences. Points are kept in --output one by one, and those that are there are not run
again. --folder takes up to 35 GB for all of it; --most leaves out larger sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.about import about
from benchmarks.growth_stages import STAGES, Stage
from pipeline.devices.cpu.process import use_huge_pages

FLAT = 1.25


@dataclass(frozen=True)
class Point:
    stage: str
    size: int
    cpu_seconds: float
    peak_mib: float


def read_points(path: Path) -> list[Point]:
    return [Point(**one) for one in json.loads(path.read_text())["points"]] if path.exists() else []


def run_point(stage: str, size: int, folder: Path) -> Point:
    """Raises CalledProcessError where the stage fails."""
    command = [sys.executable, "-m", "benchmarks.growth_stages", stage, str(size), str(folder)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Point(**json.loads(answer.stdout.strip().splitlines()[-1]))


def run(stages: list[str], folder: Path, output: Path, most: int | None, repeats: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    use_huge_pages()  # as verbs do; each point's process inherits it
    for name in stages:
        there = {one.size for one in read_points(output) if one.stage == name}
        sizes = [size for size in STAGES[name].sizes if size not in there and not (most and size > most)]
        for _ in range(repeats):
            for size in sizes:
                try:
                    found = run_point(name, size, folder)
                except subprocess.CalledProcessError as error:  # the others are worth having
                    print(f"{name:16}{size:>14,}  ended with {error.returncode}", flush=True)
                    break
                points = merged(read_points(output), found)
                found_points = [asdict(one) for one in points]
                output.write_text(json.dumps({"about": about(), "points": found_points}, indent=1))
                print(f"{name:16}{size:>14,}{found.cpu_seconds:>12.3g} s{found.peak_mib:>10,.0f} MiB", flush=True)


def merged(points: list[Point], found: Point) -> list[Point]:
    """`points` with the least time and the most memory of both where one is of the same stage and size, else with `found` behind them."""
    same = [one for one in points if (one.stage, one.size) == (found.stage, found.size)]
    if not same:
        return [*points, found]
    seconds, mib = min(same[0].cpu_seconds, found.cpu_seconds), max(same[0].peak_mib, found.peak_mib)
    return [replace(one, cpu_seconds=seconds, peak_mib=mib) if one is same[0] else one for one in points]


def exponent(sizes: list[int], costs: list[float]) -> float | None:
    """Of the growth from the last size but one to the last, from the cheapest size on; None: flat, NaN: fewer than three of them."""
    cheapest = costs.index(min(costs))
    sizes, costs = sizes[cheapest:], costs[cheapest:]
    if costs[-1] < FLAT * costs[0]:
        return None
    if len(sizes) < 3:
        return math.nan
    grown = [cost - costs[0] for cost in costs[-2:]]
    steps = [size - sizes[0] for size in sizes[-2:]]
    if grown[0] <= 0:
        return math.inf
    return math.log(grown[1] / grown[0]) / math.log(steps[1] / steps[0])


def curves(points: list[Point]) -> list[tuple[Stage, list[Point]]]:
    found = []
    for name, stage in STAGES.items():
        own = sorted((one for one in points if one.stage == name), key=lambda one: one.size)
        if own:
            found.append((stage, own))
    return found


def _show(number: float | None, most: float = math.inf) -> str:
    """With (!) behind an exponent above `most`."""
    text = "flat" if number is None else "-" if math.isnan(number) else f"{number:.2f}"
    return f"{text} (!)" if number is not None and number > most else text


def _exponents(own: list[Point]) -> tuple[float | None, float | None]:
    sizes = [one.size for one in own]
    return exponent(sizes, [one.cpu_seconds for one in own]), exponent(sizes, [one.peak_mib for one in own])


def report(points: list[Point]) -> str:
    lines = ["| stage | sizes | CPU-seconds | exponent | peak MiB | exponent |", "|---|---|---|---|---|---|"]
    for stage, own in curves(points):
        by_time, by_memory = _exponents(own)
        lines.append(
            f"| {stage.name} | {', '.join(f'{one.size:,}' for one in own)} {stage.unit} "
            f"| {', '.join(f'{one.cpu_seconds:.3g}' for one in own)} | {_show(by_time, stage.most)} "
            f"| {', '.join(f'{one.peak_mib:,.0f}' for one in own)} | {_show(by_memory, stage.most)} |"
        )
    return "\n".join(lines)


def _short(size: int) -> str:
    return next((f"{size / unit:.3g}{name}" for unit, name in ((10**6, "M"), (1000, "k")) if size >= unit), str(size))


def draw(points: list[Point], path: str) -> None:
    """CPU-seconds and memory by size, a panel a stage; the dotted line grows as the size does."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = curves(points)
    figure, panels = pyplot.subplots(-(-len(found) // 4), 4, figsize=(13, 2.6 * -(-len(found) // 4)), squeeze=False)
    for axes in panels.flat[len(found) :]:
        axes.axis("off")
    for axes, (stage, own) in zip(panels.flat, found, strict=False):
        sizes, seconds = [one.size for one in own], [one.cpu_seconds for one in own]
        axes.loglog(sizes, seconds, "o-", color="C0", markersize=4)
        axes.loglog(sizes, [seconds[-1] * size / sizes[-1] for size in sizes], ":", color="0.6", linewidth=1)
        axes.set_ylim(min(seconds) / 3, max(seconds) * 3)
        memory = axes.twinx()
        memory.loglog(sizes, [max(one.peak_mib, 1) for one in own], "s--", color="C1", markersize=3, linewidth=1)
        memory.set_ylim(max(min(one.peak_mib for one in own), 1) / 3, max(one.peak_mib for one in own) * 3)
        axes.set_xticks(sizes, [_short(size) for size in sizes])
        for each in (axes.xaxis, axes.yaxis, memory.yaxis):
            each.set_minor_formatter("")
        axes.tick_params(axis="y", labelcolor="C0", labelsize=7)
        memory.tick_params(axis="y", labelcolor="C1", labelsize=7)
        axes.tick_params(axis="x", labelsize=7)
        axes.set_title(f"{stage.name}: {' and '.join(map(_show, _exponents(own)))}", fontsize=9)
        axes.set_xlabel(stage.unit, fontsize=8)
    figure.suptitle("CPU-seconds (blue, left) and peak MiB (orange, right), with the exponents of both", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.endswith("svg") else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument(
        "--folder", type=Path, default=Path("growth"), help="where data sets, runs and checkpoints lie meanwhile"
    )
    parser.add_argument("--output", type=Path, default=Path("growth.json"))
    parser.add_argument("--most", type=int, help="the largest size that is run")
    parser.add_argument("--repeats", type=int, default=1, help="of each point, of which the least time counts")
    parser.add_argument("--report", action="store_true", help="print what the output file holds")
    parser.add_argument("--picture", metavar="FILE", help="draw it, as SVG or PNG by the name's end")
    options: Any = parser.parse_args()
    if not options.report:
        run(options.stages, options.folder.resolve(), options.output, options.most, options.repeats)
    points = read_points(options.output)
    if options.picture:
        draw(points, options.picture)
    print(report(points))


if __name__ == "__main__":
    main()
