"""Define the policies that choose an action by a model's scores, and the settings of their evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.registry import read_settings
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_within

Floats = NDArray[np.float64]
KINDS = ("greedy", "softmax", "epsilon_greedy")


@dataclass
class PolicyConfig:
    """Serve by the scores (logits) of a model.

    greedy: the candidate with the best score; equal scores share. softmax: a candidate's
    probability is proportional to exp(score / temperature). epsilon_greedy: any candidate with
    probability `epsilon`, otherwise the best.

    action: the features that change with the action, the one that identifies it first. The
    candidates of a row are all known actions of the split. []: the candidates of a row are the rows
    of its group (data.group_column). label: the reward, a binary label; None: the main label.
    max_weight: the limit of weights of the switch estimator; None: chosen from the log.
    """

    kind: str = "greedy"
    action: list[str] = field(default_factory=list)
    temperature: float = 1.0
    epsilon: float = 0.1
    label: str | None = None
    max_actions: int = 1000
    max_weight: float | None = None
    confidence: float = 0.95

    def __post_init__(self) -> None:
        check_choice("policy.kind", self.kind, KINDS)
        check_above("policy.temperature", self.temperature, 0.0)
        check_within("policy.epsilon", self.epsilon, 0.0, 1.0)
        check_at_least("policy.max_actions", self.max_actions, 2)
        check_within("policy.confidence", self.confidence, 0.5, 0.9999)
        if self.max_weight is not None:
            check_above("policy.max_weight", self.max_weight, 0.0)

    def probabilities(self, scores: Floats, starts: NDArray[np.int64]) -> Floats:
        """Return [n]: the probability of each candidate. The candidates of a decision are
        neighbours, and `starts` has the first of each decision."""
        sizes = np.diff(np.append(starts, len(scores)))
        best = np.repeat(np.maximum.reduceat(scores, starts), sizes)
        if self.kind == "softmax":
            shares = np.exp((scores - best) / self.temperature)
        else:
            shares = (scores == best).astype(np.float64)
        shares /= np.repeat(np.add.reduceat(shares, starts), sizes)
        if self.kind == "epsilon_greedy":
            shares = (1.0 - self.epsilon) * shares + self.epsilon / np.repeat(sizes, sizes)
        return shares


def check_policy(values: Mapping[str, Any], key: str, propensity: str | None, group: str | None) -> PolicyConfig:
    """Return the settings. Raises ConfigError if they are wrong, or the data lack a column for them."""
    found = read_settings(PolicyConfig, values, key, key)
    if propensity is None:
        raise ConfigError(
            f"{key} needs the probability with which each row was shown: prepare the data with "
            "data.columns.propensity=<column>, and train on them"
        )
    if not found.action and group is None:
        raise ConfigError(
            f"{key} needs candidates: name the features of an action ({key}.action=[item_id]), or prepare the data with "
            "data.group_column=<the column of requests>, whose rows are then the candidates"
        )
    return found
