"""Decide whether a window's data can be used to train and to judge, from its statistics and those
of earlier windows.
"""

from __future__ import annotations

from datetime import datetime
from statistics import median

from pipeline.config.retraining import DataChecksConfig
from pipeline.retraining.gate import Finding
from pipeline.retraining.statistics import WindowStatistics
from pipeline.retraining.windows import parse_time


def check_data(now: WindowStatistics, history: list[WindowStatistics], config: DataChecksConfig) -> list[Finding]:
    """Return the findings of checks that have enough history. history: accepted windows, newest
    first.
    """
    first = parse_time(config.first) if config.first else None
    past = [
        earlier
        for earlier in history
        if first is None or (earlier.begin and datetime.fromisoformat(earlier.begin) >= first)
    ][: config.trailing]
    findings = [_labels(now)]
    if now.outside_share is not None and config.outside_share is not None:
        share, limit = now.outside_share, config.outside_share
        text = f"{share:.1%} of the rows have a timestamp outside the window; at most {limit:.1%} are allowed"
        findings.append(Finding("outside_share", share <= limit, share, limit, text))
    if config.repeated_share is not None and (history or now.repeated_of):
        findings.append(_repeated(now, history[: config.trailing], config.repeated_share))
    if len(past) < config.min_history:
        return findings
    for name, change in (("rows", config.row_count_change), ("label_rate", config.label_rate_change)):
        if change is not None:
            findings.append(_change(name, now, past, change))
    for name, rise in (("empty_share", config.unknown_share_rise), ("distance", config.distance_rise)):
        if rise is not None:
            # The share of unknown values grows with the windows that the champion has missed; the
            # distance does not.
            allowed = rise * (1 + now.age) if name == "empty_share" else rise
            findings.append(_rise(name, now, past, allowed, config.min_history))
    before = [earlier.champion_ne for earlier in past if earlier.champion_ne is not None]
    if config.champion_ne_rise is not None and now.champion_ne is not None and len(before) >= config.min_history:
        findings.append(_champion(now.champion_ne, before, config.champion_ne_rise * (1 + now.age)))
    return findings


def _labels(now: WindowStatistics) -> Finding:
    text = f"label rate {now.label_rate:g} of {now.rows:,} rows: nothing can be learned from one kind of label"
    return Finding("labels", now.rows > 0 and 0.0 < now.label_rate < 1.0, now.label_rate, 1.0, text)


def _change(name: str, now: WindowStatistics, past: list[WindowStatistics], limit: float) -> Finding:
    value, usual = getattr(now, name), median(getattr(earlier, name) for earlier in past)
    change = value / usual - 1.0
    shown = (f"{value:,}", f"{usual:,.0f}") if name == "rows" else (f"{value:.4f}", f"{usual:.4f}")
    text = f"{name.replace('_', ' ')} {shown[0]} differs by {change:+.1%} from the median {shown[1]}; at most {limit:.0%} are allowed"
    return Finding(name, abs(change) <= limit, change, limit, text)


def _rise(name: str, now: WindowStatistics, past: list[WindowStatistics], limit: float, least: int) -> Finding:
    """Check the feature with the largest rise above its median.

    For the distance, the median is multiplied by the windows apart.
    """
    values: dict[str, float] = getattr(now, name)
    apart = now.apart if name == "distance" else 1

    def seen(feature: str) -> list[float]:
        return [
            getattr(earlier, name)[feature] / (earlier.apart if name == "distance" else 1)
            for earlier in past
            if feature in getattr(earlier, name)
        ]

    usual = {feature: median(seen(feature)) * apart for feature in values if len(seen(feature)) >= least}
    rises = {feature: values[feature] - usual[feature] for feature in usual}
    if not rises:
        return Finding(name, True, 0.0, limit, "")
    worst = max(rises, key=lambda feature: rises[feature])
    over = [feature for feature, rise in rises.items() if rise > limit]
    before = "window before" if apart == 1 else f"accepted window {apart} before"
    what = "rows without a known value" if name == "empty_share" else f"distance from the {before}"
    text = (
        f"feature {worst}: {what} {values[worst]:.3f}, {'median' if apart == 1 else f'{apart} times the median'} "
        f"{usual[worst]:.3f}; a rise of at most {limit:g} is "
        f"allowed{f' (and {len(over) - 1} more features)' if len(over) > 1 else ''}"
    )
    return Finding(name, not over, rises[worst], limit, text)


def _repeated(now: WindowStatistics, past: list[WindowStatistics], limit: float) -> Finding:
    usual = median(earlier.repeated_share for earlier in past) if past else 0.0
    text = (
        f"{now.repeated_share:.1%} of the rows are also in window {now.repeated_of}; the median "
        f"is {usual:.1%}, and at most {limit:.0%} more are allowed"
    )
    return Finding("repeated_share", now.repeated_share - usual <= limit, now.repeated_share, usual + limit, text)


def _champion(now: float, before: list[float], limit: float) -> Finding:
    usual = median(before)
    rise = now / usual - 1.0
    text = (
        f"the champion's NE on these rows is {now:.4f}, {rise:+.1%} from the median {usual:.4f} "
        f"of windows that were new to their champions; at most {limit:+.0%} is allowed. Check the "
        "labels"
    )
    return Finding("champion_ne", rise <= limit, rise, limit, text)
