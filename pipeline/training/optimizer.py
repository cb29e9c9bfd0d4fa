"""Build one optimizer for a sharded model, schedule its learning rates, and step it around backward.

It has fused tables, replicated tables and dense layers, each parameter once. A schedule depends on the step only,
so a resumed run is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, find_optimizer
from pipeline.config.training import LRSchedule, ScheduleConfig, TrainerConfig
from pipeline.embeddings.table import RowUpdates
from pipeline.runtime.errors import TrainingError
from pipeline.sharding.torchrec.cpu_tables import FastLookup, fast_lookups
from pipeline.sharding.torchrec.sharder import ShardedTables
from pipeline.sharding.torchrec.sparse_optimizer import ReplicatedTablesOptimizer, materialize_state

# fused kernels of these classes take found_inf
SKIPPING = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW)


class DenseOptimizer(KeyedOptimizerWrapper):
    """A torch optimizer by parameter name, whose state exists before the first step."""

    def __init__(self, params: dict[str, nn.Parameter], config: DenseOptimizerConfig, l2: float = 0.0) -> None:
        """Build it. `l2` times the weights is added to the gradient of each matrix, but not of
        biases and norms."""
        super().__init__(params, lambda weights: _make_dense(weights, config))
        self._weights = list(params.values())
        self._l2, self._matrices = l2, [weight for weight in self._weights if weight.dim() > 1]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, without the profiler range of torch's zero_grad."""
        for weight in self._weights:
            weight.grad = None

    def step(self, closure: Any = None) -> None:
        self.update(closure)

    def update(self, closure: Any = None) -> None:
        """Step without torch's wrapper, which opens a profiler range: 2 % of a small model's
        step."""
        if self._l2:
            with torch.no_grad():
                for weight in self._matrices:
                    if weight.grad is not None:
                        weight.grad.add_(weight, alpha=self._l2)
        self._optimizer.step(closure)

    @property
    def can_skip_on_device(self) -> bool:
        """Return True if torch's step takes `found_inf`."""
        return type(self._optimizer) in SKIPPING and all(group["fused"] for group in self._optimizer.param_groups)

    def skip_where(self, found_inf: torch.Tensor) -> None:
        """From now on an update changes nothing if `found_inf`, a float32 on the device, is 1 when the device is there."""
        self._optimizer.found_inf = found_inf  # as torch.amp.GradScaler sets it

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Do nothing: state exists already, and the dummy step of other optimizers would count as a
        step of Adam."""


class TrainingOptimizer(CombinedOptimizer):
    """The optimizer that the trainer steps, schedules and checkpoints.

    state_dict() has the same keys before and after the first step, and for fused and replicated
    tables. torch.distributed.checkpoint therefore loads it in place and reshards it. `num_steps`
    counts step().
    """

    def __init__(
        self,
        fused: KeyedOptimizer,
        replicated: ReplicatedTablesOptimizer | None,
        dense: DenseOptimizer | None,
        config: OptimizerConfig,
        lookups: Sequence[FastLookup] = (),
        keeps_rows: bool = False,
        updates: Mapping[str, RowUpdates] | None = None,
    ) -> None:
        """Combine the parts. `keeps_rows`: a gradient of zero changes nothing in a table.
        `updates`: by table, what differs from config.sparse."""
        parts = [fused, replicated, dense]
        super().__init__([part for part in parts if part is not None])
        self._fused, self._replicated, self._dense = fused, replicated, dense
        # the factors of the current learning rates, and the step of the tables' warm-ups
        self._factors: tuple[float, float, int] | None = None
        self._config, self._lookups, self._keeps_rows = config, lookups, keeps_rows
        self.num_steps = 0
        for group in self._dense_groups():
            group["name"] = "dense"
        self._name_sparse_groups(updates or {})
        self._longest_warmup = max((each.warmup_steps for each in (updates or {}).values()), default=0)
        self.scale_learning_rates(1.0, 1.0)

    def _name_sparse_groups(self, updates: Mapping[str, RowUpdates]) -> None:
        """Name the groups of tables, and store the updates of their tables in them. All tables of a
        group have the same rate."""
        names = {id(weight): key.split(".")[-2] for key, weight in self.params.items()}
        for group in self._sparse_groups():
            table = next((names[id(weight)] for weight in group["params"]), "")
            group["updates"] = own = updates.get(table, RowUpdates())
            group["name"] = f"sparse_{table}" if own.group else "sparse"

    def _sparse_groups(self) -> list[Any]:
        return [*self._fused.param_groups, *(self._replicated.param_groups if self._replicated else [])]

    def _dense_groups(self) -> list[Any]:
        return list(self._dense.param_groups) if self._dense else []

    @property
    def replicated(self) -> ReplicatedTablesOptimizer | None:
        """Return the optimizer of the data_parallel tables."""
        return self._replicated

    @property
    def configured_rates(self) -> tuple[float, float]:
        """Return the learning rates of tables and of layers, before schedules."""
        return self._config.sparse.lr, self._config.dense.lr

    @property
    def can_skip_on_device(self) -> bool:
        """Return True if gradients of zero for tables and `found_inf` for layers skip an update
        exactly."""
        return self._keeps_rows and (self._dense is None or self._dense.can_skip_on_device)

    def skip_where(self, found_inf: torch.Tensor) -> None:
        """Make later updates of the dense layers change nothing if `found_inf` is 1."""
        if self._dense is not None:
            self._dense.skip_where(found_inf)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of replicated tables and layers. Fused tables keep no gradients."""
        for part in (self._replicated, self._dense):
            if part is not None:
                part.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> None:
        self.update()

    def update(self) -> None:
        """Step without profiler ranges, as DenseOptimizer.update does. Backward has already updated
        the fused tables. Their own step would only set the same rate again."""
        if self._replicated is not None:
            self._replicated.step()
        if self._dense is not None:
            self._dense.update()
        self.num_steps += 1
        self._tell_lookups()

    def _tell_lookups(self) -> None:
        """Give lookups the number of the next step, which Adam uses to correct its moments. On GPUs
        FBGEMM counts itself."""
        for lookup in self._lookups:
            lookup.num_steps = self.num_steps

    def scale_learning_rates(self, sparse_factor: float, dense_factor: float, step: int = 0) -> None:
        """Set each rate to the configured rate times the factor, and times the table's own factor
        for update `step`. Fused tables get it immediately."""
        factors = sparse_factor, dense_factor, min(step, self._longest_warmup)
        if self._factors == factors:
            return
        self._factors = factors
        for group in self._sparse_groups():
            group["lr"] = self._config.sparse.lr * sparse_factor * group["updates"].rate(step)
        for group in self._dense_groups():
            group["lr"] = self._config.dense.lr * dense_factor
        self._fused.zero_grad()  # only passes the rate to FBGEMM, because there are no gradients

    def state_dict(self) -> dict[str, Any]:
        # Leave out parameters without state (SGD): rank 0 alone would save an empty dict, only for
        # its own tables.
        state: dict[str, Any] = {"state": {name: own for name, own in super().state_dict()["state"].items() if own}}
        if find_optimizer(self._config.sparse.name).counts_steps:
            state["num_steps"] = torch.tensor(self.num_steps)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        stateless: dict[str, Any] = {
            name: {} for name, weight in self.params.items() if weight in self.state and not self.state[weight]
        }
        super().load_state_dict({"state": {**stateless, **state_dict["state"]}})
        if "num_steps" in state_dict:
            self.num_steps = int(state_dict["num_steps"])
            for part in (self._fused, self._replicated):
                if part is not None:
                    part.set_optimizer_step(self.num_steps)
            self._tell_lookups()


