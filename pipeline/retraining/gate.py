"""Decide whether a challenger may replace the champion, from both models' scores of the same rows.

Uses only arrays.

The NE of a model is its log loss divided by the entropy of the label rate (He et al. 2014, section
3). On the same rows the ratio of two models' NE is the ratio of their log losses. A paired
bootstrap gives its upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.registry import from_extra
from pipeline.config.retraining import GateConfig
from pipeline.data.quality import log_losses, normalized_entropy, probabilities

# rows are resampled in at most this many blocks of neighbours, because neighbours may depend on
# each other
MAX_BLOCKS = 10_000
SAMPLES_AT_ONCE = 50


@dataclass(frozen=True)
class Scores:
    """One model's scores of a window, in reading order: logits and labels [rows], slices: feature
    -> ids [rows].

    weights: of the rows; None: all 1. held: the scores of other labels, each with its rows. policy:
    what gate.policy compares (extras/off_policy).
    """

    logits: NDArray[np.float32]
    labels: NDArray[np.float32]
    slices: dict[str, NDArray[np.integer]] = field(default_factory=dict)
    weights: NDArray[np.float32] | None = None
    held: dict[str, HeldScores] = field(default_factory=dict)
    policy: Any = None

    @property
    def losses(self) -> NDArray[np.float64]:
        """Return [rows] log losses in nats, times the rows' weights."""
        losses = log_losses(self.logits, self.labels)
        return losses if self.weights is None else losses * self.weights

    @property
    def label_rate(self) -> float:
        """Return the mean label, weighted; 0 without rows."""
        counted = self.weights is None or self.weights.any()
        return float(np.average(self.labels, weights=self.weights)) if len(self.labels) and counted else 0.0

    @property
    def ne(self) -> float:
        weights = None if self.weights is None else self.weights.astype(np.float64)
        return normalized_entropy(log_losses(self.logits, self.labels), self.labels, weights)

    @property
    def calibration(self) -> float:
        """Return the sum of predictions divided by the sum of labels."""
        weights = 1.0 if self.weights is None else self.weights
        predicted = weights * probabilities(self.logits)
        return float(predicted.sum() / max(float((weights * self.labels).sum()), 1e-12))


@dataclass(frozen=True)
class HeldScores:
    """Scores of a label that may not get worse: losses [rows], each times its row's weight, and
    labels [rows].
    """

    losses: NDArray[np.float64]
    labels: NDArray[np.float32]


@dataclass(frozen=True)
class Finding:
    """One check: the value, the limit, and the sentence for log and ledger."""

    name: str
    passed: bool
    value: float
    limit: float
    text: str
    bound: str = "at most"  # the kind of limit


@dataclass(frozen=True)
class Verdict:
    findings: list[Finding]
    metrics: dict[str, float]

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    @property
    def reasons(self) -> list[str]:
        return [finding.text for finding in self.findings if not finding.passed]


def judge(challenger: Scores, champion: Scores | None, config: GateConfig, seed: int = 0) -> Verdict:
    """Compare the challenger with the champion. champion=None: the first version, which only has
    absolute limits.
    """
    metrics = {"challenger_ne": challenger.ne, "challenger_calibration": challenger.calibration}
    metrics["eval_rows"], metrics["eval_label_rate"] = float(len(challenger.labels)), challenger.label_rate
    findings = [_finite(challenger), _enough_rows(challenger, config)]
    if not all(finding.passed for finding in findings):
        return Verdict(findings, {name: value for name, value in metrics.items() if np.isfinite(value)})
    findings.append(_calibration(challenger, config))
    if champion is None:
        return Verdict([*findings, _absolute_ne(challenger, config)], metrics)
    assert np.array_equal(challenger.labels, champion.labels), "the two models scored other rows"
    metrics |= {"champion_ne": champion.ne, "champion_calibration": champion.calibration}
    worst = upper_bound_of_ratio(challenger.losses, champion.losses, config.confidence, config.bootstrap_samples, seed)
    metrics |= {"ne_ratio": challenger.ne / champion.ne, "ne_ratio_upper": worst}
    findings.append(_ne(metrics, config))
    findings += _slices(challenger, champion, config)
    findings += _held(challenger, champion, config, seed)
    if config.policy:
        judge_policy = from_extra("judge_policy", "gate.policy")
        finding, of_policy = judge_policy(challenger.policy, champion.policy, config, seed)
        findings, metrics = [*findings, finding], metrics | of_policy
    return Verdict(findings, metrics)


def _finite(challenger: Scores) -> Finding:
    bad = int(np.count_nonzero(~np.isfinite(challenger.logits)))
    return Finding("finite", bad == 0, bad, 0, f"{bad:,} of {len(challenger.logits):,} scores are not finite")


