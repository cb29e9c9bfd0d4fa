"""Make the optimizer of the tables: it is fused into backward, or a torch optimizer for replicated
tables.

FBGEMM updates a sharded table's rows inside backward. A data_parallel table would ignore that
optimizer without an error, so it gets a torch optimizer with the same rule. The names and shapes of
its state are those of the fused optimizer, so that a checkpoint fits both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import optim
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizer

from pipeline import devices
from pipeline.config.optimizers import SparseOptimizerConfig, all_optimizers, find_optimizer
from pipeline.config.tables import entry_name
from pipeline.devices.base import in_host_memory
from pipeline.embeddings.table import RowUpdates
from pipeline.runtime.errors import ShardingError
from pipeline.sharding.torchrec.flat_update import flat_update
from pipeline.sharding.torchrec.update_rule import TouchedRows, UpdateRule

# Rows with an all-zero gradient stay unchanged. KNOWN: materialize_state knows their state.
KEEP_OTHER_ROWS = (torch.optim.SGD, torch.optim.Adagrad, optim.RowWiseAdagrad)
KNOWN = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, optim.RowWiseAdagrad)


def check_sparse_optimizer(config: SparseOptimizerConfig) -> None:
    """Raise ShardingError for settings that FBGEMM would ignore on every device."""
    if config.momentum:
        raise ShardingError(
            f"optimizer.sparse.momentum={config.momentum:g}: {config.name} for tables has no "
            "momentum and would ignore it; set it to 0"
        )
    entry = find_optimizer(config.name)
    if entry.positive_eps and not config.eps > 0:
        raise ShardingError(
            f"optimizer.sparse.eps={config.eps:g} must be above 0: a row without a gradient would become 0/0"
        )


def apply_sparse_optimizer(
    model: nn.Module, config: SparseOptimizerConfig, updates: Mapping[str, RowUpdates] | None = None
) -> None:
    """Attach the optimizer to each table, once, before planning and sharding.

    updates: of the tables that differ from `config`. Raises ShardingError if an L2 penalty would be
    ignored.
    """
    check_sparse_optimizer(config)
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection):
            for name, bag in module.embedding_bags.items():
                _attach(name, bag.weight, config, (updates or {}).get(name, RowUpdates()))


def _attach(name: str, weight: nn.Parameter, config: SparseOptimizerConfig, updates: RowUpdates) -> None:
    """Attach the optimizer of one table. A frozen table has SGD, because SGD has no state."""
    if updates.frozen:
        config, updates = SparseOptimizerConfig("sgd", config.lr), replace(updates, l2=0.0)
    elif updates.weight_decay is not None:
        config = replace(config, weight_decay=updates.weight_decay)
    entry = find_optimizer(config.name)
    # A separate dict for each table, because TorchRec writes into it.
    _apply_optimizer_in_backward(getattr(optim, entry.fused), [weight], _fused_kwargs(config))
    table: Any = weight
    table.row_updates = updates
    if updates.group:
        # TorchRec puts tables with equal kwargs into one lookup, and removes this key before it
        # builds the lookup. A lookup has one learning rate and one weight decay.
        table._optimizer_kwargs[0]["_batch_key"] = updates.group
    if entry.cpu_kernel is not None:
        table.update_rule = UpdateRule.of(config, updates.l2, len(weight))
    elif updates.l2:
        raise ShardingError(f"tables.{entry_name(name)}.l2={updates.l2:g}: {config.name} would ignore it; set it to 0")


def _fused_kwargs(config: SparseOptimizerConfig) -> dict[str, Any]:
    entry = find_optimizer(config.name)
    kwargs: dict[str, Any] = {"lr": config.lr}
    if entry.has_eps:
        kwargs["eps"] = config.eps
    if entry.counts_steps:
        kwargs |= {"beta1": config.beta1, "beta2": config.beta2}
    if config.weight_decay and entry.cpu_kernel is None:  # otherwise an UpdateRule has it
        kwargs["weight_decay"] = config.weight_decay
    return kwargs


def configure_fbgemm(name: str, weight: nn.Parameter) -> None:
    """Pass the weight decay of a table's rule to FBGEMM on GPUs.

    Raises ShardingError if FBGEMM would ignore the decay or the clipping.
    """
    rule: UpdateRule | None = getattr(weight, "update_rule", None)
    if rule is None or not rule.extras:
        return
    (optimizer,) = weight._optimizer_classes  # type: ignore[attr-defined]
    modes = next(each.fbgemm_decays for each in all_optimizers().values() if each.fused == optimizer.__name__)
    wanted = [mode for mode, value in (("l2", rule.l2), ("decoupled", rule.decay)) if value]
    if rule.clip_value or rule.clip_norm or len(wanted) > 1 or not set(wanted) <= set(modes):
        raise ShardingError(
            f"table {name!r}: FBGEMM's {optimizer.__name__} on GPUs has "
            f"{' or '.join(modes) or 'no'} weight decay and no clipping of rows' gradients, and would ignore {rule.extras}; "
            "use adamw, partial_rowwise_adam, lamb or rowwise_adagrad with optimizer.sparse.weight_decay, or train on CPU"
        )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

    kwargs = weight._optimizer_kwargs[0]  # type: ignore[attr-defined]
    kwargs["weight_decay"] = rule.l2 or rule.decay
    if len(modes) > 1:  # its default mode would ignore the decay
        kwargs["weight_decay_mode"] = WeightDecayMode.L2 if rule.l2 else WeightDecayMode.DECOUPLE


class ReplicatedTablesOptimizer(KeyedOptimizer):
    """Optimize data_parallel tables by a torch optimizer, with the state of the fused optimizer.

    `params`: "<path>.embedding_bags.<table>.weight" -> table. TrainingOptimizer stores the step
    number.
    """

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        config: SparseOptimizerConfig,
        rules: Mapping[str, UpdateRule] | None = None,
        updates: Mapping[str, RowUpdates] | None = None,
    ) -> None:
        """rules: by table, the update rules of tables that need more than `config`. Tables whose
        `updates` have different groups are in different groups of the optimizer."""
        by_weight = {weight: (rules or {}).get(key.split(".")[-2]) for key, weight in params.items()}
        groups: dict[str, list[Any]] = {}
        for key, weight in params.items():
            groups.setdefault((updates or {}).get(key.split(".")[-2], RowUpdates()).group, []).append(weight)
        self._optimizer = _make_replicated(by_weight, [{"params": group} for group in groups.values()], config)
        self._flat = flat_update(params, self._optimizer) if devices.current().has_kernels else None
        self._marks: dict[nn.Parameter, torch.Tensor] = {}
        states = find_optimizer(config.name).replicated_states or {}
        state = {}
        for key, weight in params.items():
            table = key.split(".")[-2]
            own = self._optimizer.state[weight]
            state[weight] = {
                f"{table}.{fused}": own[name].view(-1) if own[name].shape == (len(weight), 1) else own[name]
                for fused, name in states.items()
            }
        super().__init__(params, state, self._optimizer.param_groups)

    def track_rows(self) -> dict[str, torch.Tensor]:
        """Keep for each table one number per row, which an update of the row sets to 1.

        The reader must set the numbers back to 0.
        """
        by_weight = {weight: key.split(".")[-2] for key, weight in self.params.items()}
        if self._flat:
            bytes_of = self._flat.track_rows()
            return {name: torch.from_numpy(bytes_of[id(weight)]) for weight, name in by_weight.items()}
        self._marks = {
            weight: torch.zeros(len(weight), dtype=torch.uint8, device=weight.device) for weight in by_weight
        }
        return {by_weight[weight]: marks for weight, marks in self._marks.items()}

    def _mark_rows(self) -> None:
        """Mark rows as TouchedRows does; all rows for an unknown optimizer."""
        for weight, marks in self._marks.items():
            if not isinstance(self._optimizer, (TouchedRows, *KEEP_OTHER_ROWS)) or (
                isinstance(self._optimizer, TouchedRows) and self._optimizer.updates_all(weight)
            ):
                marks.fill_(1)
            elif weight.grad is not None:
                marks |= (weight.grad != 0).any(dim=1).to(torch.uint8)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._flat and set_to_none:
            self._flat.clear_gradients()
        else:
            self._optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> None:
        if self._flat and closure is None:
            self._flat.step()
        else:
            self._optimizer.step(closure=closure)
            self._mark_rows()

    def set_optimizer_step(self, step: int) -> None:
        if isinstance(self._optimizer, TouchedRows):
            self._optimizer.num_steps = step
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(step)


def _make_replicated(
    params: Mapping[nn.Parameter, UpdateRule | None], groups: list[dict[str, Any]], config: SparseOptimizerConfig
) -> torch.optim.Optimizer:
    """Return torch's optimizer if it changes only touched rows. Its state exists already."""
    entry = find_optimizer(config.name)
    if entry.replicated_states is None:
        known = ", ".join(name for name, each in all_optimizers().items() if each.replicated_states is not None)
        raise ShardingError(
            f"optimizer.sparse.name={config.name} exists only for sharded tables, but "
            f"{len(params)} tables are data_parallel; remove data_parallel from their "
            f"sharding.sharding_types, or use one of {known}"
        )
    if entry.cpu_kernel is not None:
        rules = {weight: rule or UpdateRule.of(config) for weight, rule in params.items()}
        if any(rule.is_lazy or rule.extras for rule in rules.values()):
            return TouchedRows(groups, rules, config.lr)
    kwargs: dict[str, Any] = {"lr": config.lr}
    if entry.has_eps:
        kwargs["eps"] = config.eps
    if entry.counts_steps:
        kwargs["betas"] = (config.beta1, config.beta2)
    kind = entry.replicated()
    if kind is optim.RowWiseAdagrad and not in_host_memory(params):
        kind = RowWiseAdagradAtOnce
    optimizer = kind(groups, **kwargs)
    materialize_state(optimizer)
    return optimizer


