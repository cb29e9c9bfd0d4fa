"""Compare training with propensity weights and without weights, on a test of random items:

    python -m benchmarks.debiasing FOLDER [--seeds 5] [--output docs/measurements/debiasing.json]

FOLDER has Coat (user.txt and random.txt: user,item,rating) or Yahoo R3 (ydata-ymusic-rating-study-v1_0-train.txt and
-test.txt, separated by tabs). In the first file users rated items of their choice, in the second file random items. The
files stay where they are, and everything that is made of them is in a temporary folder.

Rows for each seed: a tenth of the chosen ratings validates, the other ones train. A twentieth of the random ratings gives
the share of each rating for naive Bayes, and is used for nothing else. The other random ratings are the test.
Labels: `click`, which is 1 from a rating of 3 (as in the code of most papers that measure AUC on these two sets), and the
rating itself. The model is a factorization machine of user and item: matrix factorization with biases and an intercept.

Ways to weight a row (Schnabel et al., ICML 2016):
- no weights: 1;
- naive Bayes: 1 / P(observed | rating), the rating's share among the chosen ratings divided by its share among random ratings;
- popularity: 1 / P(observed | user, item), the product of the rows of the user and of the item.
Weights are divided by their mean, and none is above CLIP. They are the column `data.columns.weight` of training and
validation rows. Test rows have the weight 1 under every way: an evaluation multiplies by the weight too, so it would
otherwise measure another test. Each evaluation writes its rows, and the benchmark ends if a weight differs from 1.
Pairs of a user and an item that are in both files stay in both, as in the papers (8 % of Coat's random ratings).

A way takes the setting with the best loss on its own validation rows of seed 0. Seeds from 1 on are measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.about import about
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.prepare.run import prepare
from pipeline.runtime.errors import UserError

Integers = NDArray[np.int64]
Ratings = Integers  # [num_rows, 3]: user, item, rating from 1 to 5
Floats = NDArray[np.float64]
# Of self-selected items, of random items, separator.
FILES = (
    ("user.txt", "random.txt", ","),
    ("ydata-ymusic-rating-study-v1_0-train.txt", "ydata-ymusic-rating-study-v1_0-test.txt", "\t"),
)
CLICK_FROM, NUM_RATINGS, CLIP = 3, 5, 10.0
NO_WEIGHTS, NAIVE_BAYES, POPULARITY = WAYS = ("no weights", "naive Bayes", "popularity")
# Label -> words of the data, loss on validation, and the metrics of the test.
LABELS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "click": ("data.columns.label=click", "logloss", ("auc", "ndcg_at_5", "logloss", "calibration")),
    "rating": ("data.columns.labels={rating: {kind: regression}}", "mse", ("mse", "mae")),
}
GRID = [
    (f"tables.default.embedding_dim={dim}", f"tables.default.l2={l2}")
    for dim, l2 in itertools.product((4, 16), (0.0001, 0.0003, 0.001, 0.003, 0.01))
]
JOB = (
    "model=fm", "optimizer=adam", "optimizer.sparse.lr=0.01", "optimizer.dense.lr=0.02", "trainer.group_metrics_at=[5]",
    "early_stop=logloss", "hardware=cpu", "world_size=1", "logger.tensorboard=false", "logger.report=false",
)  # fmt: skip


def read_ratings(folder: Path) -> tuple[Ratings, Ratings]:
    """Return the ratings of self-selected and of random items."""
    for chosen, random, separator in FILES:
        if (folder / chosen).is_file() and (folder / random).is_file():
            found = [
                np.loadtxt(folder / name, dtype=np.int64, delimiter=separator, ndmin=2) for name in (chosen, random)
            ]
            return found[0][:, :3], found[1][:, :3]
    names = " or ".join(f"{chosen} and {random}" for chosen, random, _ in FILES)
    raise UserError(f"{folder} does not have {names}: give the folder of Coat or Yahoo R3")


def naive_bayes(ratings: Integers, random_ratings: Integers, num_pairs: int) -> Floats:
    """Return P(observed | rating) = P(rating | observed) P(observed) / P(rating) of each row [num_rows].

    `ratings` and `random_ratings` are ratings alone. P(rating) counts the random ratings, plus 1 each, so that
    no rating has the share 0. num_pairs: all pairs of a user and an item.
    """
    observed = np.bincount(ratings, minlength=NUM_RATINGS + 1) / num_pairs
    counts = np.bincount(random_ratings, minlength=NUM_RATINGS + 1) + 1.0
    counts[0] = 0.0
    propensities: Floats = observed[ratings] * counts.sum() / counts[ratings]
    return propensities


def popularity(users: Integers, items: Integers) -> Floats:
    """Return P(observed | user, item) of each row, if it is a number of the user times a number of the item."""
    (_, user, of_user), (_, item, of_item) = (
        np.unique(ids, return_inverse=True, return_counts=True) for ids in (users, items)
    )
    propensities: Floats = np.minimum(of_user[user] * of_item[item] / len(users), 1.0)
    return propensities


def sample_weights(propensities: Floats, clip: float = CLIP) -> Floats:
    """Return 1 / propensity, with the mean 1 and at most about `clip`: the mean is 1 again after the clipping."""
    inverse = 1.0 / propensities
    weights = np.minimum(inverse / inverse.mean(), clip)
    scaled: Floats = weights / weights.mean()
    return scaled


def weights_of(way: str, chosen: Ratings, marginals: Ratings) -> Floats:
    users, items, ratings = chosen.T
    if way == NAIVE_BAYES:
        num_pairs = len(np.unique(users)) * len(np.unique(items))
        return sample_weights(naive_bayes(ratings, marginals[:, 2], num_pairs))
    return sample_weights(popularity(users, items)) if way == POPULARITY else np.ones(len(chosen))


def write_splits(chosen: Ratings, random: Ratings, way: str, seed: int, folder: Path) -> Floats:
    """Write train.csv, validation.csv and test.csv. Return the weights of the rows that train or validate."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    chosen, random = draw.permutation(chosen), draw.permutation(random)
    num_marginals, num_validation = len(random) // 20, len(chosen) // 10
    weights = weights_of(way, chosen, random[:num_marginals])
    _write(folder / "validation.csv", chosen[:num_validation], weights[:num_validation])
    _write(folder / "train.csv", chosen[num_validation:], weights[num_validation:])
    _write(folder / "test.csv", random[num_marginals:], np.ones(len(random) - num_marginals))
    return weights


