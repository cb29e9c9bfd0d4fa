"""List what can be wrong with a model: the numbers that show it, the diagnosis, and the command to run next.

RULES is the table. A check returns the numbers, or "" if it finds nothing. Thresholds are above what
chance gives: they use standard errors, and least numbers of rows. A finding that another one explains
is left out (`explains`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.config.training import LossConfig
from pipeline.extras.diagnose.columns import (
    SplitRows,
    alone_auc,
    auc_error,
    determined_values,
    empty_share,
    read_splits,
    repeated_over,
    repeated_within,
)
from pipeline.extras.runs.evaluation_stats import EvaluationStats, read_stats
from pipeline.extras.runs.folder import Run, open_run
from pipeline.runtime.errors import UserError
from pipeline.runtime.logs import get_logger

DIVERGED_NE = 2.0  # of training rows
RISEN = 1.1  # training NE at the end by its minimum
OVERFITTED = 1.1  # validation NE by training NE
LEAK_AUC, LEAK_MODEL_AUC = 0.95, 0.99
LEAK_IMPORTANCE, LEAK_FACTOR = 0.3, 10.0  # rise of NE without the feature, and how many times the next
DETERMINED_SHARE, DETERMINED_ROWS = 0.01, 20.0
FEW_LABELS = 3  # a second label has at most this many values
SHIFTED, UNCALIBRATED = 0.25, 0.15
REPEATED, TWINS_AGREE = 0.05, 0.95
UNSCALED = 100.0  # root mean square of a dense feature
CERTAIN = 5.0  # standard errors
MIN_ROWS, MIN_CLASS_ROWS = 1000, 50
logger = get_logger("pipeline.diagnose")


class Facts:
    """Holds facts about one label of a run. Each fact is computed when a check asks for it."""

    def __init__(self, run: Run, label: str) -> None:
        self.run, self.label, self.dataset = run, label, run.dataset
        self.step, metrics = run.metrics("validation")
        self.metrics = run.of_label(metrics, label)
        counts = [run.of_label(metrics, each).get("num_samples", 0) for each in run.labels]
        # share of the rows in which the label counts; below 1 for a masked label
        self.share = self.metrics.get("num_samples", 1) / (max(counts) or 1)
        self.importance = run.importances.get(label, {})

    @cached_property
    def rows(self) -> dict[str, SplitRows]:
        """Split -> rows; empty if the data set is gone, or the label is not binary, or masked."""
        if self.dataset is None:
            return {}
        label = next((each for each in self.dataset.all_labels if each.name == self.label), None)
        if label is None or label.kind != "binary" or label.mask is not None:
            return {}
        return read_splits(str(self.run.config["data"]["path"]), self.dataset, label.name)

    @property
    def features(self) -> list[str]:
        return [*self.rows["train"].dense, *self.rows["train"].sparse] if "train" in self.rows else []

    @cached_property
    def train_ne(self) -> list[tuple[int, float]]:
        """(step, NE of the training rows since the last line)."""
        name = self.run.name_of("ne", self.label)
        return [(line["step"], line[name]) for line in self.run.lines if line["kind"] == "train" and name in line]

    @cached_property
    def validation_ne(self) -> list[tuple[int, float]]:
        found = [
            (step, self.run.of_label(each, self.label))
            for (split, step), each in sorted(self.run.evaluations.items())
            if split == "validation"
        ]
        return [(step, each["ne"]) for step, each in found if "ne" in each]

    @property
    def batch(self) -> int:
        return int(self.run.config["trainer"]["global_batch_size"])

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self.dataset.splits["train"].num_rows // self.batch) if self.dataset else self.run.step

    @cached_property
    def stats(self) -> EvaluationStats | None:
        try:
            return read_stats(self.run.stats["validation", self.step]).of_label(self.label) if self.metrics else None
        except (KeyError, UserError):
            return None

    @cached_property
    def alone(self) -> tuple[float, str]:
        """The best AUC on validation of one feature, and its name."""
        if not {"train", "validation"} <= self.rows.keys():
            return math.nan, ""
        found = [(alone_auc(self.rows["train"], self.rows["validation"], name), name) for name in self.features]
        return max((each for each in found if not math.isnan(each[0])), default=(math.nan, ""))

    @property
    def auc_error(self) -> float:
        return auc_error(self.rows["validation"].labels) if "validation" in self.rows else 1.0

    @property
    def ne_error(self) -> float:
        """The size of chance differences of NE on the validation rows."""
        return 1 / math.sqrt(max(self.metrics.get("num_samples", 1), 1))


def _diverged(facts: Facts) -> str:
    if not facts.train_ne:
        return ""
    step, worst = max(facts.train_ne, key=lambda each: each[1])
    last, least = facts.train_ne[-1][1], min(ne for _, ne in facts.train_ne)
    if worst > DIVERGED_NE:
        return f"training NE {worst:.4g} at step {step}"
    lines = max(int(facts.run.config["trainer"]["log_every_steps"]), 1)
    error = 1 / math.sqrt(max(facts.batch * lines * facts.share, 1))
    if last > RISEN * least and last - least > CERTAIN * error and facts.metrics.get("ne", 1.0) > 0.98:
        return f"training NE rose from {least:.4f} to {last:.4f}"
    return ""


def _one_class(facts: Facts) -> str:
    rates = {name: rows for name, rows in facts.rows.items() if rows.rate in (0.0, 1.0)}
    return ", ".join(f"all {rows.num_rows:,} labels of {name} are {rows.rate:.0f}" for name, rows in rates.items())


def _not_trained(facts: Facts) -> str:
    lines = [line for line in facts.run.lines if line["kind"] == "train"]
    rates = {key for line in lines for key in line if key.startswith("lr_")}
    still = sorted(key for key in rates if all(line.get(key) == 0.0 for line in lines))
    # constant predictions give tables no gradient
    tables = [name for name, each in facts.run.tables.items() if each.get("updated") == 0 and not _constant(facts)]
    found = [f"{key} is 0 at all {len(lines)} log lines" for key in still]
    return ", ".join(
        [*found, *(f"0 of {facts.run.tables[name]['rows']:,} rows of table {name} changed" for name in tables)]
    )


def _constant(facts: Facts) -> str:
    bins = facts.stats.reliability if facts.stats else []
    low, high = (edge((each.prediction for each in bins), default=0.0) for edge in (min, max))
    rows = sum(each.rows for each in bins)
    return f"{rows:,} predictions lie between {low:.6f} and {high:.6f}" if rows and high - low < 0.01 * high else ""


def _repeated_over_splits(facts: Facts) -> str:
    found = []
    for name in ("validation", "test"):
        if "train" not in facts.rows or name not in facts.rows:
            continue
        rows, sampled = facts.rows[name], facts.rows["train"]
        shared, agree = repeated_over(sampled, rows)
        share = shared / len(rows.labels) * sampled.num_rows / len(sampled.labels)
        if shared >= MIN_CLASS_ROWS and share > REPEATED and agree >= TWINS_AGREE and sampled.rate < 0.9:
            found.append(
                f"{shared:,} of {len(rows.labels):,} {name} rows equal a training row in all features, and {agree:.1%} of "
                f"their positives have positive twins (label rate {sampled.rate:.3f})"
            )
    return "; ".join(found)


def _repeated_in_training(facts: Facts) -> str:
    if "train" not in facts.rows:
        return ""
    rows = facts.rows["train"]
    count, agree = repeated_within(rows)
    if count < max(MIN_CLASS_ROWS, 4 * REPEATED * len(rows.labels)) or agree < TWINS_AGREE or rows.rate > 0.9:
        return ""
    return (
        f"{count:,} of {len(rows.labels):,} training rows equal another one in all features, and {agree:.1%} of the twins of "
        "positives are positive"
    )


def _time_leak(facts: Facts) -> str:
    recipe = facts.dataset.recipe if facts.dataset else {}
    kind, column = recipe.get("split", {}).get("kind"), recipe.get("columns", {}).get("timestamp")
    if kind != "random" or not column or facts.dataset is None:
        return ""
    rows = facts.dataset.splits["validation"].num_rows
    return f"{rows:,} validation rows are drawn at random from the same times as training (column {column})"


def _leak(facts: Facts) -> str:
    best, name = facts.alone
    found = []
    if best > LEAK_AUC and facts.auc_error < 0.02:
        found.append(f"{name} alone ranks the validation rows with AUC {best:.4f}")
    ranked = sorted(facts.importance.items(), key=lambda each: -each[1][0])
    if len(ranked) > 1 and ranked[0][1][0] > max(LEAK_IMPORTANCE, LEAK_FACTOR * ranked[1][1][0]):
        (first, (rise, error)), (second, (less, _)) = ranked[:2]
        found.append(f"NE rises by {rise:.3f} ± {2 * error:.3f} without {first}, by {less:.3f} without {second}")
    area = facts.metrics.get("auc", 0.5)
    if area > LEAK_MODEL_AUC and not found:
        found.append(f"the model's AUC is {area:.4f}, which is rarely true of clicks")
    if "train" in facts.rows and not found:
        rows = facts.rows["train"]
        for each in determined_values(rows, DETERMINED_SHARE, DETERMINED_ROWS):
            found.append(f"all {each.rows:,} rows of one value of {each.feature} have label {each.label}")
    return "; ".join(found)


def _second_label(facts: Facts) -> str:
    if "train" not in facts.rows:
        return ""
    rows = facts.rows["train"]
    found = determined_values(rows, DETERMINED_SHARE, DETERMINED_ROWS)
    few = [each for each in found if each.num_values <= FEW_LABELS]
    return "; ".join(
        f"{each.feature} has {each.num_values} values, and all {each.rows:,} rows of one of them ({each.rows / len(rows.labels):.1%}) "
        f"have label {each.label} (label rate {rows.rate:.3f})"
        for each in few
    )


def _missing(facts: Facts, is_new: bool) -> str:
    """Find features without known values in a split. is_new: their values are new, and not absent."""
    if len(facts.rows) < 2 or "train" not in facts.rows:
        return ""
    found = []
    for feature in facts.features:
        shares = {name: empty_share(rows, feature) for name, rows in facts.rows.items() if len(rows.labels) >= 100}
        held = [share for name, share in shares.items() if name != "train"]
        train, worst = shares.get("train", 0.0), max(held, default=0.0)
        if feature in facts.rows["train"].dense:
            differs = not is_new and len(set(shares.values())) > 1
        else:
            # ids that do not come again are missing in all later splits, and most training ids are rare
            per_id = len(facts.rows["train"].labels) / max(len(np.unique(facts.rows["train"].sparse[feature])), 1)
            comes_again = min(held, default=0.0) < 0.5 or per_id > CERTAIN * 4
            differs = max(train, worst) > (0.9 if not is_new and comes_again else 0.5) and abs(worst - train) > 0.3
            # a feature without values in training has no ids at all
            differs = (differs and comes_again != is_new) or (not is_new and train > 0.999)
        if differs:
            parts = ", ".join(f"{share:.1%} of {name}" for name, share in shares.items())
            found.append(f"{feature} has no known value in {parts}")
    return "; ".join(found)


def _missing_in_split(facts: Facts) -> str:
    return _missing(facts, is_new=False)


def _unseen_ids(facts: Facts) -> str:
    return _missing(facts, is_new=True)


def _label_shift(facts: Facts) -> str:
    found = []
    train = facts.rows.get("train")
    for name, rows in facts.rows.items():
        if train is None or name == "train":
            continue
        pooled = (train.labels.sum() + rows.labels.sum()) / (len(train.labels) + len(rows.labels))
        error = math.sqrt(max(pooled * (1 - pooled), 1e-9) * (1 / len(train.labels) + 1 / len(rows.labels)))
        if abs(rows.rate - train.rate) > max(CERTAIN * error, SHIFTED * train.rate):
            found.append(f"label rate {train.rate:.4f} in training, {rows.rate:.4f} in {name} ({error:.4f} is chance)")
    return "; ".join(found)


def _few_rows(facts: Facts) -> str:
    rows = facts.rows.get("validation")
    if rows is None:
        return ""
    least = min(rows.labels.sum(), len(rows.labels) - rows.labels.sum())
    if least >= MIN_CLASS_ROWS:
        return ""
    return (
        f"validation has {int(least):,} rows of the rarer label: its AUC is known to ± {2 * facts.auc_error:.3f} only"
    )


def _no_signal(facts: Facts) -> str:
    best, name = facts.alone
    area, error = facts.metrics.get("auc", math.nan), facts.auc_error
    if not (abs(area - 0.5) < 3 * error and error < 0.03 and best < 0.5 + CERTAIN * error):
        return ""
    return (
        f"AUC {area:.4f} is 0.5 within chance (± {2 * error:.4f}), and so is the best single feature: {name} {best:.4f}"
    )


def _dead_feature(facts: Facts) -> str:
    rows = facts.run.importance_of[2]
    dead = [name for name, (rise, error) in facts.importance.items() if rise == 0.0 and error == 0.0]
    train = facts.rows.get("train")
    dead = [name for name in dead if train is None or empty_share(train, name) < 0.999]
    if rows < MIN_ROWS or not dead:
        return ""
    return f"shuffling {', '.join(dead)} over {rows:,} rows changes no prediction at all"


def _unscaled(facts: Facts) -> str:
    train = facts.rows.get("train")
    if train is None:
        return ""
    sizes = {name: float(np.sqrt(np.mean(np.square(values)))) for name, values in train.dense.items()}
    large = [f"{name} {size:,.0f}" for name, size in sizes.items() if size > UNSCALED]
    return f"root mean square of the numbers that the model reads: {', '.join(large)}" if large else ""


def _collisions(facts: Facts) -> str:
    """Estimate the values of hashed features by the share of ids in use (linear counting, Whang 1990)."""
    if "train" not in facts.rows or facts.dataset is None:
        return ""
    found = []
    for each in facts.dataset.sparse_features:
        if each.hash_size:
            used = len(np.unique(facts.rows["train"].sparse[each.name]))
            values = -each.hash_size * math.log(max(1 - used / each.hash_size, 0.5 / each.hash_size))
            if values > 2 * each.hash_size:
                found.append(
                    f"{each.name}: {used:,} of {each.hash_size:,} ids are in use, by about {values:,.0f} values or more"
                )
    return ", ".join(found)


def _overfitting(facts: Facts) -> str:
    ne = facts.metrics.get("ne", math.nan)
    if not facts.train_ne or facts.run.step <= facts.steps_per_epoch:
        return ""
    last, rise = facts.train_ne[-1][1], CERTAIN * facts.ne_error
    if ne > OVERFITTED * last and ne - last > rise:
        curve = ", ".join(f"{value:.4f} at {step}" for step, value in facts.validation_ne[-3:])
        return f"training NE {last:.4f}, validation NE {ne:.4f} (validation: {curve})"
    return ""


def _other_rows(facts: Facts) -> str:
    ne = facts.metrics.get("ne", math.nan)
    if not facts.train_ne or facts.run.step > facts.steps_per_epoch:
        return ""
    last = facts.train_ne[-1][1]
    if ne > OVERFITTED * 1.1 * last and ne - last > 2 * CERTAIN * facts.ne_error:
        return f"in the first epoch, where each row is scored before it is trained on: training NE {last:.4f}, validation NE {ne:.4f}"
    return ""


def _underfitting(facts: Facts) -> str:
    best, name = facts.alone
    area, ne = facts.metrics.get("auc", math.nan), facts.metrics.get("ne", math.nan)
    steps = f"after {facts.run.step:,} steps of {facts.batch:,} rows ({facts.steps_per_epoch:,} an epoch)"
    if best - area > max(0.005, 3 * facts.auc_error) and best > 0.5 + CERTAIN * facts.auc_error:
        return f"AUC {area:.4f} {steps}; {name} alone has {best:.4f}"
    if ne > 1.0 + 2 * facts.ne_error and best > 0.5 + CERTAIN * facts.auc_error:
        return f"validation NE {ne:.4f} {steps}: predicting the label rate gives 1; {name} alone has AUC {best:.4f}"
    return ""


def _calibration(facts: Facts) -> str:
    value, rate = facts.metrics.get("calibration", 1.0), facts.metrics.get("label_rate", 0.5)
    clicks = rate * facts.metrics.get("num_samples", 0)
    if not clicks or abs(value - 1) < max(UNCALIBRATED, CERTAIN / math.sqrt(clicks)):
        return ""
    loss = facts.run.config["trainer"].get("loss") or {}
    why = "; trainer.loss is not the plain log loss" if LossConfig(**loss).changes else ""
    return f"{value:.3f} predicted clicks for each click{why}"


@dataclass(frozen=True)
class Rule:
    """A check. explains: keys of findings that this one explains."""

    key: str
    check: Callable[[Facts], str]
    diagnosis: str
    next_step: str  # {run}: the run folder; {data}: the data set's name
    explains: tuple[str, ...] = ()


POOR = ("underfitting", "no_signal", "calibration", "few_rows", "other_rows", "overfitting")
TRAIN = "python -m pipeline train ... run_dir={run}_2 "
PREPARE = "python -m pipeline prepare ... data.path=<a new folder> "
RULES = (
    Rule("one_class", _one_class, "nothing can be measured of one class", PREPARE + "data.split.kind=random", (*POOR, "label_shift")),
    Rule("second_label", _second_label, "a second label is among the features: leave the column out, or train it as a label", PREPARE + "without that column", ("leak", "other_rows", "dead_feature")),
    Rule("leak", _leak, "a feature is known only after the label", PREPARE + "without that column", ("dead_feature", "other_rows")),
    Rule("repeated_over_splits", _repeated_over_splits, "the splits share rows, so validation measures memory", PREPARE + "after removing repeated rows, or data.split.kind=time", (*POOR, "repeated_in_training", "time_leak")),
    Rule("repeated_in_training", _repeated_in_training, "training rows are repeated, so one epoch trains each several times", PREPARE + "after removing repeated rows", POOR),
    Rule("unscaled", _unscaled, "a dense feature is not scaled", PREPARE + "data.dense_transform=standardize", (*POOR, "diverged", "constant", "dead_feature")),
    Rule("diverged", _diverged, "the learning rate is too high", TRAIN + "optimizer.sparse.lr=<a tenth> optimizer.dense.lr=<a tenth>", (*POOR, "constant", "dead_feature", "not_trained")),
    Rule("not_trained", _not_trained, "a part of the model is not trained", TRAIN + "schedule.sparse.decay_steps=<steps of the training> schedule.dense.decay_steps=<the same>", (*POOR, "constant", "dead_feature")),
    Rule("constant", _constant, "the model predicts one number", TRAIN + "optimizer.dense.lr=<a tenth>, or another model", (*POOR, "dead_feature")),
    Rule("missing_in_split", _missing_in_split, "a feature is missing in one split", "python -m pipeline inspect source=<its file>", (*POOR, "dead_feature")),
    Rule("unseen_ids", _unseen_ids, "the values of a feature do not come again, so it cannot be learned", PREPARE + "without that column, or with data.transforms that generalize it", POOR),
    Rule("label_shift", _label_shift, "the splits have other label rates: other times, other sampling or another label", PREPARE + "data.split.kind=time", ("calibration", "other_rows")),
    Rule("time_leak", _time_leak, "rows of one time are in all splits, so validation is better than tomorrow will be", PREPARE + "data.split.kind=time"),
    Rule("no_signal", _no_signal, "the features say nothing about the label: are labels shuffled, or joined to other rows?", "python -m pipeline inspect source=<raw file> label=<label>", POOR),
    Rule("dead_feature", _dead_feature, "a feature changes no prediction: dead units, or a model that does not read it", TRAIN + "data.dense_transform=standardize, or another model"),
    Rule("collisions", _collisions, "different values share ids", PREPARE + "data.ids.hash_size=<twice the values>"),
    Rule("overfitting", _overfitting, "the model knows training rows by heart", TRAIN + "trainer.epochs=1, early_stop=auc, model.l2 or model.dropout", ("calibration", "underfitting")),
    Rule("underfitting", _underfitting, "the model has learned less than one feature shows: train longer, or raise the learning rates", TRAIN + "trainer.epochs=3 optimizer.dense.lr=<three times>", ("calibration", "other_rows")),
    Rule("other_rows", _other_rows, "validation rows differ from training rows", "python -m pipeline report run={run}"),
    Rule("calibration", _calibration, "predictions are too high or too low on average", "python -m pipeline report run={run}"),
    Rule("few_rows", _few_rows, "the validation split is too small to judge a model", PREPARE + "data.split.validation_fraction=0.2"),
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    key: str
    text: str


def find_problems(run: Run) -> list[Problem]:
    """Return the findings of all labels in the order of RULES, except findings that another one
    explains. A finding that only some labels have begins with their names.
    """
    labels_of: dict[tuple[int, str], list[str]] = {}  # number of the rule, and numbers -> labels
    for label in run.labels:
        facts = Facts(run, label)
        found = {rule.key: numbers for rule in RULES if (numbers := rule.check(facts))}
        explained = {key for rule in RULES if rule.key in found for key in rule.explains if key != rule.key}
        for number, rule in enumerate(RULES):
            if rule.key in found and rule.key not in explained:
                labels_of.setdefault((number, found[rule.key]), []).append(label)
    problems = []
    for (number, numbers), labels in sorted(labels_of.items(), key=lambda each: each[0][0]):
        rule, whose = RULES[number], "" if len(labels) == len(run.labels) else f"{', '.join(labels)}: "
        following = rule.next_step.replace("{run}", run.path)
        problems.append(Problem(rule.key, f"{whose}{rule.diagnosis} ({numbers}). Next: {following}"))
    return problems


def try_diagnose(path: str) -> list[str]:
    """Return the findings of a training that has ended; none if that fails, because a training must not fail by it."""
    try:
        return [each.text for each in find_problems(open_run(path))]
    except Exception as error:
        logger.warning(
            "no diagnosis (%s: %s); try `python -m pipeline diagnose run=%s`", type(error).__name__, error, path
        )
        return []