def build_optimizer(model: DistributedModelParallel, config: OptimizerConfig, l2: float = 0.0) -> TrainingOptimizer:
    """Return the optimizer of a model. apply_sparse_optimizer must have run with the same config
    before sharding. `l2` applies to the matrices of the dense layers (model.l2). Raises
    TrainingError if a table has no optimizer, or its sharding in the plan does not allow the
    settings."""
    if forgotten := sorted(name for tables in _sharded_tables(model) for name in tables.tables_without_optimizer):
        raise TrainingError(
            f"table(s) {', '.join(forgotten)} were sharded without an optimizer and would train by FBGEMM's default, "
            "SGD at 0.01; call apply_sparse_optimizer before shard_model"
        )
    tables, layers = replicated_tables(model), dense_parameters(model)
    rules = {name: rule for sharded in _sharded_tables(model) for name, rule in sharded.update_rules.items()}
    updates = {name: own for sharded in _sharded_tables(model) for name, own in sharded.row_updates.items()}
    replicated = ReplicatedTablesOptimizer(tables, config.sparse, rules, updates) if tables else None
    dense = DenseOptimizer(layers, config.dense, l2) if layers else None
    parts: list[KeyedOptimizer | None] = [model.fused_optimizer, replicated, dense]
    assert_every_parameter_has_one_optimizer(model, [part for part in parts if part is not None])
    keeps_rows = find_optimizer(config.sparse.name).keeps_rows and not any(
        rule.is_lazy or rule.extras for rule in rules.values()
    )
    return TrainingOptimizer(model.fused_optimizer, replicated, dense, config, fast_lookups(model), keeps_rows, updates)


