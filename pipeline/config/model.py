"""Define the base classes of model configs (stdlib only)."""

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
    """A sequence that the model reads by position: its newest `num_positions` ids; None means all
    ids of the data. `search_in` and `search_for` name features for a search in the sequence: see
    embeddings.table.Positions."""

    feature: str
    num_positions: int | None = None
    search_in: str | None = None
    search_for: str | None = None


@dataclass
class ModelConfig:
    """Base of all model configs. A file in conf/model chooses the subclass; saved files name it by
    `kind`.

    l2: the optimizer adds l2 * weight to the gradient of each weight matrix of a dense layer, but not of
        biases, norms and tables.
    init: how weights of linear layers are initialized, with biases 0; `torch` is the default of nn.Linear.
    """

    kind: str = "???"
    l2: float = 0.0
    init: str = "torch"

    def __post_init__(self) -> None:
        check_at_least("model.l2", self.l2, 0.0)
        check_choice("model.init", self.init, INITS)

    @property
    def task(self) -> str:
        """Return the name of the registered task, which has its loss and metrics."""
        return "click"

    @property
    def learns_all(self) -> bool:
        """Return True if the model learns all labels of the data set in their order, not only the
        main label."""
        return False

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics of a binary label that early stopping and checkpoints can use. The
        first is the default. checkpoint.retention lists the metrics that are better if higher;
        other metrics are better if lower."""
        return CLICK_METRICS

    @property
    def table_init(self) -> InitConfig:
        """Return the initialization of tables with init.kind=auto."""
        return InitConfig("uniform")

    @property
    def used_features(self) -> list[str] | None:
        """Return the sparse features that the model reads, None for all features."""
        return None

    @property
    def sequence_inputs(self) -> list[SequenceInput]:
        """Return the sequences that are read by position. Other sequences are read as bags."""
        return []

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        """Raise ConfigError if the model cannot be built on these tables."""

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        """Return the model with tables on the meta device. Import torch inside, because configs are
        composed without torch.

        `tables` are the tables of the features that the model reads. forward(dense_features [batch,
        num_dense_features], sparse_features: KeyedJaggedTensor) returns logits [batch, 1]. A model that learns
        all labels implements build_for instead.
        """
        raise NotImplementedError(f"{type(self).__name__} has no build()")

    def build_for(self, tables: list[Table], num_dense_features: int, targets: list[Target]) -> nn.Module:
        """Return the model for the labels that it learns: outputs are [batch, sum of the targets'
        widths]."""
        return self.build(tables, num_dense_features)


@dataclass(frozen=True)
class LayerSettings:
    """Settings of the hidden layers of an MLP, except their sizes."""

    activation: str = "relu"
    dropout: float = 0.0
    batch_norm: bool = False
    layer_norm: bool = False


@dataclass
class LayersConfig(ModelConfig):
    """Base config of models with MLPs. A layer is linear, then a norm, the activation and dropout.
    dropout: the share of a layer's outputs that a training step sets to 0. batch_norm: uses mean
    and variance of the global batch, over all ranks."""

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
    """Base config of models with one MLP over all features. Sizes are the numbers of hidden
    units."""

    hidden_layer_sizes: list[int] = field(default_factory=lambda: [400, 400, 400])

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hidden_layer_sizes:
            raise ConfigError("model.hidden_layer_sizes=[] needs at least one layer")
        for size in self.hidden_layer_sizes:
            check_at_least("each size in model.hidden_layer_sizes", size, 1)


def used_tables(config: ModelConfig, tables: list[Table]) -> list[Table]:
    """Return the tables of the features that the model reads. Other tables take no memory."""
    used = config.used_features
    return tables if used is None else [table for table in tables if set(used) & set(table.feature_names)]
