"""The optimizers by name: what trains tables, what trains dense layers, and what each keeps and needs.

An entry is all that this release knows of an optimizer; torch is imported inside its methods only, for a job is composed
without it. One of a plugin's own:

    @register("optimizer", "lion")
    class Lion(Optimizer):
        def dense(self, weights, config):
            return lion_pytorch.Lion(weights, lr=config.lr, weight_decay=config.weight_decay)
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.config.registry import components, find, register
from pipeline.runtime.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch

    from pipeline.config.training import DenseOptimizerConfig


class Optimizer:
    """Base of the entries. As it stands it trains nothing.

    One that FBGEMM updates tables by, inside backward, names its class `fused`; one that trains dense layers has `dense`.
    """

    fused: ClassVar[str] = ""  # the class in torchrec.optim
    fbgemm: ClassVar[str] = ""  # FBGEMM's name (EmbOptimType)
    fused_on_cpu: ClassVar[bool] = False  # FBGEMM has it on the CPU
    cpu_kernel: ClassVar[int | None] = None  # its number in our own CPU kernels
    state_per_element: ClassVar[int] = 0  # fp32 numbers
    state_per_row: ClassVar[int] = 0
    whole_rows: ClassVar[bool] = (
        False  # its update looks at whole rows: a table that is cut by columns trains differently
    )
    decay_mode: ClassVar[str] = "l2"  # how weight_decay acts by itself: in the gradient (l2), or decoupled
    fbgemm_decays: ClassVar[tuple[str, ...]] = ()  # what FBGEMM has on GPUs
    counts_steps: ClassVar[bool] = False  # its update depends on the number of steps
    has_eps: ClassVar[bool] = True
    positive_eps: ClassVar[bool] = False  # eps 0 would divide zero by zero
    keeps_rows: ClassVar[bool] = False  # without weight decay, a gradient of zero changes neither a row nor its state
    # Of data_parallel tables, which have a torch optimizer: FBGEMM's name of a state -> torch's. None: torch has none such.
    replicated_states: ClassVar[Mapping[str, str] | None] = None

    def dense(self, weights: list[Any], config: DenseOptimizerConfig) -> torch.optim.Optimizer:
        """Of the dense layers. A subclass that has it trains them."""
        raise NotImplementedError(f"{type(self).__name__} trains no dense layers")

    def replicated(self) -> type[torch.optim.Optimizer]:
        """The class that trains data_parallel tables, where replicated_states is not None."""
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
        return _classes().SGD  # type: ignore[no-any-return]


@register("optimizer", "adagrad")
class Adagrad(Optimizer):
    fused, fbgemm, fused_on_cpu, cpu_kernel = "Adagrad", "EXACT_ADAGRAD", True, 1
    state_per_element, positive_eps, keeps_rows = 1, True, True
    replicated_states: ClassVar[Mapping[str, str]] = {"momentum1": "sum"}

    def dense(self, weights: list[Any], config: DenseOptimizerConfig) -> torch.optim.Optimizer:
        return _classes().Adagrad(weights, lr=config.lr, eps=config.eps, weight_decay=config.weight_decay, fused=True)

    def replicated(self) -> type[torch.optim.Optimizer]:
        return _classes().Adagrad  # type: ignore[no-any-return]


@register("optimizer", "rowwise_adagrad")
class RowWiseAdagrad(Optimizer):
    fused, fbgemm, fused_on_cpu, cpu_kernel = "RowWiseAdagrad", "EXACT_ROWWISE_ADAGRAD", True, 2
    state_per_row, whole_rows, positive_eps, keeps_rows = 1, True, True, True
    fbgemm_decays = ("l2", "decoupled")
    replicated_states: ClassVar[Mapping[str, str]] = {"momentum1": "sum"}

    def replicated(self) -> type[torch.optim.Optimizer]:
        return _classes("torchrec.optim").RowWiseAdagrad  # type: ignore[no-any-return]


@register("optimizer", "adam")
class Adam(Optimizer):
    """On tables lazy: only rows that a batch touches are updated (pipeline/sharding/torchrec/update_rule.py)."""

    fused, fbgemm, cpu_kernel = "Adam", "ADAM", 3
    state_per_element, counts_steps, positive_eps = 2, True, True
    fbgemm_decays = ("decoupled",)
    replicated_states: ClassVar[Mapping[str, str]] = {"momentum1": "exp_avg", "exp_avg_sq": "exp_avg_sq"}

    def dense(self, weights: list[Any], config: DenseOptimizerConfig) -> torch.optim.Optimizer:
        return _classes().Adam(weights, **_adam_settings(config))


@register("optimizer", "adamw")
class AdamW(Adam):
    """On tables Adam with decoupled weight decay, the only one that FBGEMM's has."""

    decay_mode = "decoupled"

    def dense(self, weights: list[Any], config: DenseOptimizerConfig) -> torch.optim.Optimizer:
        return _classes().AdamW(weights, **_adam_settings(config))


@register("optimizer", "partial_rowwise_adam")
class PartialRowWiseAdam(Optimizer):
    """Adam with one second moment a row, the mean of the row's."""

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
    """Imported when asked for: a job is composed where there is no torch."""
    return importlib.import_module(module)


def _adam_settings(config: DenseOptimizerConfig) -> dict[str, Any]:
    betas = (config.beta1, config.beta2)
    return {"lr": config.lr, "eps": config.eps, "betas": betas, "weight_decay": config.weight_decay, "fused": True}


def all_optimizers() -> Mapping[str, type[Optimizer]]:
    return components("optimizer")


def find_optimizer(name: str) -> Optimizer:
    """Raises ConfigError where there is none of that name."""
    kind: type[Optimizer] = find("optimizer", name)
    return kind()


def table_optimizers() -> list[str]:
    """Names of those that train tables."""
    return [name for name, entry in all_optimizers().items() if entry.fused]


def layer_optimizers() -> list[str]:
    """Names of those that train dense layers."""
    return [name for name, entry in all_optimizers().items() if entry.trains_layers()]


def check_table_optimizer(key: str, name: str) -> None:
    """Raises ConfigError unless FBGEMM can update tables by it."""
    if not find("optimizer", name, key).fused:
        raise ConfigError(
            f"{key}={name} trains dense layers only: tables are updated inside FBGEMM's backward, which has "
            f"{', '.join(table_optimizers())}{did_you_mean(name, table_optimizers())}"
        )


def check_layer_optimizer(key: str, name: str) -> None:
    """Raises ConfigError unless it trains dense layers."""
    if not find("optimizer", name, key).trains_layers():
        raise ConfigError(
            f"{key}={name} trains tables only: dense layers have {', '.join(layer_optimizers())}"
            f"{did_you_mean(name, layer_optimizers())}"
        )
