"""Collect from an evaluation what the value of a policy is estimated from: `evaluate policy={...}`

Each shown row is a decision. For each, the model scores the candidates, the policy chooses among
them, and its probability is compared with the logging policy's. A decision keeps its context: the
features that policy.action does not name, and the position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from pipeline.config.registry import read_settings
from pipeline.data.dataset import Dataset
from pipeline.data.quality import Floats, probabilities
from pipeline.data.read.batch import Batch, first_ids, with_features
from pipeline.data.read.reader import ShardReader
from pipeline.data.targets import main_label
from pipeline.extras.off_policy.estimate import (
    ESTIMATORS,
    Decisions,
    Estimate,
    effective_size,
    estimates,
    why_unreliable,
)
from pipeline.extras.off_policy.settings import PolicyConfig
from pipeline.models.tasks.click_metrics import gather_to_main
from pipeline.models.tasks.task import task_in
from pipeline.planner.explain import print_grid
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.runtime.errors import ConfigError, TrainingError, did_you_mean
from pipeline.runtime.logs import to_json
from pipeline.runtime.process import watchdog
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.runtime.storage import storage
from pipeline.training.evaluation import clicks_of
from pipeline.training.readers import FailSafe, agreed_failure, on_all_ranks

SUFFIX = ".policy.json"
SHOWN = {"ips": "IPS", "snips": "SNIPS", "doubly_robust": "doubly robust", "switch": "switch"}
MAX_PLACES = 10


class Action(NamedTuple):
    """The features of an action in its newest row. position: of this row."""

    position: int
    dense: list[float]
    ids: list[NDArray[np.int64]]
    weights: list[NDArray[np.float32] | None]


@dataclass(frozen=True)
class PolicyValue:
    """The estimates of an evaluation. by_place: position -> decisions, mean reward, doubly robust."""

    policy: dict[str, Any]
    decisions: int
    effective: float  # decisions at equal weights
    largest_weight: float
    unreliable: str  # why intervals are not reliable
    unknown: int
    actions: float
    values: dict[str, Estimate]
    by_place: dict[str, tuple[int, Estimate, Estimate]]

    def write(self, evaluation: str) -> None:
        """Write the estimates next to `evaluation`, the JSON file of the metrics."""
        shown = asdict(self) | {"values": {name: each._asdict() for name, each in self.values.items()}}
        shown["by_place"] = {
            place: {"decisions": count, "logged": logged._asdict(), "doubly_robust": value._asdict()}
            for place, (count, logged, value) in self.by_place.items()
        }
        storage.publish_text(evaluation.removesuffix(".json") + SUFFIX, to_json(shown, indent=1))

    def lines(self) -> list[str]:
        """Return the estimates as lines for the terminal."""
        weight, percent = self.values["mean_weight"], 100 * self.policy["confidence"]
        rows = [["as logged", *_cells(self.values["logged"])]]
        rows += [[SHOWN[name], *_cells(self.values[name])] for name in ESTIMATORS]
        found = [
            "",
            f"serving by this model, policy={self.policy['kind']}: reward a decision, of {self.decisions:,} logged decisions "
            f"with {self.actions:,.1f} candidates",
            *print_grid(["estimate", "value", f"{percent:g} % from", "to"], rows, right=["value", "to"]).splitlines(),
            f"the decisions are worth {self.effective:,.0f} at equal weights; the largest weight is {self.largest_weight:,.1f}",
        ]
        if self.unknown:
            found.append(f"{self.unknown:,} decisions have an action that the model does not know and never chooses")
        if self.unreliable:
            found.append(
                f"the intervals are not reliable: {self.unreliable}. Use more rows, or a policy closer to the log's (softmax, "
                "epsilon_greedy)"
            )
        if not weight.low <= 1.0 <= weight.high:
            found.append(
                f"the mean weight is {weight.value:.3f} ({weight.low:.3f} to {weight.high:.3f}) instead of 1: the propensities are "
                "not from this log, or the log could not show actions that the policy chooses"
            )
        if self.by_place:
            rows = [
                [place, f"{count:,}", f"{logged.value:.5f}", *_cells(value)]
                for place, (count, logged, value) in self.by_place.items()
            ]
            head = ["position", "decisions", "as logged", "doubly robust", f"{percent:g} % from", "to"]
            found += print_grid(head, rows, right=head[1:]).splitlines()
        return [*found, ""]


def _cells(estimate: Estimate) -> list[str]:
    return [f"{value:.5f}" for value in (estimate.value, estimate.low, estimate.high)]


class PolicyRows:
    """Collects decisions on all ranks. Building it reads the split once to find the actions. Collective."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        resolved: ResolvedJob,
        model: nn.Module,
        reader: ShardReader,
        context: DistributedContext,
        key: str = "policy",
    ) -> None:
        self.settings: PolicyConfig = read_settings(PolicyConfig, settings, key, key)
        self._model, self._task, self._reader, self._context = model, task_in(model), reader, context
        self._key, columns = key, resolved.job.data.columns
        aside = [*resolved.job.trainer.loss.columns, *columns.logged]
        self._propensity = aside.index(columns.propensity or "")
        self._place = None if columns.position is None else aside.index(columns.position)
        self._main = main_label(columns, resolved.dataset)
        self._label = self.settings.label or self._main
        self._positions = reader.positions(epoch=0)
        self._actions: _Actions | None = None
        if self.settings.action:
            _check_action(self.settings.action, resolved, reader, key)
            self._actions = _Actions(self.settings, resolved.dataset, _find_actions(self, resolved.dataset), key)
        # per decision: position, group; and the numbers of Decisions
        self._numbers: list[torch.Tensor] = []
        self._floats: list[torch.Tensor] = []

    def update(self, clicks: dict[str, Any], batch: Batch, prediction: Any) -> None:
        """Add a batch. Collective: every rank scores every candidate."""
        of_label = self._of_label(clicks)
        assert batch.aside is not None, "the reader was opened with data.columns.logged"
        aside = batch.aside.double().cpu()
        propensity = aside[:, self._propensity]
        place = torch.zeros_like(propensity) if self._place is None else aside[:, self._place]
        present, positions = batch.is_present.cpu(), torch.from_numpy(next(self._positions))
        groups = torch.zeros_like(positions) if batch.groups is None else batch.groups.cpu()
        counts = (of_label.sample_weights > 0.0).double().cpu()
        floats = [propensity * counts, of_label.labels.double().cpu(), place]
        if self._actions is None:
            floats.append(of_label.logits.double().cpu())
        else:
            present = present & (floats[0] != 0.0)
            floats += self._actions.decide(self, batch)
        self._numbers.append(torch.stack([positions, groups], dim=1)[present])
        self._floats.append(torch.stack(floats, dim=1)[present])

    def gather(self) -> Decisions | None:
        """Return the decisions in the order of the split on rank 0, None on other ranks. Collective."""
        numbers, floats = (
            gather_to_main(torch.cat(parts).flatten(), self._context).numpy().reshape(-1, parts[0].shape[1])
            for parts in (self._numbers, self._floats)
        )
        return on_all_ranks(lambda: self._decisions(numbers, floats) if self._context.is_main else None, self._context)

    def compute(self, split: str, step: int, metrics: dict[str, float]) -> PolicyValue | None:
        """Return the estimates on rank 0, None on other ranks. Collective."""
        rows = self.gather()
        if rows is None:
            return None
        settings, weights = self.settings, rows.weights
        return PolicyValue(
            asdict(settings),
            len(weights),
            effective_size(weights),
            float(weights.max()),
            why_unreliable(weights),
            rows.unknown,
            rows.actions,
            estimates(rows, settings.confidence, settings.max_weight),
            _by_place(rows, settings.confidence),
        )

    def logits(self, batch: Batch) -> NDArray[np.float64]:
        """Return the scores [batch] of the label. Collective."""
        watchdog.beat(phase="evaluating")
        _, prediction = self._model(batch)
        scores: NDArray[np.float64] = self._of_label(clicks_of(self._task, prediction)).logits.double().cpu().numpy()
        return scores

    def _of_label(self, clicks: dict[str, Any]) -> Any:
        found = clicks.get("" if "" in clicks and self._label == self._main else f"{self._label}/")
        if found is None:
            raise TrainingError(
                f"{self._key}: the model predicts no binary label {self._label!r}; "
                + (
                    f"choose {self._key}.label among {', '.join(each.rstrip('/') or self._main for each in clicks)}"
                    if clicks
                    else "leave the key out"
                )
            )
        return found

    def _decisions(self, numbers: NDArray[np.int64], floats: Floats) -> Decisions:
        order = np.argsort(numbers[:, 0])
        (positions, groups), (propensity, reward, place, *scored) = numbers[order].T, floats[order].T
        wrong = ~((propensity >= 0.0) & (propensity <= 1.0))
        if wrong.any():
            raise TrainingError(
                f"{wrong.sum():,} of {len(wrong):,} rows have a propensity that is not a probability, such as "
                f"{propensity[wrong][0]:g}: data.columns.propensity needs numbers from 0 to 1"
            )
        unit = np.where(groups == 0, positions, groups)
        if self._actions is None:
            chosen, predicted, expected, actions = self._within_groups(groups, scored[0])
            shown = (propensity > 0.0) & (groups != 0)
            parts = (reward, propensity, chosen, predicted, expected, unit, place)
            reward, propensity, chosen, predicted, expected, unit, place = (each[shown] for each in parts)
            unknown = 0
        else:
            chosen, predicted, expected, known = scored
            unknown, actions = int((known == 0.0).sum()), float(len(self._actions.ids))
        if not chosen.any():
            raise TrainingError(
                f"{self._key}: the policy chooses no action that the log shows ({len(chosen):,} shown rows): use a policy closer "
                "to the log's (softmax, epsilon_greedy), or more rows"
            )
        places = None if self._place is None else place
        return Decisions(reward, propensity, chosen, predicted, expected, unit, places, unknown, actions)

    def _within_groups(self, groups: NDArray[np.int64], scores: Floats) -> tuple[Floats, Floats, Floats, float]:
        order = np.argsort(groups, kind="stable")
        starts = np.flatnonzero(np.append(True, groups[order][1:] != groups[order][:-1]))
        sizes = np.diff(np.append(starts, len(order)))
        chosen, predicted = self.settings.probabilities(scores[order], starts), probabilities(scores[order])
        expected = np.repeat(np.add.reduceat(chosen * predicted, starts), sizes)
        back = np.argsort(order)
        return chosen[back], predicted[back], expected[back], float(sizes.mean())


