"""Define the optimizers by name: how they train tables and dense layers, and the state they keep.

An entry holds everything that this package knows about an optimizer. torch is imported only inside
methods, because a job is composed without torch. A plugin adds an optimizer:

    @register("optimizer", "lion")
    class Lion(Optimizer):
        def dense(self, weights, config):
            return lion_pytorch.Lion(weights, lr=config.lr, weight_decay=config.weight_decay)
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.config.registry import components, find, register
from pipeline.runtime.errors import (
    ConfigError,
    check_above,
    check_at_least,
    check_below_one,
    check_choice,
    did_you_mean,
)

if TYPE_CHECKING:
    import torch

DECAY_MODES = ("auto", "l2", "decoupled")
UPDATE_ROWS = ("touched", "all", "auto")
MAX_ROWS_OF_AUTO = 16_384


class Optimizer:
    """Base of the entries. It trains nothing by itself. If FBGEMM can update tables with the
    optimizer inside backward, `fused` names its class. An optimizer that trains dense layers
    overrides `dense`."""

    fused: ClassVar[str] = ""  # the class in torchrec.optim
    fbgemm: ClassVar[str] = ""  # FBGEMM's name (EmbOptimType)
    fused_on_cpu: ClassVar[bool] = False  # FBGEMM supports it on the CPU
    # its number in this package's CPU kernels; None: no kernel
    cpu_kernel: ClassVar[int | None] = None
    state_per_element: ClassVar[int] = 0  # fp32 numbers per weight
    state_per_row: ClassVar[int] = 0
    # The update uses complete rows: a table that is split by columns trains differently.
    whole_rows: ClassVar[bool] = False
    # the default of weight_decay: added to the gradient (l2), or decoupled
    decay_mode: ClassVar[str] = "l2"
    # modes of weight decay that FBGEMM supports on GPUs
    fbgemm_decays: ClassVar[tuple[str, ...]] = ()
    counts_steps: ClassVar[bool] = False  # the update depends on the number of steps
    has_eps: ClassVar[bool] = True
    positive_eps: ClassVar[bool] = False  # with eps 0 it could divide zero by zero
    keeps_rows: ClassVar[bool] = False  # without weight decay, a gradient of zero changes neither a row nor its state
    # For data_parallel tables, which a torch optimizer trains: FBGEMM's state name -> torch's.
    # None: torch has no such optimizer.
    replicated_states: ClassVar[Mapping[str, str] | None] = None

    def dense(self, weights: list[Any], config: DenseOptimizerConfig) -> torch.optim.Optimizer:
        """Return the optimizer of the dense layers. A subclass that trains layers overrides
        this."""
        raise NotImplementedError(f"{type(self).__name__} trains no dense layers")

    def replicated(self) -> type[torch.optim.Optimizer]:
        """Return the class that trains data_parallel tables. Called only if replicated_states is
        not None."""
        raise NotImplementedError(f"{type(self).__name__} trains no data_parallel tables")

    @classmethod
    def trains_layers(cls) -> bool:
        return cls.dense is not Optimizer.dense


@register("optimizer", "sgd")
class Sgd(Optimizer):
    fused, fbgemm, fused_on_cpu, cpu_kernel = "SGD", "EXACT_SGD", True, 0
    has_eps, keeps_rows = False, True
    replicated_states: ClassVar[Mapping[str, str]] = {}

    def dense(self, weights: list[Any], config: DenseOptimizerConfig) -> torch.optim.Optimizer:
        return _classes().SGD(
            weights, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=True
        )

    def replicated(self) -> type[torch.optim.Optimizer]:
        return _classes().SGD


def _is_adagrad_fused() -> bool:
    """Return True if torch has a fused Adagrad for every device. Torch 2.11 has none for GPUs."""
    return tuple(int(number) for number in _classes("torch").__version__.split(".")[:2]) >= (2, 14)


@register("optimizer", "adagrad")
class Adagrad(Optimizer):
    fused, fbgemm, fused_on_cpu, cpu_kernel = "Adagrad", "EXACT_ADAGRAD", True, 1
    state_per_element, positive_eps, keeps_rows = 1, True, True
    replicated_states: ClassVar[Mapping[str, str]] = {"momentum1": "sum"}

    def dense(self, weights: list[Any], config: DenseOptimizerConfig) -> torch.optim.Optimizer:
        fused = _is_adagrad_fused()
        return _classes().Adagrad(weights, lr=config.lr, eps=config.eps, weight_decay=config.weight_decay, fused=fused)

    def replicated(self) -> type[torch.optim.Optimizer]:
        return _classes().Adagrad


@register("optimizer", "rowwise_adagrad")
class RowWiseAdagrad(Optimizer):
    fused, fbgemm, fused_on_cpu, cpu_kernel = "RowWiseAdagrad", "EXACT_ROWWISE_ADAGRAD", True, 2
    state_per_row, whole_rows, positive_eps, keeps_rows = 1, True, True, True
    fbgemm_decays = ("l2", "decoupled")
    replicated_states: ClassVar[Mapping[str, str]] = {"momentum1": "sum"}

    def replicated(self) -> type[torch.optim.Optimizer]:
        return _classes("torchrec.optim").RowWiseAdagrad


@register("optimizer", "adam")
class Adam(Optimizer):
    """Adam. On tables it is lazy: only rows that a batch touches are updated
    (pipeline/sharding/torchrec/update_rule.py)."""

    fused, fbgemm, cpu_kernel = "Adam", "ADAM", 3
    state_per_element, counts_steps, positive_eps = 2, True, True
    fbgemm_decays = ("decoupled",)
    replicated_states: ClassVar[Mapping[str, str]] = {"momentum1": "exp_avg", "exp_avg_sq": "exp_avg_sq"}

    def dense(self, weights: list[Any], config: DenseOptimizerConfig) -> torch.optim.Optimizer:
        return _classes().Adam(weights, **_adam_settings(config))


@register("optimizer", "adamw")
class AdamW(Adam):
    """AdamW. On tables it is Adam with decoupled weight decay, the only mode that FBGEMM
    supports."""

    decay_mode = "decoupled"

    def dense(self, weights: list[Any], config: DenseOptimizerConfig) -> torch.optim.Optimizer:
        return _classes().AdamW(weights, **_adam_settings(config))


@register("optimizer", "partial_rowwise_adam")
class PartialRowWiseAdam(Optimizer):
    """Adam with one second moment per row: the mean over the row."""

    fused, fbgemm, cpu_kernel = "PartialRowWiseAdam", "PARTIAL_ROWWISE_ADAM", 4
    state_per_element, state_per_row, whole_rows, counts_steps, positive_eps = 1, 1, True, True, True
    decay_mode, fbgemm_decays = "decoupled", ("decoupled",)
    replicated_states: ClassVar[Mapping[str, str]] = {"momentum1": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@register("optimizer", "lamb")
class Lamb(Optimizer):
    fused, fbgemm = "LAMB", "LAMB"
    state_per_element, whole_rows, counts_steps = 2, True, True
    decay_mode, fbgemm_decays = "decoupled", ("decoupled",)


def _classes(module: str = "torch.optim") -> Any:
    """Import a module at the first use, because a job is composed without torch."""
    return importlib.import_module(module)


def _adam_settings(config: DenseOptimizerConfig) -> dict[str, Any]:
    betas = (config.beta1, config.beta2)
    return {"lr": config.lr, "eps": config.eps, "betas": betas, "weight_decay": config.weight_decay, "fused": True}


def all_optimizers() -> Mapping[str, type[Optimizer]]:
    return components("optimizer")


def find_optimizer(name: str) -> Optimizer:
    """Return the optimizer of that name. Raises ConfigError if there is none."""
    kind: type[Optimizer] = find("optimizer", name)
    return kind()


def table_optimizers() -> list[str]:
    """Return the names of the optimizers that train tables."""
    return [name for name, entry in all_optimizers().items() if entry.fused]


def layer_optimizers() -> list[str]:
    """Return the names of the optimizers that train dense layers."""
    return [name for name, entry in all_optimizers().items() if entry.trains_layers()]


def check_table_optimizer(key: str, name: str) -> None:
    """Raise ConfigError unless FBGEMM can update tables with this optimizer."""
    if not find("optimizer", name, key).fused:
        raise ConfigError(
            f"{key}={name} trains dense layers only: tables are updated inside FBGEMM's backward, which has "
            f"{', '.join(table_optimizers())}{did_you_mean(name, table_optimizers())}"
        )


def check_layer_optimizer(key: str, name: str) -> None:
    """Raise ConfigError unless this optimizer trains dense layers."""
    if not find("optimizer", name, key).trains_layers():
        raise ConfigError(
            f"{key}={name} trains tables only: for dense layers use {', '.join(layer_optimizers())}"
            f"{did_you_mean(name, layer_optimizers())}"
        )


@dataclass
class SparseOptimizerConfig:
    """The tables' optimizer, fused into backward. It updates the rows that a step touches, also in
    data_parallel tables.

    update_rows: touched; all, as torch's dense optimizers do (on CPU, with one batch per step);
    auto is all for tables of at most MAX_ROWS_OF_AUTO rows if that is possible, otherwise touched.

    weight_decay_mode: l2 adds weight_decay * row to a row's gradient. decoupled subtracts lr *
    weight_decay * row in addition to the update (Loshchilov and Hutter, ICLR 2019). auto is
    decoupled for adamw, partial_rowwise_adam and lamb, otherwise l2. gradient_clip_value limits
    each number and then gradient_clip_norm the norm of a row's summed gradient, before decay and
    tables.<name>.l2 are added.
    """

    name: str = "rowwise_adagrad"
    lr: float = 0.02
    eps: float = 1e-8
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    weight_decay_mode: str = "auto"
    update_rows: str = "touched"
    gradient_clip_value: float | None = None
    gradient_clip_norm: float | None = None

    def __post_init__(self) -> None:
        check_table_optimizer("optimizer.sparse.name", self.name)
        _check_optimizer("optimizer.sparse", self)
        check_choice("optimizer.sparse.weight_decay_mode", self.weight_decay_mode, DECAY_MODES)
        check_choice("optimizer.sparse.update_rows", self.update_rows, UPDATE_ROWS)
        for name in ("gradient_clip_value", "gradient_clip_norm"):
            if (limit := getattr(self, name)) is not None:
                check_above(f"optimizer.sparse.{name}", limit, 0.0)

    def updates_all(self, num_rows: int) -> bool:
        """Return True if a step updates all rows of a table with `num_rows` rows."""
        return self.update_rows == "all" or (self.update_rows == "auto" and num_rows <= MAX_ROWS_OF_AUTO)

    @property
    def decouples(self) -> bool:
        """Return True if weight_decay is applied next to the update, not in the gradient."""
        if self.weight_decay_mode == "auto":
            return find_optimizer(self.name).decay_mode == "decoupled"
        return self.weight_decay_mode == "decoupled"


@dataclass
class DenseOptimizerConfig:
    name: str = "adam"
    lr: float = 0.001
    eps: float = 1e-8
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_layer_optimizer("optimizer.dense.name", self.name)
        _check_optimizer("optimizer.dense", self)


def _check_optimizer(prefix: str, config: SparseOptimizerConfig | DenseOptimizerConfig) -> None:
    check_above(f"{prefix}.lr", config.lr, 0.0)
    check_at_least(f"{prefix}.eps", config.eps, 0.0)
    check_at_least(f"{prefix}.weight_decay", config.weight_decay, 0.0)
    for name in ("momentum", "beta1", "beta2"):
        check_below_one(f"{prefix}.{name}", getattr(config, name))


@dataclass
class OptimizerConfig:
    sparse: SparseOptimizerConfig = field(default_factory=SparseOptimizerConfig)
    dense: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