def _make_dense(weights: list[Any], config: DenseOptimizerConfig) -> torch.optim.Optimizer:
    optimizer = find_optimizer(config.name).dense(weights, config)
    materialize_state(optimizer)
    return optimizer


def _sharded_tables(model: DistributedModelParallel) -> Iterator[ShardedTables]:
    return (module for module in model.module.modules() if isinstance(module, ShardedTables))


def replicated_tables(model: DistributedModelParallel) -> dict[str, nn.Parameter]:
    """Return name -> weights of the data_parallel tables that are trained."""
    frozen = _tables_by_id(model)
    outside = in_backward_optimizer_filter(model.named_parameters())
    return {name: weight for name, weight in outside if weight.requires_grad and not frozen.get(id(weight), True)}


def dense_parameters(model: DistributedModelParallel) -> dict[str, nn.Parameter]:
    """Return name -> each parameter that is trained and is not a table."""
    tables = _tables_by_id(model)
    outside = in_backward_optimizer_filter(model.named_parameters())
    return {name: weight for name, weight in outside if weight.requires_grad and id(weight) not in tables}


def _tables_by_id(model: DistributedModelParallel) -> dict[int, bool]:
    """Return id() of each table's weights -> whether the table is frozen."""
    return {
        id(bag.weight): tables.row_updates[name].frozen
        for tables in _sharded_tables(model)
        for name, bag in tables.embedding_bags.items()
    }


def assert_every_parameter_has_one_optimizer(
    model: DistributedModelParallel, optimizers: Sequence[KeyedOptimizer]
) -> None:
    """Raise TrainingError that names parameters (also tables) with no optimizer, or with more than
    one."""
    frozen = _tables_by_id(model)
    counts: dict[str, int] = {
        name: 0
        for name, weight in model.named_parameters()
        # empty: this rank holds no part of the table
        if weight.requires_grad and weight.numel() and not frozen.get(id(weight), False)
    }
    for optimizer in optimizers:
        for name in optimizer.params:
            counts[name] = counts.get(name, 0) + 1
    uncovered = sorted(name for name, count in counts.items() if count == 0)
    doubled = sorted(name for name, count in counts.items() if count > 1)
    if uncovered:
        raise TrainingError(f"no optimizer trains {', '.join(uncovered)}: their values would never change")
    if doubled:
        raise TrainingError(f"more than one optimizer trains {', '.join(doubled)}: give each parameter to one")