@torch.no_grad()
def materialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that torch makes at the first step, so that a checkpoint can be loaded before this step."""
    if not isinstance(optimizer, KNOWN):
        _step_on_nothing(optimizer)
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            state = optimizer.state[weight]
            if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                # Kernels of these groups read the counter on the device. A CUDA kernel with a
                # counter on the host would read a host address (torch/optim/adam.py, _init_group).
                on_device = group["fused"] or group["capturable"]
                state["step"] = torch.zeros((), device=weight.device if on_device else "cpu")
                state["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
            elif isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
                state["momentum_buffer"] = torch.zeros_like(weight, memory_format=torch.preserve_format)


def _step_on_nothing(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of an unknown optimizer by a step without gradients, then undo the step."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for weight, value in zip(weights, before, strict=True):
        weight.copy_(value)
        weight.grad = None
        if torch.is_tensor(step := optimizer.state[weight].get("step")):
            step.zero_()
        elif step is not None:
            optimizer.state[weight]["step"] = 0


class RowWiseAdagradAtOnce(optim.RowWiseAdagrad):
    """TorchRec's RowWiseAdagrad without decay, with a few kernel launches for all tables of one
    width.

    TorchRec's class calls seven operations per table, which is too slow for small tables on a GPU.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            by_width: dict[int, list[torch.Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    by_width.setdefault(weight.shape[1], []).append(weight)
            for weights in by_width.values():
                self._update(weights, group["lr"], group["eps"])

    def _update(self, weights: list[torch.Tensor], lr: float, eps: float) -> None:
        sizes, states = [len(weight) for weight in weights], [self.state[weight] for weight in weights]
        torch._foreach_add_([state["step"] for state in states], 1.0)
        gradients = torch.cat([weight.grad for weight in weights])  # type: ignore[misc]
        sums = [state["sum"] for state in states]
        torch._foreach_add_(sums, gradients.square().mean(dim=1, keepdim=True).split(sizes))
        updates = gradients / torch.cat(sums).sqrt_().add_(eps)
        torch._foreach_add_(weights, updates.split(sizes), alpha=-lr)
