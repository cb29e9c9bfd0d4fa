"""Define the multi-layer perceptron of all models, and the initializations of linear layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from pipeline.config.model import LayerSettings
from pipeline.models.layers.batch_norm import BatchNorm

# In place if backward needs only the output: no other code uses the layer before's output.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu_,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
    "identity": lambda values: values,
}


class Dice(nn.Module):
    """DIN's activation, a PReLU whose bend is at the batch's mean (arXiv 1706.06978, 4.3).

    Maps x [rows, width] to p x + (1 - p) alpha x, where p = sigmoid(x normalized over the rows of
    all ranks). Collective during training, because BatchNorm is.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = BatchNorm(width, eps=1e-8, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        share = torch.sigmoid(self.norm(rows))
        return rows * torch.addcmul(self.alpha, share, 1.0 - self.alpha)


class Activation(nn.Module):
    """Apply the named activation: [rows, width] -> [rows, width]. Only "dice" has parameters."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.dice = Dice(width) if name == "dice" else None
        self._function = ACTIVATIONS.get(name)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.dice is not None:
            return self.dice(values)
        assert self._function is not None
        return self._function(values)


class MLP(nn.Module):
    """Map [B, in_features] to [B, layer_sizes[-1]], or through a last linear layer to [B,
    out_features].

    The parameters have the names of torchrec.modules.mlp.MLP, and with plain relu the results are
    the same.
    """

    def __init__(
        self,
        in_features: int,
        layer_sizes: Sequence[int],
        settings: LayerSettings = LayerSettings(),  # noqa: B008  # frozen
        out_features: int | None = None,
    ) -> None:
        super().__init__()
        widths = [in_features, *layer_sizes]
        layers = (Layer(width, size, settings) for width, size in zip(widths, layer_sizes, strict=False))
        self._mlp = nn.Sequential(*layers)
        self.last = None if out_features is None else nn.Linear(widths[-1], out_features)
        self.out_features = widths[-1] if out_features is None else out_features

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self._mlp(features)
        return hidden if self.last is None else self.last(hidden)

    def linear_layers(self) -> list[tuple[nn.Linear, bool]]:
        """Return each linear layer with whether relu follows; empty if a layer has more than linear map and relu."""
        layers = [layer for layer in self._mlp if isinstance(layer, Layer)]
        if not all(layer.is_relu_alone for layer in layers):
            return []
        last = [] if self.last is None else [(self.last, False)]
        return [*((layer._linear, True) for layer in layers), *last]


class Layer(nn.Module):
    """Apply a linear map, norm, activation and dropout: [B, in_features] -> [B, out_features]."""

    def __init__(self, in_features: int, out_features: int, settings: LayerSettings) -> None:
        super().__init__()
        self._linear = nn.Linear(in_features, out_features)
        self.norm = make_norm(out_features, settings)
        self._activation_fn = Activation(settings.activation, out_features)
        self.dropout = nn.Dropout(settings.dropout) if settings.dropout else None
        self.is_relu_alone = self.norm is None and settings.activation == "relu" and self.dropout is None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        values = self._linear(features)
        if self.norm is not None:
            values = self.norm(values)
        values = self._activation_fn(values)
        return values if self.dropout is None else self.dropout(values)


def make_norm(width: int, settings: LayerSettings) -> nn.Module | None:
    """Return the norm of a layer of `width` columns, None if it has no norm."""
    if settings.batch_norm:
        return BatchNorm(width)
    return nn.LayerNorm(width) if settings.layer_norm else None


def initialize_linear_layers(model: nn.Module, init: str) -> None:
    """Initialize all linear layers of `model` again, in order. Biases are set to 0, or by the
    method `initialize_bias` of the layer.

    init: torch (no change), xavier (Glorot and Bengio 2010), or kaiming (arXiv 1502.01852, for
    relu).
    """
    draws: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "xavier_uniform": nn.init.xavier_uniform_,
        "xavier_normal": nn.init.xavier_normal_,
        "kaiming_uniform": lambda weight: nn.init.kaiming_uniform_(weight, nonlinearity="relu"),
        "kaiming_normal": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
    }
    if init == "torch":
        return
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and not layer.weight.is_meta:
            draws[init](layer.weight)
            initialize_bias = getattr(layer, "initialize_bias", None)
            if initialize_bias is not None:
                initialize_bias()
            elif layer.bias is not None:
                nn.init.zeros_(layer.bias)
