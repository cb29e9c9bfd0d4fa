"""Classify an operation by its schema, and check the devices of its tensors.

As in torch's CUDA kernels, all tensors are on one device, except that a CPU tensor without
dimensions may replace a number, indices may be on the CPU, and copies connect devices. FBGEMM's
kernels take no CPU tensors, except a few that its code reads on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from pipeline.extras.shadow import report

_COPIES = {"copy_", "_to_copy"}
_MAY_MIX = _COPIES | {"set_", "lift_fresh", "_foreach_copy_", "copy", "is_same_size", "_pack_padded_sequence"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_SYNCS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "equal", "masked_select"}
_QUESTIONS = {"_local_scalar_dense", "equal", "is_pinned", "is_same_size", "sym_size", "stride", "is_nonzero"}
# Operations, in addition to pointwise ones, whose kernels read a CPU tensor without dimensions as a
# number.
_TAKE_NUMBERS = {"fill_", "fill", "masked_fill", "masked_fill_", "where", "index_fill", "index_fill_", "scatter_"}
# FBGEMM reads these on the host: the learning rate, and weights that only CPU tables have.
_HOST_ARGUMENTS = {"learning_rate_tensor", "host_weights", "unused"}
_NOT_KERNELS = {
    "detach", "alias", "empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "lift_fresh",
    "_local_scalar_dense", "is_pinned", "is_same_size", "_reshape_alias", "record_stream", "resize_", "set_",
}  # fmt: skip
_FACTORIES = {"empty", "zeros", "ones", "full", "empty_strided", "zeros_like", "empty_like", "new_empty", "new_zeros"}


@dataclass(frozen=True)
class Rule:
    """One operator. base: its name without namespace and overload."""

    name: str
    namespace: str
    base: str
    is_wrapper: bool
    is_about_pinning: bool
    is_copy: bool
    is_kernel: bool
    is_factory: bool
    syncs: bool
    draws: bool
    takes_numbers: bool
    touches_data: bool
    returns_written: bool
    returns_value: bool
    num_returns: int
    written_arguments: tuple[tuple[int, str], ...]

    def written(self, args: Any, kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments that the operator writes into, in the form in which it returns them."""
        found: list[Any] = []
        for index, name in self.written_arguments:
            value = args[index] if index < len(args) else kwargs.get(name)
            found += value if isinstance(value, (list, tuple)) and not self.returns_written else [value]
        return found


@cache
def rule_of(func: Any) -> Rule:
    schema = func._schema
    name = schema.name
    base = name.split("::")[1]
    returns = [each.alias_info for each in schema.returns]
    is_view = any(info is not None and not info.is_write for info in returns) and base != "_to_copy"
    writes = tuple(
        (index, each.name)
        for index, each in enumerate(schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    )
    return Rule(
        name=name,
        namespace=name.split("::")[0],
        base=base,
        is_wrapper=base.endswith("_pt2_wrapper"),
        is_about_pinning=base in ("is_pinned", "_pin_memory"),
        is_copy=base in _COPIES,
        is_kernel=not is_view and base not in _NOT_KERNELS,
        is_factory=base in _FACTORIES,
        syncs=base in _SYNCS,
        draws=torch.Tag.nondeterministic_seeded in func.tags and base not in ("dropout",),
        takes_numbers=torch.Tag.pointwise in func.tags or base in _TAKE_NUMBERS or base.startswith("_foreach_"),
        touches_data=not is_view and base not in ("detach", "alias", "lift_fresh", "is_pinned"),
        returns_written=bool(returns) and all(info is not None and info.is_write for info in returns),
        returns_value=base in _QUESTIONS,
        num_returns=len(returns),
        written_arguments=writes,
    )


def check_devices(rule: Rule, func: Any, args: Any, kwargs: dict[str, Any], shadows: list[Any]) -> None:
    """Raise the error that a GPU kernel would raise, or an error if the kernel would read invalid memory."""
    if not shadows or rule.base in _MAY_MIX:
        return
    device = shadows[0].device
    for name, tensor, is_written in _tensors(func, args, kwargs):
        if tensor.device == device or (tensor.device.type == "cpu" and _may_be_on_cpu(rule, name, tensor, is_written)):
            continue
        if rule.base in INDEXED and name == "indices" and tensor.device.type == "cpu":
            continue
        if rule.base.startswith("_fused_") and name == "lr":
            continue  # read on the host
        if rule.base.startswith("_fused_"):
            _refuse(
                f"{rule.name}: {name} is on {tensor.device} and the weights are on {device}. The kernel does "
                "not check, it would read an address of the host (an illegal memory access)"
            )
        if rule.base in INDEXED and name == "self":
            _refuse(f"indices should be either on cpu or on the same device as the indexed tensor ({tensor.device})")
        first, other = sorted((str(device), str(tensor.device)), reverse=True)
        _refuse(
            f"Expected all tensors to be on the same device, but found at least two devices, {first} and {other}! "
            f"(argument {name} of {rule.name}, shape {list(tensor.shape)})"
        )


def _may_be_on_cpu(rule: Rule, name: str, tensor: torch.Tensor, is_written: bool) -> bool:
    if rule.name.startswith("fbgemm::"):
        return name in _HOST_ARGUMENTS
    is_number = tensor.dim() == 0 and not is_written
    return is_number and (rule.takes_numbers or (rule.base in INDEXED and name == "values"))


def _refuse(text: str) -> None:
    report.current().find("device", text)
    raise RuntimeError(text)


def _tensors(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield (argument's name, tensor, True if it is written) for all tensors, including tensors in lists."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                yield argument.name, each, is_written


def named(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the call's arguments by the names in the schema."""
    values = {each.name: each.default_value for each in func._schema.arguments if each.has_default_value()}
    names = [each.name for each in func._schema.arguments]
    return values | dict(zip(names, args, strict=False)) | kwargs