def _write(file: Path, rows: Ratings, weights: Floats) -> None:
    lines = [
        f"{user},{item},{int(rating >= CLICK_FROM)},{rating},{weight}"
        for (user, item, rating), weight in zip(rows.tolist(), weights.tolist(), strict=True)
    ]
    file.write_text("\n".join(["user,item,click,rating,weight", *lines, ""]))


def prepared(folder: Path, label: str) -> list[str]:
    """Prepare the files in `folder`, and return the words of the data."""
    words = [
        "data=default", f"data.name={label}", "data.format=csv", LABELS[label][0], "data.columns.sparse=[user,item]",
        "data.columns.weight=weight", "data.group_column=user", f"data.path={folder / label}", "data.split.kind=given",
        *(f"data.split.{split}={folder / split}.csv" for split in ("train", "validation", "test")),
    ]  # fmt: skip
    prepare(load_config(PrepareJob, [*words, "threads=1"]))
    return words


def trained(words: Iterable[str], label: str, run: Path) -> float:
    """Train until the validation loss gets worse. Return the best validation loss."""
    from pipeline.training.train import train

    metric = LABELS[label][1]
    measured = [
        f"{key}={metric}" for key in ("trainer.early_stop.metric", "schedule.plateau.metric", "checkpoint.best_metric")
    ]
    summary = train(load_config(TrainJob, [*words, *JOB, *measured, f"run_dir={run}"]))
    return summary.validation[metric]


