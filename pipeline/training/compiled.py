"""Compile a model's dense layers by torch.compile, each on its first training step.

Each child module without tables is compiled separately (DLRM's dense_arch and over_arch). Tables
are not compiled because a train pipeline rewrites their forward. Parameters keep their names.
DLRM's dot products are not a layer; they have their own kernels. Evaluation runs uncompiled,
because other shapes without gradients would be compiled again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline import devices
from pipeline.runtime.logs import get_logger

logger = get_logger(__name__)


class DenseCompiler:
    """Compile a model once. If the compiler fails, all layers run uncompiled from then on, and one
    warning is logged."""

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def compile(self, model: nn.Module) -> list[str]:
        """Return the names of the children that are compiled on their first step."""
        layers = {name: child for name, child in model.named_children() if _is_dense(child)}
        devices.current().limit_compiler()
        for name, layer in layers.items():
            layer.forward = self._compiled(name, layer.forward)
        logger.info("trainer.compile: %s compile on the first step", ", ".join(layers) or "no layers")
        return list(layers)

    def _compiled(self, name: str, eager: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(eager, dynamic=False)

        def forward(*arguments: Any, **named: Any) -> Any:
            if self.failure is None and torch.is_grad_enabled():
                try:
                    return compiled(*arguments, **named)
                except Exception as error:  # compilers raise errors without a common class
                    self._give_up(name, error)
            return eager(*arguments, **named)  # raises again if the compiler was not the cause

        return forward

    def _give_up(self, name: str, error: Exception) -> None:
        self.failure = error
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        logger.warning("trainer.compile: %s cannot be compiled, no layer is: %s", name, reason[:300])


def _is_dense(module: nn.Module) -> bool:
    """Return True if the module has parameters and contains no tables."""
    tables = any(isinstance(part, (ShardedModule, EmbeddingBagCollection)) for part in module.modules())
    return not tables and any(True for _ in module.parameters())
