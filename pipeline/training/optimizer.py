"""Build one optimizer for a sharded model: fused tables, replicated tables and dense layers, each parameter once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from pipeline.config.optimizers import find_optimizer
from pipeline.config.training import DenseOptimizerConfig, OptimizerConfig
from pipeline.runtime.errors import TrainingError
from pipeline.sharding.torchrec.cpu_tables import FastLookup, fast_lookups
from pipeline.sharding.torchrec.sharder import ShardedTables
from pipeline.sharding.torchrec.sparse_optimizer import ReplicatedTablesOptimizer, materialize_state

SKIPPING = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW)  # in their fused kernels


class DenseOptimizer(KeyedOptimizerWrapper):
    """A torch optimizer by parameter name, whose state is there before the first step."""

    def __init__(self, params: dict[str, nn.Parameter], config: DenseOptimizerConfig, l2: float = 0.0) -> None:
        """`l2` times its weights is added to the gradient of each matrix; biases and norms are vectors."""
        super().__init__(params, lambda weights: _make_dense(weights, config))
        self._weights = list(params.values())
        self._l2, self._matrices = l2, [weight for weight in self._weights if weight.dim() > 1]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Without the profiler range of torch's, as update() is."""
        for weight in self._weights:
            weight.grad = None

    def step(self, closure: Any = None) -> None:
        self.update(closure)

    def update(self, closure: Any = None) -> None:
        """step() without torch's wrapper, which opens a profiler range: a fiftieth of a small model's step."""
        if self._l2:
            with torch.no_grad():
                for weight in self._matrices:
                    if weight.grad is not None:
                        weight.grad.add_(weight, alpha=self._l2)
        self._optimizer.step(closure)

    @property
    def can_skip_on_device(self) -> bool:
        """Whether torch's step takes `found_inf`."""
        return type(self._optimizer) in SKIPPING and all(group["fused"] for group in self._optimizer.param_groups)

    def skip_where(self, found_inf: torch.Tensor) -> None:
        """From now on an update changes nothing if `found_inf`, a float32 on the device, is 1 when the device is there."""
        self._optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # as torch.amp.GradScaler sets it

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Nothing to do; the dummy step that others need here would count as a step of Adam."""


class TrainingOptimizer(CombinedOptimizer):
    """What the trainer steps, schedules and checkpoints.

    state_dict() is the same before the first step and after, and the same for a table whether it is fused or
    replicated, so torch.distributed.checkpoint loads it in place and reshards it. `num_steps` counts step().
    """

    def __init__(
        self,
        fused: KeyedOptimizer,
        replicated: ReplicatedTablesOptimizer | None,
        dense: DenseOptimizer | None,
        config: OptimizerConfig,
        lookups: Sequence[FastLookup] = (),
        keeps_rows: bool = False,
    ) -> None:
        """keeps_rows: a gradient of zero changes nothing in a table."""
        parts = [fused, replicated, dense]
        super().__init__([part for part in parts if part is not None])
        self._fused, self._replicated, self._dense = fused, replicated, dense
        self._factors: tuple[float, float] | None = None  # of the rates that are set
        self._config, self._lookups, self._keeps_rows = config, lookups, keeps_rows
        self.num_steps = 0
        for name, groups in (("sparse", self._sparse_groups()), ("dense", self._dense_groups())):
            for group in groups:
                group["name"] = name

    def _sparse_groups(self) -> list[Any]:
        return [*self._fused.param_groups, *(self._replicated.param_groups if self._replicated else [])]

    def _dense_groups(self) -> list[Any]:
        return list(self._dense.param_groups) if self._dense else []

    @property
    def replicated(self) -> ReplicatedTablesOptimizer | None:
        """Of the data_parallel tables."""
        return self._replicated

    @property
    def configured_rates(self) -> tuple[float, float]:
        """Of tables and of layers, before schedules."""
        return self._config.sparse.lr, self._config.dense.lr

    @property
    def can_skip_on_device(self) -> bool:
        """Whether an update is left out exactly if tables get gradients of zero and skip_where's number is 1."""
        return self._keeps_rows and (self._dense is None or self._dense.can_skip_on_device)

    def skip_where(self, found_inf: torch.Tensor) -> None:
        """As DenseOptimizer's."""
        if self._dense is not None:
            self._dense.skip_where(found_inf)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of what has gradients outside backward; the fused tables have none."""
        for part in (self._replicated, self._dense):
            if part is not None:
                part.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> None:
        self.update()

    def update(self) -> None:
        """step() as DenseOptimizer's update(). Backward has updated the fused tables, whose own step hands them their rate again."""
        if self._replicated is not None:
            self._replicated.step()
        if self._dense is not None:
            self._dense.update()
        self.num_steps += 1
        self._tell_lookups()

    def _tell_lookups(self) -> None:
        """The next step's number, by which Adam corrects its moments; FBGEMM counts on GPUs itself."""
        for lookup in self._lookups:
            lookup.num_steps = self.num_steps

    def scale_learning_rates(self, sparse_factor: float, dense_factor: float) -> None:
        """Set every rate to its configured one times the factor, at once also inside the fused tables."""
        if self._factors == (sparse_factor, dense_factor):
            return
        self._factors = sparse_factor, dense_factor
        for group in self._sparse_groups():
            group["lr"] = self._config.sparse.lr * sparse_factor
        for group in self._dense_groups():
            group["lr"] = self._config.dense.lr * dense_factor
        self._fused.zero_grad()  # hands the rate to FBGEMM and does nothing else: there are no gradients

    def state_dict(self) -> dict[str, Any]:
        # Without the parameters that have none (SGD): an empty dict is saved by rank 0 alone, and only for its tables.
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
    """The optimizer of a model on which apply_sparse_optimizer was called with the same config before sharding.

    `l2`: of the dense layers' matrices (model.l2).

    Raises:
        TrainingError: a table without an optimizer, or settings that its sharding in the plan does not allow.
    """
    if forgotten := sorted(name for tables in _sharded_tables(model) for name in tables.tables_without_optimizer):
        raise TrainingError(
            f"table(s) {', '.join(forgotten)} were sharded without an optimizer and would train by FBGEMM's default, "
            "SGD at 0.01; call apply_sparse_optimizer before shard_model"
        )
    tables, layers = replicated_tables(model), dense_parameters(model)
    rules = {name: rule for sharded in _sharded_tables(model) for name, rule in sharded.update_rules.items()}
    replicated = ReplicatedTablesOptimizer(tables, config.sparse, rules) if tables else None
    dense = DenseOptimizer(layers, config.dense, l2) if layers else None
    parts: list[KeyedOptimizer | None] = [model.fused_optimizer, replicated, dense]
    assert_every_parameter_has_one_optimizer(model, [part for part in parts if part is not None])
    keeps_rows = find_optimizer(config.sparse.name).keeps_rows and not any(
        rule.is_lazy or rule.extras for rule in rules.values()
    )
    return TrainingOptimizer(model.fused_optimizer, replicated, dense, config, fast_lookups(model), keeps_rows)


