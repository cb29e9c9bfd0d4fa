"""Search points of the knobs with Optuna; successive halving (Li et al. 2020, ASHA) ends trials early.

The study is a journal file. A killed sweep opens it again and runs unfinished trials first. Point n
is sampled with a separate seed, so it does not depend on restarts.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.extras.sweep.config import KnobConfig, SweepConfig
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.storage import storage

if TYPE_CHECKING:
    import optuna

Point = dict[str, Any]  # key -> value, of the active knobs


def suggest(trial: optuna.Trial, params: Mapping[str, KnobConfig]) -> Point:
    """Ask Optuna for the value of each knob whose condition holds."""

    def value_of(key: str, knob: KnobConfig) -> Any:
        if knob.choices:
            return trial.suggest_categorical(key, knob.choices)
        assert knob.low is not None and knob.high is not None
        if knob.integer:
            return trial.suggest_int(key, int(knob.low), int(knob.high), log=knob.log, step=int(knob.step or 1))
        return trial.suggest_float(key, knob.low, knob.high, log=knob.log, step=knob.step)

    return _walk(params, value_of)


def _walk(params: Mapping[str, KnobConfig], value_of: Callable[[str, KnobConfig], Any]) -> Point:
    point: Point = {}
    for key, knob in params.items():
        if all(other in point and point[other] in allowed for other, allowed in knob.when.items()):
            point[key] = value_of(key, knob)
    return point


def grid(params: Mapping[str, KnobConfig]) -> list[Point]:
    """Return all points; the last knob changes fastest. Points that differ only in inactive knobs are equal."""
    points: dict[str, Point] = {}
    for combination in itertools.product(*map(_grid_values, params.values())):
        chosen = dict(zip(params, combination, strict=True))
        point = _walk(params, lambda key, _, chosen=chosen: chosen[key])  # type: ignore[misc]
        points.setdefault(json.dumps(point, sort_keys=True), point)
    return list(points.values())


def _grid_values(knob: KnobConfig) -> list[Any]:
    if knob.choices:
        return list(knob.choices)
    assert knob.low is not None and knob.high is not None
    step = knob.step or 1.0
    count = math.floor((knob.high - knob.low) / step + 1e-9) + 1
    found = [round(knob.low + step * index, 12) for index in range(count)]
    return [int(value) for value in found] if knob.integer else found


def as_overrides(point: Point) -> list[str]:
    return [f"{key}={_text(value)}" for key, value in point.items()]


def _text(value: Any) -> str:
    """Return the value in Hydra's syntax: plain words unquoted, other text quoted."""
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./-]+", value) else "'" + value.replace("'", "\\'") + "'"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return repr(value)


def edges(params: Mapping[str, KnobConfig]) -> Iterator[Point]:
    """Return points that together include both ends, or every choice, of each knob. They are checked first."""
    for key, knob in params.items():
        ends = [edge for edge in (knob.low, knob.high) if edge is not None]
        for value in knob.choices or [int(end) if knob.integer else end for end in ends]:
            point: Point = {}
            _require(key, value, params, point)
            yield {name: point[name] for name in params if name in point}


def _require(key: str, value: Any, params: Mapping[str, KnobConfig], point: Point) -> None:
    """Set a knob, and the knobs in its condition so that the condition is true."""
    for other, allowed in params[key].when.items():
        if other not in point:
            _require(other, allowed[0], params, point)
    point[key] = value


FILE = "study.journal"
# Settings that may change when a sweep continues.
MAY_CHANGE = {
    "trials",
    "parallel",
    "retries",
    "finalists",
    "seeds",
    "launch",
    "scheduler",
    "scheduler_args",
    "job_args",
}

# (number of the trial, its point, rung) -> metric at the rung; NaN: not a number, None: the
# training failed
Measure = Callable[[int, Point, int], Awaitable[float | None]]


