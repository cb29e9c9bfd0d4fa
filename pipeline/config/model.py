"""Define what all model configs have in common (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.config.tables import InitConfig
from pipeline.runtime.errors import ConfigError, check_at_least, check_below_one, check_choice

if TYPE_CHECKING:
    from torch import nn

    from pipeline.data.targets import Target
    from pipeline.embeddings.table import Table

CLICK_METRICS = ("ne", "auc", "logloss")
ACTIVATIONS = ("relu", "leaky_relu", "gelu", "silu", "tanh", "sigmoid", "identity", "dice")
INITS = ("torch", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal")


@dataclass(frozen=True)
class SequenceInput:
    """A sequence that the model reads position by position: its newest `num_positions` ids; None: all that the data keep.

    search_in, search_for: a search among them, see embeddings.table.Positions.
    """

    feature: str
    num_positions: int | None = None
    search_in: str | None = None
    search_for: str | None = None


@dataclass
class ModelConfig:
    """Base of all model configs; a group file under conf/model picks the subclass, `kind` names it in saved files.

    l2: the optimizer adds l2 * weight to the gradient of each weight matrix of a dense layer; biases, norms and tables are
        left out.
    init: how the weights of linear layers begin, their biases then at 0; `torch` is nn.Linear's own default.
    """

    kind: str = "???"
    l2: float = 0.0
    init: str = "torch"

    def __post_init__(self) -> None:
        check_at_least("model.l2", self.l2, 0.0)
        check_choice("model.init", self.init, INITS)

    @property
    def task(self) -> str:
        """The name of its loss and measures among the registered tasks."""
        return "click"

    @property
    def learns_all(self) -> bool:
        """Whether it learns all labels of the data set, in their order, and not the main one alone."""
        return False

    @property
    def metrics(self) -> tuple[str, ...]:
        """What an evaluation measures that early stopping and checkpoints can go by; the first where none is chosen.

        Of a binary label. checkpoint.retention says which are the better the higher; all others are the better the lower.
        """
        return CLICK_METRICS

    @property
    def table_init(self) -> InitConfig:
        """How tables of init.kind=auto begin."""
        return InitConfig("uniform")

    @property
    def used_features(self) -> list[str] | None:
        """The sparse features that the model reads; None: all of the data set's."""
        return None

    @property
    def sequence_inputs(self) -> list[SequenceInput]:
        """The sequences that are not pooled; a model that names none reads every sequence as a bag."""
        return []

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        """Raises ConfigError when the model cannot be built on these tables."""

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        """The model, with tables on the meta device; import torch in here, for a config is composed without it.

        `tables` are those of the features that the model reads. Its forward(dense_features [batch, num_dense_features],
        sparse_features: KeyedJaggedTensor) gives logits [batch, 1]. One that learns all labels has build_for in its place.
        """
        raise NotImplementedError(f"{type(self).__name__} has no build()")

    def build_for(self, tables: list[Table], num_dense_features: int, targets: list[Target]) -> nn.Module:
        """As build(), of the labels that the model learns: outputs [batch, sum of the targets' widths]."""
        return self.build(tables, num_dense_features)


@dataclass(frozen=True)
class LayerSettings:
    """What the hidden layers of an MLP have beside their sizes."""

    activation: str = "relu"
    dropout: float = 0.0
    batch_norm: bool = False
    layer_norm: bool = False


@dataclass
class LayersConfig(ModelConfig):
    """Of models with MLPs. A layer is linear, then a norm, the activation, dropout.

    dropout: the share of a layer's outputs that a training step sets to 0.
    batch_norm: by mean and variance of the global batch, over all ranks.
    """

    activation: str = "relu"
    dropout: float = 0.0
    batch_norm: bool = False
    layer_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model.activation", self.activation, ACTIVATIONS)
        check_below_one("model.dropout", self.dropout)
        if self.batch_norm and self.layer_norm:
            raise ConfigError("model.batch_norm and model.layer_norm are both true: a layer has one norm; choose one")

    @property
    def layer_settings(self) -> LayerSettings:
        return LayerSettings(self.activation, self.dropout, self.batch_norm, self.layer_norm)


@dataclass
class DeepConfig(LayersConfig):
    """Of models with one MLP over all features; its sizes are the units of the hidden layers."""

    hidden_layer_sizes: list[int] = field(default_factory=lambda: [400, 400, 400])

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hidden_layer_sizes:
            raise ConfigError("model.hidden_layer_sizes=[] needs at least 1 layer(s)")
        for size in self.hidden_layer_sizes:
            check_at_least("each size in model.hidden_layer_sizes", size, 1)


def used_tables(config: ModelConfig, tables: list[Table]) -> list[Table]:
    """Those of the features that the model reads: no other takes memory."""
    used = config.used_features
    return tables if used is None else [table for table in tables if set(used) & set(table.feature_names)]