def _make_dense(weights: list[Any], config: DenseOptimizerConfig) -> torch.optim.Optimizer:
    optimizer = find_optimizer(config.name).dense(weights, config)
    materialize_state(optimizer)
    return optimizer


def _sharded_tables(model: DistributedModelParallel) -> Iterator[ShardedTables]:
    return (module for module in model.module.modules() if isinstance(module, ShardedTables))


def replicated_tables(model: DistributedModelParallel) -> dict[str, nn.Parameter]:
    """Name -> weights of the data_parallel tables."""
    replicated = {id(bag.weight) for tables in _sharded_tables(model) for bag in tables.embedding_bags.values()}
    outside = in_backward_optimizer_filter(model.named_parameters())
    return {name: weight for name, weight in outside if id(weight) in replicated and weight.requires_grad}


def dense_parameters(model: DistributedModelParallel) -> dict[str, nn.Parameter]:
    """Name -> all that trains and is no table."""
    tables = replicated_tables(model)
    outside = in_backward_optimizer_filter(model.named_parameters())
    return {name: weight for name, weight in outside if name not in tables and weight.requires_grad}


def assert_every_parameter_has_one_optimizer(
    model: DistributedModelParallel, optimizers: Sequence[KeyedOptimizer]
) -> None:
    """Raises TrainingError that names the parameters, tables among them, which no optimizer or more than one would train."""
    counts: dict[str, int] = {
        name: 0
        for name, weight in model.named_parameters()
        if weight.requires_grad and weight.numel()  # empty: a table of which this rank holds nothing
    }
    for optimizer in optimizers:
        for name in optimizer.params:
            counts[name] = counts.get(name, 0) + 1
    uncovered = sorted(name for name, count in counts.items() if count == 0)
    doubled = sorted(name for name, count in counts.items() if count > 1)
    if uncovered:
        raise TrainingError(
            f"no optimizer trains {', '.join(uncovered)}: they would stay at their first values for ever"
        )
    if doubled:
        raise TrainingError(f"more than one optimizer trains {', '.join(doubled)}: give each parameter to one")


def clip_dense_gradients(model: DistributedModelParallel, max_norm: float) -> torch.Tensor:
    """Scale the dense layers' gradients to a norm of at most `max_norm`; their norm before.

    Call it after backward: DDP has averaged the gradients by then, so the norm of one rank is that of all.
    Tables stay out: fused ones have no gradient to clip when backward is over, and replicated ones follow them, so that the
    step does not depend on the plan. optimizer.sparse.gradient_clip_norm limits rows' gradients instead.
    """
    return torch.nn.utils.clip_grad_norm_(dense_parameters(model).values(), max_norm)


def clip_dense_numbers(model: DistributedModelParallel, most: float) -> None:
    """Bring each number of the dense layers' averaged gradients into [-most, most]; tables stay out as above."""
    torch.nn.utils.clip_grad_value_(dense_parameters(model).values(), most)