def open_study(folder: str, config: SweepConfig, words: list[str], maximize: bool) -> optuna.Study:
    """Open the study. Raises ConfigError if Optuna is missing, or the folder has another sweep."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("a sweep needs Optuna: pip install 'torchrec-pipeline[sweep]'") from error
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage.make_folder(folder)
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if config.prune == "asha":
        pruner = optuna.pruners.SuccessiveHalvingPruner(1, config.reduction_factor)
    study = optuna.create_study(
        study_name="sweep",
        storage=JournalStorage(JournalFileBackend(storage.join(folder, FILE))),
        load_if_exists=True,
        direction="maximize" if maximize else "minimize",
        pruner=pruner,
    )
    _check_same(study, folder, config, words)
    if config.sampler == "grid":
        points = grid(config.params)
        # so that the best point may come at any time
        order = np.random.default_rng(config.seed).permutation(len(points))
        for index in order[: config.trials]:
            study.enqueue_trial(points[index], skip_if_exists=True)
    return study


def _check_same(study: optuna.Study, folder: str, config: SweepConfig, words: list[str]) -> None:
    settings = {f"sweep.{name}": value for name, value in asdict(config).items() if name not in MAY_CHANGE}
    identity = json.loads(json.dumps({**settings, **dict.fromkeys(words, True)}))
    before = study.user_attrs.get("sweep", identity)
    differing = sorted(name for name in {**before, **identity} if before.get(name) != identity.get(name))
    if differing:
        raise ConfigError(
            f"{folder} has a sweep with other settings ({', '.join(differing)}), so its trials cannot be compared with "
            "these; choose another run_dir, or keep the settings"
        )
    study.set_user_attr("sweep", identity)


def num_rungs(config: SweepConfig) -> int:
    return config.rungs if config.prune == "asha" else 1


def steps_at(rung: int, total_steps: int, config: SweepConfig) -> int:
    """Return the steps of a rung: reduction_factor times fewer at each earlier rung."""
    share = config.reduction_factor ** (num_rungs(config) - 1 - rung)
    return max(1, -(-total_steps // share))


class Search:
    """Runs trials of a study. Several calls of run() may be awaited at the same time."""

    def __init__(self, study: optuna.Study, config: SweepConfig, measure: Measure) -> None:
        self.study, self._config, self._measure = study, config, measure
        self._taken: set[int] = set()  # numbers of the trials that this process has begun

    async def run(self) -> None:
        """Run trials one after the other until the study has `config.trials` trials."""
        from optuna.trial import TrialState

        while (trial := self._next_trial()) is not None:
            point = suggest(trial, self._config.params)
            state, value = TrialState.COMPLETE, math.nan
            for rung in range(num_rungs(self._config)):
                metric = await self._measure(trial.number, point, rung)
                if metric is None:
                    state = TrialState.FAIL
                    break
                worst = -math.inf if self.study.direction.name == "MAXIMIZE" else math.inf
                value = metric if math.isfinite(metric) else worst
                trial.report(value, self._config.reduction_factor**rung)
                if rung + 1 < num_rungs(self._config) and trial.should_prune():
                    state = TrialState.PRUNED
                    break
            self.study.tell(trial, value if state == TrialState.COMPLETE else None, state)

    def _next_trial(self) -> optuna.Trial | None:
        """Return a trial that an earlier sweep began, or a new trial; None if there are enough trials."""
        from optuna.trial import Trial, TrialState

        trials = self.study.get_trials(deepcopy=False)
        begun = [trial for trial in trials if trial.state == TrialState.RUNNING and trial.number not in self._taken]
        waiting = [trial for trial in trials if trial.state == TrialState.WAITING]
        number = begun[0].number if begun else len(trials) - len(waiting)
        if not begun and (number >= self._config.trials or (self._config.sampler == "grid" and not waiting)):
            return None
        self.study.sampler = _sampler(self._config, number)
        trial = Trial(self.study, begun[0]._trial_id) if begun else self.study.ask()
        self._taken.add(trial.number)
        return trial


def _sampler(config: SweepConfig, number: int) -> optuna.samplers.BaseSampler:
    from optuna.samplers import RandomSampler, TPESampler

    seed = int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0])
    if config.sampler == "tpe":
        return TPESampler(seed=seed, n_startup_trials=min(10, max(4, config.trials // 3)))
    return RandomSampler(seed=seed)
