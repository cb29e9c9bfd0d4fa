"""Compile a model's dense layers by torch.compile, each on its first training step.

The layers beside the tables are compiled a child at a time (DLRM's dense_arch and over_arch): a train pipeline rewrites the
tables' forward, which stays as it is, and so do parameters and their names. DLRM's dot products are no layer, and have
kernels of their own. Evaluation runs uncompiled: other shapes and no gradients would compile anew.
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
    """compile(model) once; where the compiler fails all layers run as they are from then on, which one log line says."""

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def compile(self, model: nn.Module) -> list[str]:
        """The names of the children that compile on their first step."""
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
                except Exception as error:  # a compiler's errors have no class in common
                    self._give_up(name, error)
            return eager(*arguments, **named)  # raises too, where the fault was not the compiler's

        return forward

    def _give_up(self, name: str, error: Exception) -> None:
        self.failure = error
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        logger.warning("trainer.compile: %s cannot be compiled, no layer is: %s", name, reason[:300])


def _is_dense(module: nn.Module) -> bool:
    """Has layers, and no tables among them."""
    tables = any(isinstance(part, (ShardedModule, EmbeddingBagCollection)) for part in module.modules())
    return not tables and any(True for _ in module.parameters())
