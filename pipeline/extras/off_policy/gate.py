"""Refuse a challenger whose value as a policy is not above the champion's: `gate.policy` of retrain."""

from __future__ import annotations

import numpy as np

from pipeline.config.retraining import GateConfig
from pipeline.extras.off_policy.estimate import Decisions, effective_size, intervals, why_unreliable
from pipeline.retraining.gate import Finding


def judge_policy(
    challenger: Decisions, champion: Decisions, config: GateConfig, seed: int = 0
) -> tuple[Finding, dict[str, float]]:
    """Compare both models on the same decisions. The difference of their doubly robust values is
    one mean over decisions, so what both have in common cancels."""
    assert np.array_equal(challenger.reward, champion.reward), "the two models scored other rows"
    ours, theirs = challenger.doubly_robust, champion.doubly_robust
    # the lower bound of a two-sided interval, so that one side has the confidence of the gate
    confidence = 2.0 * config.confidence - 1.0
    pairs = [(ours - theirs, np.ones(len(ours)))]
    gain = intervals(pairs, challenger.unit, confidence, config.bootstrap_samples, seed)[0]
    metrics = {
        "challenger_policy_value": float(ours.mean()),
        "champion_policy_value": float(theirs.mean()),
        "policy_gain": gain.value,
        "policy_gain_lower": gain.low,
        "policy_effective_rows": effective_size(challenger.weights),
    }
    text = (
        f"serving by the challenger would earn {ours.mean():.5f} a decision, by the champion {theirs.mean():.5f}: with "
        f"{100 * config.confidence:g} % confidence the gain is at least {gain.low:+.5f}, and it must be above "
        f"gate.policy_gain={config.policy_gain:g} ({len(ours):,} decisions, worth {metrics['policy_effective_rows']:,.0f} "
        "at equal weights)"
    )
    passed = gain.low > config.policy_gain
    if passed and (why := why_unreliable(challenger.weights)):
        passed, text = False, f"{text}; but the interval is not reliable: {why}"
    return Finding("policy", passed, gain.low, config.policy_gain, text, "above"), metrics
