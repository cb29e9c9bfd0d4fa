"""Keep linear layers' weights in bf16 beside their fp32 ones, for training under autocast without casts of weights.

Autocast casts each weight in each step, and each of their gradients back. Here products take a copy that is a leaf of
autograd, whose gradient stays bf16; the optimizer's step, which goes over all weights anyway, reads that gradient and writes
the copy anew (pipeline.training.dense_step). Weights stay fp32: names, checkpoints and evaluations see no difference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.crossnet import LowRankCrossNet

from pipeline.devices.cpu.kernel_pool import is_recording
from pipeline.models.layers.linear_products import FastCross


class Bf16Copy:
    """Of one weight; made at its first use, and anew where somebody else has written the weight since."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        weight.grad_dtype = None  # any: after a step its gradient is the copy's
        self._numbers: torch.Tensor | None = None
        self._version = -1  # of the weight that the numbers are of

    def numbers(self) -> torch.Tensor:
        """What products multiply by: the weight, rounded."""
        if self._numbers is None:
            self._numbers = torch.empty_like(self.weight, dtype=torch.bfloat16).requires_grad_()
        if self._version != self.weight._version:
            with torch.no_grad():
                self._numbers.copy_(self.weight)
            self._version = self.weight._version
        return self._numbers

    def forget(self) -> None:
        """The weight has changed by a kernel that counts no versions, as torch's fused optimizers."""
        self._version = -1

    def gradient(self) -> torch.Tensor | None:
        return None if self._numbers is None else self._numbers.grad

    def drop_gradient(self) -> None:
        if self._numbers is not None:
            self._numbers.grad = None


def is_training_in_bf16(inputs: torch.Tensor) -> bool:
    """Under autocast to bf16 on the CPU, with gradients, and not while torch.compile, torch.export or torch.fx traces.

    Fake tensors of a step that is recorded count as others do.
    """
    if (
        not (type(inputs) is torch.Tensor or is_recording())
        or torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
    ):
        return False
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


class Bf16Linear:
    """In place of a linear layer's forward: [..., I] -> [..., O]."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self.weight = Bf16Copy(layer.weight)
        self.bias = None if layer.bias is None else Bf16Copy(layer.bias)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        layer = self._layer
        if not layer.training or not is_training_in_bf16(inputs):
            return F.linear(inputs, layer.weight, layer.bias)
        bias = None if self.bias is None else self.bias.numbers()
        return F.linear(inputs, self.weight.numbers(), bias)

    def copies(self) -> list[Bf16Copy]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class Bf16Cross(FastCross):
    """FastCross, whose products take copies in training."""

    def __init__(self, network: LowRankCrossNet) -> None:
        super().__init__(network)
        self._pairs = [
            (Bf16Copy(down), Bf16Copy(up)) for down, up in zip(network.V_kernels, network.W_kernels, strict=True)
        ]

    def factors(self, input: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not self.network.training or not is_training_in_bf16(input):
            return super().factors(input)
        return [(down.numbers(), up.numbers()) for down, up in self._pairs]

    def copies(self) -> list[Bf16Copy]:
        return [copy for pair in self._pairs for copy in pair]


def keep_bf16_weights(model: nn.Module) -> int:
    """Replace the forward of each linear layer and of each of TorchRec's low-rank cross networks in `model`; of how many.

    Who trains the model has to step bf16_copies(model): weights have no gradient of their own then.
    """
    replaced = 0
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.requires_grad:
            module.forward = Bf16Linear(module)  # type: ignore[method-assign,assignment]
        elif type(module) is LowRankCrossNet:
            module.forward = Bf16Cross(module)  # type: ignore[method-assign,assignment]
        else:
            continue
        replaced += 1
    return replaced


def bf16_copies(model: nn.Module) -> list[Bf16Copy]:
    """Of all weights in `model` that have one."""
    ways = (module.forward for module in model.modules())
    return [copy for way in ways if isinstance(way, (Bf16Linear, Bf16Cross)) for copy in way.copies()]