def clip_dense_gradients(model: DistributedModelParallel, max_norm: float) -> torch.Tensor:
    """Scale the dense layers' gradients to a norm of at most `max_norm`. Return their norm before
    that.

    Call it after backward: DDP has then averaged the gradients, so all ranks have the same norm.
    Tables are excluded, so that the step does not depend on the plan: fused tables have no gradient
    after backward. optimizer.sparse.gradient_clip_norm limits the gradients of rows.
    """
    return torch.nn.utils.clip_grad_norm_(dense_parameters(model).values(), max_norm)


def clip_dense_numbers(model: DistributedModelParallel, max_abs: float) -> None:
    """Clip each number of the dense layers' averaged gradients to [-max_abs, max_abs]. Tables are
    excluded."""
    torch.nn.utils.clip_grad_value_(dense_parameters(model).values(), max_abs)


def lr_factor(schedule: LRSchedule, step: int) -> float:
    """Return the factor of update `step`, counted from 0. Warm-up: (step + 1) / warmup_steps, so
    the first step trains and the last warm-up step has factor 1. Decay: t = (step -
    decay_start_step) / decay_steps, at most 1 (`step` schedules continue to decay)."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant" or step < schedule.decay_start_step:
        return 1.0
    decayed = step - schedule.decay_start_step
    t = min(1.0, decayed / schedule.decay_steps)
    if schedule.kind == "poly":
        factor = (1.0 - t) ** schedule.power
    elif schedule.kind == "cosine":
        factor = 0.5 * (1.0 + math.cos(math.pi * t))
    else:
        factor = schedule.gamma ** (decayed // schedule.decay_steps)
    return max(schedule.end_factor, factor)


def apply_schedule(optimizer: TrainingOptimizer, schedule: ScheduleConfig, step: int, plateau: float = 1.0) -> None:
    """Set the learning rates of update `step`. Call it before that step's backward, which updates
    the tables. `plateau` is the current factor of schedule.plateau."""
    sparse, dense = (
        reduced(lr_factor(own, step), plateau, schedule.plateau.min_lr / lr)
        for own, lr in zip((schedule.sparse, schedule.dense), optimizer.configured_rates, strict=True)
    )
    optimizer.scale_learning_rates(sparse, dense, step)


def reduced(factor: float, plateau: float, least: float) -> float:
    """Return `factor` times `plateau`, but at least `least`, and at most `factor`."""
    return factor if plateau == 1.0 else max(factor * plateau, min(factor, least))


class StepOptimizer:
    """The optimizer that the train pipeline calls around backward. One step is `accumulation`
    micro-batches.

    Dense gradients add up over the micro-batches. Fused tables update in each backward, with the
    loss scaled by 1/accumulation. For SGD this equals one larger batch if no row recurs; otherwise
    it is an approximation.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: TrainingOptimizer,
        schedule: ScheduleConfig,
        trainer: TrainerConfig,
    ) -> None:
        self._model, self._optimizer, self._schedule = model, optimizer, schedule
        self._clip_norm, self._clip_value = trainer.gradient_clip_norm, trainer.gradient_clip_value
        self._accumulation = trainer.gradient_accumulation_steps
        self._lookups = fast_lookups(model)
        self.micro_step = 0
        self.lr_factor = 1.0  # multiplies both learning rates, in addition to the schedule

    @property
    def step_count(self) -> int:
        return self.micro_step // self._accumulation

    def zero_grad(self, set_to_none: bool = True) -> None:
        for lookup in self._lookups:
            lookup.step = self.micro_step
        if self.micro_step % self._accumulation == 0:
            apply_schedule(self._optimizer, self._schedule, self.step_count, self.lr_factor)
            # also passes the new rate to the fused tables
            self._optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        self.micro_step += 1
        if self.micro_step % self._accumulation == 0:
            if self._clip_value is not None:
                clip_dense_numbers(self._model, self._clip_value)
            if self._clip_norm is not None:
                clip_dense_gradients(self._model, self._clip_norm)
            self._optimizer.update()
