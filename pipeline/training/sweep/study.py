"""Remember a sweep's trials in an Optuna study in the sweep's folder, and choose the next point (ask and tell).

The study is a journal file, which works on network file systems and survives kill -9. Points of tpe and random come from a sampler
that is made anew for each trial, from the seed and the trial's number, over the results so far: a sweep that was killed
goes on as if it had not been. With rungs the sampler learns from the highest rung that enough trials have reached (Falkner et al. 2018, BOHB).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config.sweep import KnobConfig, SweepConfig
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.storage import storage
from pipeline.training.sweep.space import Point, grid, walk

if TYPE_CHECKING:
    import optuna
    from optuna.samplers import BaseSampler

FILE = "study.journal"
NAME = "sweep"
LEAST_AT_RUNG = 6  # trials from which the sampler learns; fewer at a rung: from the rung below
# May change when a sweep goes on.
NOT_SAME = ("trials", "parallel", "retries", "finalists", "seeds", "launch", "scheduler", "scheduler_args", "job_args")


@dataclass
class Trial:
    """values: rung -> the metric there, inf where it was not a number, so that less is always better."""

    number: int
    point: Point
    state: str  # running, complete, pruned or failed
    values: dict[int, float] = field(default_factory=dict)

    @property
    def rung(self) -> int:
        """The highest one measured; -1 before the first."""
        return max(self.values, default=-1)

    @property
    def value(self) -> float:
        return self.values.get(self.rung, math.inf)


class Study:
    """`sign` is -1 for a metric of which more is better: values are kept so that less is better, and shown as they are."""

    def __init__(self, folder: str, config: SweepConfig, words: list[str], sign: float) -> None:
        """Raises ConfigError without Optuna, and for a folder that holds another sweep."""
        try:
            import optuna
        except ImportError as error:
            raise ConfigError("a sweep needs Optuna: pip install 'torchrec-pipeline[sweep]'") from error
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage.make_folder(folder)
        self.folder, self.sign, self._config, self._optuna = folder, sign, config, optuna
        backend = JournalStorage(JournalFileBackend(storage.join(folder, FILE)))
        self._study = optuna.create_study(study_name=NAME, storage=backend, load_if_exists=True, direction="minimize")
        self._check_same(words)
        self._grid = grid(config.params) if config.sampler == "grid" else []

    def _check_same(self, words: list[str]) -> None:
        settings = {name: value for name, value in _plain(self._config).items() if name not in NOT_SAME}
        identity = {"words": sorted(words), "settings": settings}
        before = self._study.user_attrs.get("sweep")
        if before is None:
            self._study.set_user_attr("sweep", identity)
        elif before != json.loads(json.dumps(identity)):
            differing = [
                f"sweep.{name}"
                for name in settings
                if before["settings"].get(name) != json.loads(json.dumps(settings[name]))
            ]
            differing += sorted(set(before["words"]) ^ set(identity["words"]))
            raise ConfigError(
                f"{self.folder} holds a sweep with other settings ({', '.join(differing)}): its trials cannot be compared with "
                "these; choose another run_dir, or keep the settings"
            )

    @property
    def num_wanted(self) -> int:
        return min(self._config.trials, len(self._grid)) if self._grid else self._config.trials

    def trials(self) -> list[Trial]:
        return [
            self._read(trial)
            for trial in self._study.get_trials(deepcopy=False)
            if trial.params or trial.state.name != "WAITING"
        ]

    def ask(self) -> Trial:
        """A new trial, which is in the study before anything is trained."""
        number = len(self._study.get_trials(deepcopy=False))
        waiting = [trial for trial in self._study.get_trials(deepcopy=False) if trial.state.name == "WAITING"]
        if not waiting:  # else this process was killed here before
            point = self._grid[number] if self._grid else self._sample(number)
            self._study.enqueue_trial(point)
        else:
            point = dict(waiting[0].system_attrs["fixed_params"])
        asked = self._study.ask({key: self._distribution(self._config.params[key]) for key in point})
        return Trial(asked.number, point, "running")

    def _sample(self, number: int) -> Point:
        optuna, seed = self._optuna, int(np.random.SeedSequence([self._config.seed, number]).generate_state(1)[0])
        sampler: BaseSampler = optuna.samplers.RandomSampler(seed=seed)
        if self._config.sampler == "tpe":
            sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=min(10, max(4, self._config.trials // 3)), multivariate=False
            )
        view = optuna.create_study(sampler=sampler, direction="minimize")
        for trial in self._learnt_from():
            view.add_trial(trial)
        asked = view.ask()

        def suggest(key: str, knob: KnobConfig) -> Any:
            distribution = self._distribution(knob)
            if knob.choices:
                return asked.suggest_categorical(key, knob.choices)
            if isinstance(distribution, optuna.distributions.IntDistribution):
                return asked.suggest_int(
                    key, distribution.low, distribution.high, step=distribution.step, log=distribution.log
                )
            assert isinstance(distribution, optuna.distributions.FloatDistribution)
            return float(
                f"{asked.suggest_float(key, distribution.low, distribution.high, step=distribution.step, log=distribution.log):.6g}"
            )

        return walk(self._config.params, suggest)

    def _learnt_from(self) -> list[optuna.trial.FrozenTrial]:
        """Finished trials, with their value at the highest rung that enough of them have reached."""
        trials = [trial for trial in self.trials() if trial.values]
        counts = {
            rung: sum(rung in trial.values for trial in trials)
            for rung in {rung for trial in trials for rung in trial.values}
        }
        rung = max((rung for rung, count in counts.items() if count >= LEAST_AT_RUNG), default=min(counts, default=0))
        return [
            self._optuna.trial.create_trial(
                params=trial.point,
                distributions={key: self._distribution(self._config.params[key]) for key in trial.point},
                value=min(trial.values[rung], 1e9),
            )
            for trial in trials
            if rung in trial.values
        ]

    def _distribution(self, knob: KnobConfig) -> optuna.distributions.BaseDistribution:
        kinds = self._optuna.distributions
        if knob.choices:
            return kinds.CategoricalDistribution(knob.choices)
        assert knob.low is not None and knob.high is not None
        if knob.integer:
            return kinds.IntDistribution(int(knob.low), int(knob.high), log=knob.log, step=int(knob.step or 1))
        return kinds.FloatDistribution(knob.low, knob.high, log=knob.log, step=knob.step)

    def report(self, number: int, rung: int, metric: float) -> None:
        """`metric` as it was measured."""
        value = self.sign * metric if math.isfinite(metric) else math.inf
        found = self._study.get_trials(deepcopy=False)[number]
        self._optuna.trial.Trial(self._study, found._trial_id).report(value, rung)

    def end(self, trial: Trial, state: str) -> None:
        """complete at the last rung, pruned before it, or failed."""
        states = self._optuna.trial.TrialState
        value = trial.value if math.isfinite(trial.value) else 1e9
        if state == "complete":
            self._study.tell(trial.number, value)
        else:
            self._study.tell(trial.number, state=states.PRUNED if state == "pruned" else states.FAIL)

    def _read(self, trial: optuna.trial.FrozenTrial) -> Trial:
        state = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}.get(trial.state.name, "running")
        return Trial(trial.number, dict(trial.params), state, dict(trial.intermediate_values))


def _plain(value: Any) -> Any:
    from dataclasses import asdict

    return asdict(value)