def tested(run: Path, label: str) -> dict[str, float]:
    """Return the test's metrics, and check that every test row had the weight 1."""
    from pipeline.training.evaluate import evaluate

    file = run / "test.parquet"
    found = evaluate(load_config(EvaluateJob, [f"run={run}", "split=test", f"predictions={file}"])).metrics
    weights = pq.read_table(file)["weight"].to_numpy()
    if (weights != 1.0).any():
        raise RuntimeError(f"{(weights != 1.0).sum()} of {len(weights)} test rows have another weight than 1")
    return {metric: found[metric] for metric in LABELS[label][2]}


def measure(chosen: Ratings, random: Ratings, way: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Choose the settings of each label on seed 0, and return them and the test's metrics of each other seed."""
    settings: dict[str, list[str]] = {}
    results: list[dict[str, float]] = []
    for seed in range(options.seeds + 1):
        place = folder / way.replace(" ", "_") / str(seed)
        weights = write_splits(chosen, random, way, seed, place)
        results.append({})
        for label in LABELS:
            words = [*prepared(place, label), f"trainer.seed={seed}", f"trainer.global_batch_size={options.batch_size}"]
            if seed == 0:
                losses = [trained([*words, *each], label, place / f"{label}_{n}") for n, each in enumerate(GRID)]
                settings[label] = list(GRID[int(np.argmin(losses))])
                print(way, label, [round(loss, 4) for loss in losses], settings[label], flush=True)
                continue
            run = place / f"run_{label}"
            trained([*words, *settings[label]], label, run)
            results[-1] |= {f"{label}/{metric}": value for metric, value in tested(run, label).items()}
    share = weights.sum() ** 2 / (weights**2).sum() / len(weights)
    spread = f"{weights.min():.2f} to {weights.max():.2f}, worth {share:.0%} of the rows at equal weights"
    return {"settings": settings, "seeds": results[1:], "spread": spread}


def figures(measured: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a record for each metric and way: mean and deviation over seeds, and the paired difference from no weights."""
    found = []
    for label, (_, _, metrics) in LABELS.items():
        for metric, (way, of_way) in itertools.product(metrics, measured.items()):
            values, plain = (
                [each[f"{label}/{metric}"] for each in side["seeds"]] for side in (of_way, measured[NO_WEIGHTS])
            )
            gains = [value - other for value, other in zip(values, plain, strict=True)]
            found.append(
                {
                    "label": label,
                    "test_metric": metric,
                    "weights": way,
                    "mean": f"{statistics.mean(values):.4f}",
                    "deviation_over_seeds": f"{statistics.stdev(values):.4f}",
                    "difference_from_no_weights": "" if way == NO_WEIGHTS else f"{statistics.mean(gains):+.4f}",
                    "standard_error_of_it": ""
                    if way == NO_WEIGHTS
                    else f"{statistics.stdev(gains) / math.sqrt(len(gains)):.4f}",
                    "settings": ", ".join(word.removeprefix("tables.default.") for word in of_way["settings"][label]),
                    "values": values,
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    try:
        chosen, random = read_ratings(options.folder)
    except UserError as error:
        parser.error(str(error))
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds} gives no deviation over seeds: give at least 2")
    with tempfile.TemporaryDirectory() as folder:
        measured = {way: measure(chosen, random, way, options, Path(folder)) for way in WAYS}
    found = figures(measured)
    for figure in found:
        print({key: value for key, value in figure.items() if key != "values"})
    if options.output:
        head: dict[str, Any] = {
            "ratings": f"{len(chosen):,} of chosen items, {len(random):,} of random items",
            "seeds": options.seeds,
        }
        head |= {f"weights by {way}": measured[way]["spread"] for way in (NAIVE_BAYES, POPULARITY)}
        options.output.write_text(json.dumps({"about": about(**head), "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