def _enough_rows(challenger: Scores, config: GateConfig) -> Finding:
    rows, rate = len(challenger.labels), challenger.label_rate
    text = f"the next window has {rows:,} rows with label rate {rate:.4f}; gate.min_rows={config.min_rows:,} rows with both labels are required"
    return Finding("rows", rows >= config.min_rows and 0.0 < rate < 1.0, rows, config.min_rows, text, "at least")


def _calibration(challenger: Scores, config: GateConfig) -> Finding:
    value, low, high = challenger.calibration, config.calibration_min, config.calibration_max
    is_within = low <= value <= high
    text = f"calibration {value:.4f} is {'' if is_within else 'not '}within {low:g} to {high:g}"
    bound = (low, "at least") if abs(value - low) < abs(value - high) else (high, "at most")
    return Finding("calibration", is_within, value, bound[0], text, bound[1])


def _absolute_ne(challenger: Scores, config: GateConfig) -> Finding:
    text = f"NE {challenger.ne:.4f} is not below gate.max_ne={config.max_ne:g}"
    return Finding("ne", challenger.ne < config.max_ne, challenger.ne, config.max_ne, text)


def _ne(metrics: dict[str, float], config: GateConfig) -> Finding:
    worst, limit = metrics["ne_ratio_upper"], 1.0 + config.ne_tolerance
    text = (
        f"NE {metrics['challenger_ne']:.4f}, the champion's {metrics['champion_ne']:.4f}: the "
        "ratio is "
        f"{metrics['ne_ratio']:.4f}, with {100 * config.confidence:g} % confidence at most "
        f"{worst:.4f}, and at most {limit:.4f} is allowed"
    )
    return Finding("ne", worst <= limit, worst, limit, text)


def _held(challenger: Scores, champion: Scores, config: GateConfig, seed: int) -> list[Finding]:
    """Check the held labels.

    The ratio of two models' losses on the same rows is the ratio of their NE.
    """
    findings = []
    for name, tolerance in config.held.items():
        ours, theirs, limit = challenger.held[name], champion.held[name], 1.0 + tolerance
        assert np.array_equal(ours.labels, theirs.labels), "the two models scored other rows"
        ratio, worst = 1.0, 1.0
        if theirs.losses.sum() > 0.0:
            ratio = float(ours.losses.sum() / theirs.losses.sum())
            worst = upper_bound_of_ratio(ours.losses, theirs.losses, config.confidence, config.bootstrap_samples, seed)
        text = (
            f"label {name}: NE is {ratio:.4f} times the champion's on {len(ours.losses):,} rows, with "
            f"{100 * config.confidence:g} % confidence at most {worst:.4f}, and at most "
            f"{limit:.4f} is allowed"
        )
        findings.append(Finding(f"held {name}", worst <= limit, worst, limit, text))
    return findings


def _slices(challenger: Scores, champion: Scores, config: GateConfig) -> list[Finding]:
    findings = []
    for name, tolerance in config.slices.items():
        worst, at, limit = 0.0, -1, 1.0 + tolerance
        ids = champion.slices[name]
        counts = np.bincount(ids)
        clicks = np.bincount(ids, weights=champion.labels, minlength=len(counts))
        challenger_losses = np.bincount(ids, weights=challenger.losses, minlength=len(counts))
        champion_losses = np.bincount(ids, weights=champion.losses, minlength=len(counts))
        for value in np.flatnonzero((counts >= config.slice_min_rows) & (clicks > 0) & (clicks < counts)):
            ratio = float(challenger_losses[value] / champion_losses[value])
            worst, at = (ratio, int(value)) if ratio > worst else (worst, at)
        text = f"slice {name}: NE of id {at} ({int(counts[at]) if at >= 0 else 0:,} rows) is {worst:.4f} times the champion's; at most {limit:.4f} is allowed"
        findings.append(Finding(f"slice {name}", worst <= limit, worst, limit, text))
    return findings


def upper_bound_of_ratio(
    challenger_losses: NDArray[np.float64],
    champion_losses: NDArray[np.float64],
    confidence: float,
    num_samples: int,
    seed: int,
) -> float:
    """Return the one-sided upper bound of sum(ours) / sum(theirs).

    It is a paired percentile bootstrap (Efron & Tibshirani 1993) over blocks of neighbouring rows.
    """
    num_blocks = min(len(challenger_losses), MAX_BLOCKS)
    edges = np.linspace(0, len(challenger_losses), num_blocks + 1).astype(np.int64)[:-1]
    sums = np.stack([np.add.reduceat(challenger_losses, edges), np.add.reduceat(champion_losses, edges)], axis=1)
    random = np.random.default_rng(seed)
    share = np.full(num_blocks, 1.0 / num_blocks)
    ratios = []
    for begin in range(0, num_samples, SAMPLES_AT_ONCE):
        sampled = random.multinomial(num_blocks, share, size=min(SAMPLES_AT_ONCE, num_samples - begin)) @ sums
        ratios.append(sampled[:, 0] / sampled[:, 1])
    return float(np.quantile(np.concatenate(ratios), confidence))
