"""Find the smallest world size and hardware with which a job reaches a target rate, by planning and
predicting one size after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from pipeline.config.jobs.train import PlanJob
from pipeline.config.planner import HardwareConfig
from pipeline.extras.step_time.forecast import PlanForecast, show_duration
from pipeline.extras.step_time.plan_forecast import Prepare, forecast_of, plan_job
from pipeline.runtime.errors import ConfigError, UserError
from pipeline.runtime.logs import get_logger

DAY_S = 86_400.0
# times the rate of half the ranks; below it twice in a row, larger sizes are not tried
MIN_GAIN = 1.05
# of the tried plans; the chosen size is planned again with the job's settings
COARSE_GAP, COARSE_S = 0.05, 15.0

logger = get_logger(__name__)
Predict = Callable[[PlanJob], PlanForecast]


@dataclass(frozen=True)
class Target:
    """Hold a target rate, and the samples of an epoch if they are known."""

    samples_per_s: float
    num_samples: int | None

    def epochs_per_day(self, samples_per_s: float) -> float | None:
        return None if self.num_samples is None else samples_per_s * DAY_S / self.num_samples


@dataclass(frozen=True)
class Tried:
    """Hold one world size of one hardware. `forecast` is None if there is no plan or no prediction."""

    hardware: str
    world_size: int
    forecast: PlanForecast | None
    note: str
    reaches: bool = False

    @property
    def rank_hours(self) -> float:
        """Return the rank hours of a million samples."""
        assert self.forecast is not None
        return self.forecast.rank_seconds_of_million / 3600


def target_of(job: PlanJob, num_samples: int | None) -> Target:
    """Return the target. num_samples: samples of the data set's train split.

    Raises ConfigError if an epoch's samples are unknown.
    """
    target = job.target
    samples = target.num_samples or num_samples
    if target.samples_per_s is not None:
        return Target(target.samples_per_s, samples)
    assert target.epochs_per_day is not None
    if samples is None:
        raise ConfigError(
            f"target.epochs_per_day={target.epochs_per_day:g}: there is no data set at {job.data.path} that says how many samples an "
            "epoch has; set target.num_samples=<samples>, or target.samples_per_s=<rate>"
        )
    return Target(target.epochs_per_day * samples / DAY_S, samples)


def reach_target(
    job: PlanJob, num_samples: int | None, hardware: Mapping[str, HardwareConfig], prepare: Prepare
) -> tuple[PlanJob, list[str]]:
    """Return the job on the smallest hardware that reaches job.target, and a table of the tried
    sizes.

    Raises:
        ConfigError: no hardware reaches the target, or the samples of an epoch are unknown.
    """

    def predict(other: PlanJob) -> PlanForecast:
        logger.info("target      %d x %s", other.world_size, other.hardware.name)
        return forecast_of(other, plan_job(other, prepare, suggests=False))

    target = target_of(job, num_samples)
    tried = find_target(job, target, hardware, predict)
    lines = describe_target(target, tried)
    best = smallest(tried)
    if best is None:
        raise ConfigError("\n".join([lines[-1], *lines[:-1]]))
    return at_size(job, hardware[best.hardware], best.world_size), lines


def find_target(job: PlanJob, target: Target, hardware: Mapping[str, HardwareConfig], predict: Predict) -> list[Tried]:
    """Return the tried sizes of each hardware in order.

    The last one is the smallest that reaches the target, if any.
    """
    return [tried for name in hardware for tried in _try_hardware(job, target, hardware[name], predict)]


def smallest(tried: list[Tried]) -> Tried | None:
    """Return the size with the fewest ranks that reaches the target. Of equal sizes take the
    cheapest if all have a price, otherwise the fastest.
    """
    reaching = [each for each in tried if each.reaches and each.forecast]
    return min(reaching, key=lambda each: (each.world_size, _cost(each, reaching)), default=None)


def cheapest(tried: list[Tried]) -> Tried | None:
    """Return the size that reaches the target with the lowest price of a sample. Return None if
    some sizes have no price.
    """
    reaching = [each for each in tried if each.reaches and each.forecast]
    if not reaching or any(each.forecast is None or each.forecast.price_of_million is None for each in reaching):
        return None
    return min(reaching, key=lambda each: _cost(each, reaching))


def _cost(each: Tried, all_of_them: list[Tried]) -> float:
    prices = [other.forecast.price_of_million if other.forecast else None for other in all_of_them]
    assert each.forecast
    price = each.forecast.price_of_million
    return price if price is not None and None not in prices else each.rank_hours


def at_size(job: PlanJob, hardware: HardwareConfig, world_size: int) -> PlanJob:
    """Return the job on other hardware.

    If the name of the job's plan file contains the old hardware's name, the new name replaces it.
    """
    price = hardware.price_per_hour if hardware.price_per_hour is not None else job.target.prices.get(hardware.name)
    old, new = f"{job.hardware.name}x{job.world_size}", f"{hardware.name}x{world_size}"
    plan_file = job.planner.plan_file.replace(old, new)
    return replace(
        job,
        hardware=replace(hardware, price_per_hour=price),
        world_size=world_size,
        planner=replace(job.planner, plan_file=plan_file),
    )


def sizes_to_try(global_batch_size: int, num_streams: int, ranks_per_host: int, most: int) -> list[int]:
    """Return world sizes that divide the batch and the reader's streams, and fill either complete
    hosts or a part of one host.
    """
    shared = math.gcd(global_batch_size, num_streams)
    divisors = (size for size in range(1, min(most, shared) + 1) if shared % size == 0)
    return [size for size in divisors if size <= ranks_per_host or size % ranks_per_host == 0]


def _try_hardware(job: PlanJob, target: Target, hardware: HardwareConfig, predict: Predict) -> Iterator[Tried]:
    """Double the size until the target is reached, then bisect between this size and the size before."""
    streams, most = job.data.reader.num_streams, job.target.max_world_size
    sizes = sizes_to_try(job.trainer.micro_batch_size, streams, hardware.ranks_per_host or 8, most)
    below, rates = -1, [0.0]
    index = 0
    while index < len(sizes):
        tried = _try_size(job, target, hardware, sizes[index], predict)
        yield tried
        if tried.reaches:
            break
        below = index
        rates.append(tried.forecast.samples_per_s if tried.forecast else 0.0)
        if len(rates) > 2 and rates[-3] and rates[-1] < MIN_GAIN * rates[-2] < MIN_GAIN**2 * rates[-3]:
            return
        index = next((later for later in range(index + 1, len(sizes)) if sizes[later] >= 2 * sizes[index]), len(sizes))
    else:
        return
    above = index
    while above - below > 1:
        middle = (above + below) // 2
        tried = _try_size(job, target, hardware, sizes[middle], predict)
        yield tried
        above, below = (middle, below) if tried.reaches else (above, middle)


def _try_size(job: PlanJob, target: Target, hardware: HardwareConfig, world_size: int, predict: Predict) -> Tried:
    other = at_size(job, hardware, world_size)
    planner = other.planner
    gap, seconds = max(COARSE_GAP, planner.gap_tolerance), min(COARSE_S, planner.timeout_s)
    other = replace(other, planner=replace(planner, gap_tolerance=gap, timeout_s=seconds))
    try:
        forecast = predict(other)
    except UserError as error:
        return Tried(hardware.name, world_size, None, str(error).splitlines()[0].partition(": ")[0])
    reaches = forecast.samples_per_s >= target.samples_per_s
    share = 100 * forecast.samples_per_s / target.samples_per_s
    return Tried(hardware.name, world_size, forecast, "reaches it" if reaches else f"{share:.0f} % of it", reaches)


def describe_target(target: Target, tried: list[Tried]) -> list[str]:
    """Return a table of the tried sizes, and lines with the smallest and the cheapest."""
    priced = any(each.forecast and each.forecast.price_of_million is not None for each in tried)
    heads = [
        "hardware",
        "ranks",
        "step ms",
        "samples/s",
        "epochs/day",
        "epoch",
        *(["price of it"] if priced else []),
        "target",
    ]
    cells = [heads]
    for each in tried:
        cells.append([each.hardware, f"{each.world_size}", *_numbers(target, each, priced), each.note])
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in (0, len(heads) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    goal = f"target      {target.samples_per_s:,.0f} samples/s"
    if target.num_samples is not None:
        goal += f": {target.epochs_per_day(target.samples_per_s):.3g} epochs per day of {target.num_samples:,} samples"
    return [goal, *lines, *_verdict(tried)]


def _numbers(target: Target, each: Tried, priced: bool) -> list[str]:
    forecast = each.forecast
    if forecast is None:
        return [""] * (5 if priced else 4)
    epochs = target.epochs_per_day(forecast.samples_per_s)
    price = forecast.price_of_million
    of_epoch = None if price is None or target.num_samples is None else price * target.num_samples / 1e6
    return [
        f"{forecast.step_ms:.4g}",
        f"{forecast.samples_per_s:,.0f}",
        "" if epochs is None else f"{epochs:.3g}",
        "" if target.num_samples is None else show_duration(target.num_samples / forecast.samples_per_s),
        *(["" if of_epoch is None else f"{of_epoch:,.2f}"] if priced else []),
    ]


def _verdict(tried: list[Tried]) -> Iterator[str]:
    found, by_price = smallest(tried), cheapest(tried)
    if found is None:
        best = max(
            (each for each in tried if each.forecast),
            key=lambda each: each.forecast.samples_per_s if each.forecast else 0.0,
            default=None,
        )
        near = f"; nearest is {best.world_size} x {best.hardware} with {best.note}" if best else ""
        yield f"no hardware that was tried reaches the target{near}"
        return
    yield f"smallest    {found.world_size} x {found.hardware}"
    if by_price is not None and by_price is not found:
        yield f"cheapest    {by_price.world_size} x {by_price.hardware}"