class _Actions:
    """The known actions of the split, in the order of their ids."""

    def __init__(self, settings: PolicyConfig, dataset: Dataset, found: dict[int, Action], key: str) -> None:
        if not 2 <= len(found) <= settings.max_actions:
            raise TrainingError(
                f"{key}.action={settings.action}: the split has {len(found):,} known values of {settings.action[0]!r}, and a policy "
                f"chooses among 2 to {key}.max_actions={settings.max_actions:,}; each is scored for each row"
            )
        self._settings = settings
        self.ids = np.array(sorted(found), np.int64)
        self._found = [found[each] for each in self.ids.tolist()]
        self._sparse, self._dense = _split(settings.action, dataset)

    def decide(self, rows: PolicyRows, batch: Batch) -> list[torch.Tensor]:
        """Return of each row [batch]: the policy's probability of the logged action, its predicted
        reward, v(x), and whether the action is known. Collective."""
        batch = batch.to(rows._context.device)
        scores = np.stack([rows.logits(self._with(batch, each)) for each in self._found], axis=1)
        count = len(self.ids)
        starts = np.arange(len(scores)) * count
        chosen = self._settings.probabilities(scores.reshape(-1), starts).reshape(scores.shape)
        predicted = probabilities(scores)
        logged = first_ids(batch.sparse_features[self._settings.action[0]])
        at = np.minimum(np.searchsorted(self.ids, logged), count - 1)
        known, every = self.ids[at] == logged, np.arange(len(scores))
        found = (chosen[every, at] * known, predicted[every, at], (chosen * predicted).sum(1), known)
        return [torch.from_numpy(each.astype(np.float64)) for each in found]

    def _with(self, batch: Batch, action: Action) -> Batch:
        """Return the batch with the action in all rows."""
        device, size = batch.labels.device, batch.batch_size
        dense = batch.dense_features.clone()
        dense[:, self._dense] = torch.tensor(action.dense, dtype=dense.dtype, device=device)
        replaced = {}
        for name, ids, weights in zip(self._sparse, action.ids, action.weights, strict=True):
            feature = batch.sparse_features[name]
            replaced[name] = JaggedTensor(
                torch.from_numpy(np.tile(ids, size)).to(feature.values()),
                None if weights is None else torch.from_numpy(np.tile(weights, size)).to(device),
                torch.full((size,), len(ids), dtype=feature.lengths().dtype, device=device),
            )
        return replace(batch, dense_features=dense, sparse_features=with_features(batch.sparse_features, replaced))


