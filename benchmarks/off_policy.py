"""Check estimates of a policy's value from another policy's log, on generated and on real logs:

    python -m benchmarks.off_policy [--draws 1000] [--output docs/measurements/off_policy.json]
    python -m benchmarks.off_policy --folder OBD [--output docs/measurements/open_bandit.json]

Generated: 30 contexts, 20 actions, clicks by a known probability, so the value of each policy is known. The reward model
of the doubly robust estimate is wrong on purpose (its logits have a wave). Each draw is a new log. The coverage is the
share of draws whose 95 % interval has the known value.

Open Bandit (arXiv 2008.07146): OBD has random/CAMPAIGN/CAMPAIGN.csv and bts/CAMPAIGN/CAMPAIGN.csv for the campaigns all,
men and women, with the columns item_id, position, click and propensity_score, as in the folder obp/dataset/obd of the
package obp 0.4.1. Both policies ran at the same time on the same site, so each one's own click rate is the truth up to
chance. The random policy's probabilities are known. Thompson sampling's changed with time, and the file has them for the
logged item only: as the policy to be valued, it is the share of each item at each position of its own log. The reward
model is the click rate of the item in the other half of the log, shrunk to the mean by 20 rows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pc
from numpy.typing import NDArray

from benchmarks.about import about
from pipeline.extras.off_policy.estimate import ESTIMATORS, Decisions, effective_size, estimates, why_unreliable
from pipeline.extras.off_policy.settings import PolicyConfig
from pipeline.runtime.errors import UserError

Floats = NDArray[np.float64]
CONTEXTS, ACTIONS, WAVE, CONFIDENCE = 30, 20, 0.5, 0.95
# Name, rows, how much the log avoids what users like, and the policy.
LOGS = (
    ("uniform log, greedy policy", 2000, 0.0, PolicyConfig("greedy")),
    ("log that avoids clicks, epsilon-greedy policy", 4000, 0.5, PolicyConfig("epsilon_greedy", epsilon=0.2)),
    ("log that avoids clicks more, softmax policy", 4000, 0.7, PolicyConfig("softmax")),
    ("log that nearly never shows what is clicked, softmax policy", 4000, 1.0, PolicyConfig("softmax")),
)
CAMPAIGNS, SMOOTHING = ("all", "men", "women"), 20.0


class World:
    """Contexts with known click probabilities, a logging policy and a policy to be valued; [contexts, actions] each."""

    def __init__(self, avoids: float, policy: PolicyConfig, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        logits = draw.normal(size=(CONTEXTS, ACTIONS)) + 0.5 * draw.normal(size=ACTIONS) - 2.0
        scores = logits + WAVE * np.sin(3.0 * logits)
        self.clicks, self.predicted = 1.0 / (1.0 + np.exp(-logits)), 1.0 / (1.0 + np.exp(-scores))
        shares = np.exp(-avoids * logits)
        self.logging = shares / shares.sum(axis=1, keepdims=True)
        starts = np.arange(CONTEXTS) * ACTIONS
        self.policy = policy.probabilities(scores.reshape(-1), starts).reshape(scores.shape)
        self.value = float((self.policy * self.clicks).sum(axis=1).mean())
        self.expected = (self.policy * self.predicted).sum(axis=1)

    def log(self, rows: int, draw: np.random.Generator) -> Decisions:
        """Return a new log."""
        contexts = draw.integers(0, CONTEXTS, rows)
        actions = (self.logging[contexts].cumsum(axis=1) > draw.random(rows)[:, None]).argmax(axis=1)
        at = contexts, actions
        clicks = (draw.random(rows) < self.clicks[at]).astype(np.float64)
        parts = (each[at] for each in (self.logging, self.policy, self.predicted))
        return Decisions(clicks, *parts, self.expected[contexts], np.arange(rows))


def coverage(name: str, rows: int, avoids: float, policy: PolicyConfig, draws: int) -> list[dict[str, Any]]:
    """Return a record for each estimator."""
    world, found, sizes, flagged = World(avoids, policy), [], [], 0
    for seed in range(draws):
        log = world.log(rows, np.random.default_rng([1, seed]))
        sizes.append(effective_size(log.weights))
        flagged += why_unreliable(log.weights) != ""
        found.append(estimates(log, CONFIDENCE, num_samples=400, seed=seed))
    records = []
    for estimator in ESTIMATORS:
        of_draws = [each[estimator] for each in found]
        inside = sum(each.low <= world.value <= each.high for each in of_draws)
        records.append(
            {
                "log": name,
                "rows": rows,
                "worth_at_equal_weights": f"{np.median(sizes):,.0f}",
                "said_to_be_unreliable_percent": f"{100 * flagged / draws:.0f}",
                "estimator": estimator.replace("_", " "),
                "known_value": f"{world.value:.4f}",
                "mean_estimate": f"{np.mean([each.value for each in of_draws]):.4f}",
                "mean_width": f"{np.mean([each.high - each.low for each in of_draws]):.4f}",
                "coverage_percent": f"{100 * inside / draws:.1f}",
            }
        )
        print(records[-1], flush=True)
    return records


def read_log(folder: Path, policy: str, campaign: str) -> dict[str, Floats]:
    file = folder / policy / campaign / f"{campaign}.csv"
    if not file.is_file():
        raise UserError(f"{file} is missing: give the folder obp/dataset/obd of the package obp")
    columns = ["item_id", "position", "click", "propensity_score"]
    table = pc.read_csv(file, convert_options=pc.ConvertOptions(include_columns=columns))
    return {name: table[name].to_numpy().astype(np.float64) for name in columns}


def rewards_of_items(items: NDArray[np.int64], clicks: Floats, num_items: int) -> Floats:
    """Return [rows, items]: for each row the click rates of items in the half of the rows that lacks it."""
    half = np.arange(len(items)) % 2
    rates = []
    for other in (1, 0):
        rows = np.bincount(items[half == other], minlength=num_items)
        sums = np.bincount(items[half == other], clicks[half == other], minlength=num_items)
        rates.append((sums + SMOOTHING * clicks.mean()) / (rows + SMOOTHING))
    return np.stack(rates)[half]


def cross_estimate(log: dict[str, Floats], target: dict[str, Floats], is_uniform: bool) -> Decisions:
    """Return the decisions of `log` under the policy of `target`."""
    items, places = (log[name].astype(np.int64) for name in ("item_id", "position"))
    num_items = int(max(items.max(), target["item_id"].max())) + 1
    shares = np.ones((int(places.max()) + 1, num_items))
    if not is_uniform:
        shares[:] = 0.0
        np.add.at(shares, (target["position"].astype(np.int64), target["item_id"].astype(np.int64)), 1.0)
    policy = (shares / np.maximum(shares.sum(axis=1, keepdims=True), 1.0))[places]
    predicted, every = rewards_of_items(items, log["click"], num_items), np.arange(len(items))
    return Decisions(
        log["click"], log["propensity_score"], policy[every, items], predicted[every, items],
        (policy * predicted).sum(axis=1), every,
    )  # fmt: skip


def open_bandit(folder: Path) -> list[dict[str, Any]]:
    """Return a record for each campaign and direction."""
    records = []
    for campaign in CAMPAIGNS:
        logs = {policy: read_log(folder, policy, campaign) for policy in ("random", "bts")}
        for source, target in (("bts", "random"), ("random", "bts")):
            rows = cross_estimate(logs[source], logs[target], is_uniform=target == "random")
            found = estimates(rows, CONFIDENCE)
            truth = logs[target]["click"]
            own = estimates(
                Decisions(truth, *(np.ones(len(truth)),) * 2, *(np.zeros(len(truth)),) * 2, np.arange(len(truth))),
                CONFIDENCE,
            )["logged"]
            shown = {name: _percent(found[name]) for name in ESTIMATORS}
            away = (found["snips"].value - own.value) / np.hypot(found["snips"].error, own.error)
            records.append(
                {
                    "campaign": campaign,
                    "log_of": source,
                    "policy": target,
                    "worth_at_equal_weights": f"{effective_size(rows.weights):,.0f}",
                    "largest_weight": f"{rows.weights.max():,.1f}",
                    "reliable": "no" if why_unreliable(rows.weights) else "yes",
                    "mean_weight": f"{found['mean_weight'].value:.3f}",
                    "own_click_rate": _percent(own),
                    **shown,
                    "snips_minus_own_in_standard_errors": f"{away:+.1f}",
                }
            )
            print(records[-1], flush=True)
    return records


def _percent(estimate: Any) -> str:
    return f"{100 * estimate.value:.2f} ({100 * estimate.low:.2f} to {100 * estimate.high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="the Open Bandit logs; without it logs are generated")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    try:
        figures = open_bandit(options.folder) if options.folder else []
    except UserError as error:
        parser.error(str(error))
    if not options.folder:
        figures = [each for log in LOGS for each in coverage(*log, options.draws)]
    if options.output:
        head = {"rows": "10,000 of each log"} if options.folder else {"draws": options.draws}
        options.output.write_text(json.dumps({"about": about(**head), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
