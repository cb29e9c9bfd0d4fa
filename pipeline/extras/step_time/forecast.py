"""Interpret a predicted step: its rate and price, the time of an epoch, the world size from which
more ranks do not pay, and the effect of changed settings.

This module does not import torch, so that tables are printed fast.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.extras.step_time.clocks import Span
from pipeline.planner.plan_record import PlanDescription
from pipeline.runtime.byte_counts import show_bytes

MIN_GAIN = 1.5  # rate of twice the ranks; below it, more ranks do not pay
SHOWN_PARTS = 6


@dataclass(frozen=True)
class PlanForecast:
    """Hold a job's predicted step and its epoch. num_samples: samples of an epoch; None without a data set."""

    world_size: int
    batch_size: int  # per rank
    step_ms: float
    samples_per_s: float
    parts: dict[str, float]
    spans: list[Span]
    source: str
    exposed_comms_ms: float
    fullest_bytes: float
    room_bytes: float
    num_samples: int | None = None
    price_per_hour: float | None = None
    warnings: tuple[str, ...] = ()
    # lines on the input and on saves, whose waits are part of step_ms
    overheads: tuple[str, ...] = ()

    @property
    def epoch_s(self) -> float | None:
        return None if self.num_samples is None else self.num_samples / self.samples_per_s

    @property
    def price_of_million(self) -> float | None:
        """Return the price of a million samples on all ranks."""
        if self.price_per_hour is None:
            return None
        return 1e6 / self.samples_per_s / 3600 * self.world_size * self.price_per_hour

    @property
    def limit(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def rank_seconds_of_million(self) -> float:
        return 1e6 * self.world_size / self.samples_per_s


@dataclass(frozen=True)
class WhatIf:
    """Hold the effect of a changed setting, or None if there is no plan or prediction; `note` has the reason."""

    words: str
    forecast: PlanForecast | None
    note: str = ""


def fullest(plan: PlanDescription) -> tuple[float, float]:
    """Return for the fullest rank the bytes of tables and layers, and the bytes that they may use."""
    on_gpu = bool(plan.usable_hbm_bytes)
    taken = max(load.hbm_bytes if on_gpu else load.ddr_bytes for load in plan.ranks)
    room = plan.usable_hbm_bytes if on_gpu else plan.usable_ddr_bytes
    return taken + plan.dense_bytes, room + plan.dense_bytes


def describe_forecast(forecast: PlanForecast) -> list[str]:
    """Return lines with the time and the parts of a step, the time of an epoch, and the source of the numbers."""
    shown = sorted(forecast.parts.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{name} {ms:.3g}" for name, ms in shown[:SHOWN_PARTS] if ms > 0)
    exposed = 100 * forecast.exposed_comms_ms / forecast.step_ms
    lines = [
        f"step        {forecast.step_ms:.4g} ms, {forecast.samples_per_s:,.0f} samples/s on {forecast.world_size} rank(s) of batch "
        f"{forecast.batch_size:,}: predicted, by the {forecast.source}",
        f"of these    {parts} ms; compute waits for communication {exposed:.0f} % of the step",
        f"memory      {show_bytes(forecast.fullest_bytes)} of {show_bytes(forecast.room_bytes)} on the fullest rank, tables, states and layers",
    ]
    lines += forecast.overheads
    if forecast.epoch_s is not None:
        price = (
            ""
            if forecast.price_of_million is None or forecast.num_samples is None
            else (
                f", {forecast.price_of_million * forecast.num_samples / 1e6:,.2f} at "
                f"hardware.price_per_hour={forecast.price_per_hour:g} per rank"
            )
        )
        lines.append(f"epoch       {show_duration(forecast.epoch_s)} for {forecast.num_samples:,} samples{price}")
    return [*lines, *(f"warning     {warning}" for warning in forecast.warnings)]


def describe_scaling(rows: Sequence[PlanForecast]) -> list[str]:
    """Return a table by world size, and the line that says where more ranks stop to pay,
    and why.
    """
    first = rows[0]
    priced, has_epoch = first.price_per_hour is not None, first.epoch_s is not None
    heads = ["ranks", "batch", "step ms", "samples/s", "speed-up", "efficiency", "memory", "rank-s/1M"]
    heads += (["epoch"] if has_epoch else []) + (["price/1M"] if priced else []) + ["most of it"]
    cells = [heads]
    for row in rows:
        speed_up = row.samples_per_s / first.samples_per_s
        efficiency = speed_up * first.world_size / row.world_size
        line = [
            f"{row.world_size}", f"{row.batch_size:,}", f"{row.step_ms:.4g}", f"{row.samples_per_s:,.0f}", f"{speed_up:.2f}x",
            f"{100 * efficiency:.0f} %", show_bytes(row.fullest_bytes), f"{row.rank_seconds_of_million:.3g}",
        ]  # fmt: skip
        line += [show_duration(row.epoch_s)] if row.epoch_s is not None else []
        line += [f"{row.price_of_million:.4g}"] if row.price_of_million is not None else []
        cells.append([*line, f"{row.limit} {100 * row.parts[row.limit] / row.step_ms:.0f} %"])
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return [*lines, where_it_stops(rows)]


def where_it_stops(rows: Sequence[PlanForecast]) -> str:
    """Describe the first world size from which twice the ranks give less than MIN_GAIN times the rate."""
    for before, after in itertools.pairwise(rows):
        doublings = max((after.world_size / before.world_size - 1), 1e-9)
        gain = after.samples_per_s / before.samples_per_s
        if gain < 1 + (MIN_GAIN - 1) * min(doublings, 1) and doublings > 0:
            share = 100 * after.parts[after.limit] / after.step_ms
            return (
                f"more ranks stop to pay at {before.world_size}: {after.world_size} give "
                f"{gain:.2f} times the samples/s, because {after.limit} takes {share:.0f} % of "
                "the step"
            )
    return f"up to {rows[-1].world_size} ranks each step of this table pays: twice the ranks give {MIN_GAIN:g} times the samples/s or more"


def describe_what_ifs(base: PlanForecast, what_ifs: Sequence[WhatIf]) -> list[str]:
    """Return one line for each changed setting; the largest gain is first."""
    found = sorted((what_if for what_if in what_ifs if what_if.forecast), key=lambda what_if: -_gain(base, what_if))
    width = max((len(what_if.words) for what_if in what_ifs), default=0)
    lines = [
        f"{what_if.words.ljust(width)}  {100 * (_gain(base, what_if) - 1):+6.1f} % samples/s  step {what_if.forecast.step_ms:.4g} ms  "
        f"memory {show_bytes(what_if.forecast.fullest_bytes)}"
        for what_if in found
        if what_if.forecast
    ]
    return [
        "what if (predicted, each change alone):",
        *lines,
        *(
            f"{what_if.words.ljust(width)}  not predicted: {what_if.note}"
            for what_if in what_ifs
            if what_if.forecast is None
        ),
    ]


def _gain(base: PlanForecast, what_if: WhatIf) -> float:
    assert what_if.forecast is not None
    return what_if.forecast.samples_per_s / base.samples_per_s


def show_duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
