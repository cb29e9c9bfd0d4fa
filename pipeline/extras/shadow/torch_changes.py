"""Change torch where a tensor wrapper needs it: threads, pinned memory, attention, module.to."""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

import torch

from pipeline.extras.shadow import memory, streams
from pipeline.extras.shadow.state import Patch
from pipeline.extras.shadow.tensors import Shadow, ShadowMode, entered, pin_memory, torch_swap

_thread_run = threading.Thread.run


def _run_in_mode(self: threading.Thread) -> None:
    streams.enter_thread()
    if not entered:
        _thread_run(self)
        return
    with ShadowMode():
        _thread_run(self)


def _is_pinned(self: torch.Tensor, *_: Any) -> bool:
    return memory.is_kind(self, "pinned")


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Compute scaled_dot_product_attention by its formula."""
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.softmax(scores, -1)
    return (torch.dropout(weights, dropout_p, True) if dropout_p else weights) @ value


_apply = torch.nn.Module._apply


def _apply_to_module(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """Replace module.to(...). A Shadow that stays on its device must stay the same object."""
    own: dict[str, Any] = {name: each for name, each in self._parameters.items() if isinstance(each, Shadow)}
    for name in own:
        self._parameters[name] = None
    try:
        return _apply(self, fn, recurse)
    finally:
        for name, weight in own.items():
            with torch.no_grad():
                moved = fn(weight)
            if moved is not weight and (moved.dtype != weight.dtype or moved.device != weight.device):
                swap_tensors(weight, torch.nn.Parameter(moved, weight.requires_grad))
            self._parameters[name] = weight


def swap_tensors(one: Any, other: Any) -> None:
    """Keep the attributes of a weight that moves, such as TorchRec's _in_backward_optimizers."""
    kept = {name: value for name, value in one.__dict__.items() if name != "inner"}
    torch_swap(one, other)
    one.__dict__.update(kept)


def patches() -> list[Patch]:
    # torch.optim hides the module behind its class
    optimizers = import_module("torch.optim.optimizer")
    return [
        Patch(threading.Thread, "run", _run_in_mode, "a dispatch mode, a stream and a device belong to a thread"),
        Patch(torch.Tensor, "pin_memory", pin_memory, "pinned memory is memory with a mark"),
        Patch(torch.Tensor, "is_pinned", _is_pinned, "pinned memory is memory with a mark"),
        Patch(
            torch.nn.functional,
            "scaled_dot_product_attention",
            _attention,
            "C++ asks the device which of its kernels fits",
        ),
        Patch(torch.nn.Module, "_apply", _apply_to_module, "a wrapper cannot be given another tensor's data"),
        Patch(torch.utils, "swap_tensors", swap_tensors, "it would lose the attributes of a weight"),
        Patch(
            optimizers,
            "_foreach_supported_types",
            [*optimizers._foreach_supported_types, Shadow],
            "an optimizer asks by type whether it may update all weights in one call",
        ),
    ]
