"""Define a model of several sequences, each with its own encoder and target (stdlib only; layers
import torch).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pipeline.config.model import LayersConfig, SequenceInput
from pipeline.config.registry import components, read_settings, register
from pipeline.config.tables import InitConfig
from pipeline.embeddings.table import Table
from pipeline.extras.models.histories import HistoryConfig
from pipeline.models.checks import check_layer_sizes, dims_of_features
from pipeline.runtime.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

OF_MODEL = [each.name for each in fields(LayersConfig) if each.name != "kind"] + ["hidden_layer_sizes"]


@register("model", "sequence_encoders")
@dataclass
class SequenceEncodersConfig(LayersConfig):
    """Configure a model with several sequence encoders, such as one of clicks and one of purchases.

    encoders: by a name of your choice, `kind` (the model whose encoder is used: din, dien, bst, hstu)
    with that model's settings of its encoder: sequences, targets, num_positions and so on. An MLP
    reads the outputs of all encoders and all other features. Sequences of different encoders may
    have different lengths, and encoders may read the same sequence.
    """

    kind: str = "sequence_encoders"
    init: str = "xavier_normal"
    encoders: dict[str, dict[str, Any]] = field(default_factory=dict)
    hidden_layer_sizes: list[int] = field(default_factory=lambda: [200, 80])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.hidden_layer_sizes", self.hidden_layer_sizes)
        readers: dict[str, tuple[str, SequenceInput]] = {}
        for name, part in self.parts().items():
            for each in part.sequence_inputs:
                other, known = readers.setdefault(each.feature, (name, each))
                if known != each:
                    raise ConfigError(
                        f"model.encoders.{other} and model.encoders.{name} read other positions of {each.feature!r} "
                        f"({known.num_positions} and {each.num_positions}); give them the same num_positions and search"
                    )

    def parts(self) -> dict[str, HistoryConfig]:
        """Return the config of each encoder."""
        return {name: _encoder_config(name, settings) for name, settings in self.encoders.items()}

    @property
    def table_init(self) -> InitConfig:
        return HistoryConfig().table_init

    @property
    def sequence_inputs(self) -> list[SequenceInput]:
        return list({each.feature: each for part in self.parts().values() for each in part.sequence_inputs}.values())

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        if not self.encoders:
            raise ConfigError(
                "model.encoders is empty; name an encoder for each sequence, as in model.encoders.clicks={kind: din, "
                "sequences: [clicks], targets: [item_id]}"
            )
        read = {each.feature for each in self.sequence_inputs}
        for name, part in self.parts().items():
            with _keys_of(name):
                part.check_tables(tables, num_dense_features)
            for target in part.targets:
                if target in read:
                    raise ConfigError(
                        f"model.encoders.{name}.targets names {target!r}, which an encoder reads as a sequence; name a "
                        "feature with one id in each row"
                    )

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.extras.models.layers.history import Encoders, SeveralHistories
        from pipeline.models.layers.mlp import MLP

        dims, read = dims_of_features(tables), {each.feature for each in self.sequence_inputs}
        others = [name for name in dims if name not in read]
        width = num_dense_features + sum(dims[name] for name in others)
        encoders = {}
        for name, part in self.parts().items():
            inputs, encoder, encoder_width = part.build_history(tables, others=[])
            encoders[name] = (inputs, encoder)
            width += encoder_width
        layers = MLP(width, self.hidden_layer_sizes, self.layer_settings, out_features=1)
        return SeveralHistories(build_embeddings(tables), Encoders(encoders, others), layers)


def _encoder_config(name: str, settings: dict[str, Any]) -> HistoryConfig:
    key = f"model.encoders.{name}"
    kinds = {kind: each for kind, each in components("model").items() if issubclass(each, HistoryConfig)}
    kind = settings.get("kind")
    if kind not in kinds:
        raise ConfigError(
            f"{key}.kind={kind} is not a model with an encoder of sequences{did_you_mean(str(kind), kinds)}; choose one of "
            f"{', '.join(kinds)}"
        )
    if given := [each for each in OF_MODEL if each in settings]:
        raise ConfigError(f"{key}.{given[0]} is a setting of the whole model; set model.{given[0]}")
    if given := [each for each in kinds[kind].not_of_encoder if each in settings]:
        raise ConfigError(f"{key}.{given[0]} has an effect in model={kind} only; leave it out")
    with _keys_of(name):
        return read_settings(kinds[kind], settings, key, f"kind={kind}")


@contextmanager
def _keys_of(name: str) -> Iterator[None]:
    """Name the keys of an encoder in its config's errors."""
    try:
        yield
    except ConfigError as error:
        text, key = str(error), f"model.encoders.{name}."
        raise ConfigError(text if key in text else text.replace("model.", key)) from None