def _split(names: Iterable[str], dataset: Dataset) -> tuple[list[str], list[int]]:
    """Return the categorical features among `names`, and the columns of the dense ones."""
    dense = dataset.dense_features
    return [name for name in names if name not in dense], [dense.index(name) for name in names if name in dense]


def _check_action(names: list[str], resolved: ResolvedJob, reader: ShardReader, key: str) -> None:
    dataset, sampled = resolved.dataset, resolved.job.data.synthetic_multi_hot
    known = [*dataset.dense_features, *reader.plain_features]
    for name in names:
        if name not in known or name in sampled:
            raise ConfigError(
                f"{key}.action names {name!r}, which is not a feature whose values the model reads unchanged; choose among "
                f"{', '.join(known[:30])}{did_you_mean(name, known)}"
            )
    if names[0] in dataset.dense_features:
        raise ConfigError(f"{key}.action={names}: name the feature that identifies an action first, a category")


def _find_actions(rows: PolicyRows, dataset: Dataset) -> dict[int, Action]:
    """Read the split once. Return each known action with its features in its newest row. Collective."""
    reader, context, names = rows._reader, rows._context, rows.settings.action
    sparse, dense = _split(names, dataset)
    found: dict[int, Action] = {}
    batches, fail_safe = reader.batches(epoch=0), FailSafe(reader)
    try:
        for _, positions, batch in zip(
            range(reader.steps_per_epoch), reader.positions(epoch=0), fail_safe.batches(batches), strict=False
        ):
            watchdog.beat(phase="evaluating")
            ids = first_ids(batch.sparse_features[names[0]])
            usable = np.flatnonzero(batch.is_present.numpy() & (ids > 0))
            usable = usable[np.argsort(-positions[usable], kind="stable")]
            features = [batch.sparse_features[name] for name in sparse]
            for row in usable[np.unique(ids[usable], return_index=True)[1]].tolist():
                if int(ids[row]) not in found or found[int(ids[row])].position < positions[row]:
                    cells = [_cell(feature, row) for feature in features]
                    found[int(ids[row])] = Action(
                        int(positions[row]),
                        batch.dense_features[row, dense].tolist(),
                        [ids_of for ids_of, _ in cells],
                        [weights for _, weights in cells],
                    )
    finally:
        batches.close()
    if failure := agreed_failure(fail_safe.error, context):
        raise failure
    if context.world_size == 1:
        return found
    parts: list[dict[int, Action]] = [{}] * context.world_size
    dist.all_gather_object(parts, found)
    newest: dict[int, Action] = {}
    for part in parts:
        newest |= {id: each for id, each in part.items() if id not in newest or newest[id].position < each.position}
    return newest


def _cell(feature: JaggedTensor, row: int) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
    begin, end = feature.offsets()[row : row + 2].tolist()
    weights = feature.weights_or_none()
    return feature.values()[begin:end].numpy(), None if weights is None else weights[begin:end].numpy()


def _by_place(rows: Decisions, confidence: float) -> dict[str, tuple[int, Estimate, Estimate]]:
    """Return the first positions with their values; nothing if the data have no positions."""
    found = {}
    places = [] if rows.place is None else np.unique(rows.place).tolist()
    for place in places[:MAX_PLACES]:
        at = rows.place == place
        parts = (rows.reward, rows.propensity, rows.chosen, rows.predicted, rows.expected, rows.unit)
        if not rows.weights[at].any():
            continue
        values = estimates(Decisions(*(part[at] for part in parts)), confidence)
        found[f"{place:g}"] = (int(at.sum()), values["logged"], values["doubly_robust"])
    return found
