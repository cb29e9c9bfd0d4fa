"""List the operators that exported layers may call: those that read and write nothing except their tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from pipeline.runtime.errors import ServingError

# Operators of aten that read and write nothing but their tensors, and check sizes and indices. All variants of a name
# are allowed except those that write to an output argument; in-place variants end with an underscore.
LISTED = """
abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil
clamp clamp_max clamp_min copysign cos cosh div eq erf erfc exp exp2 expm1 floor floor_divide fmod frac ge gt
isfinite isinf isnan le lerp log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor logit lt
masked_fill maximum minimum mul nan_to_num ne neg pow reciprocal remainder round rsqrt rsub sigmoid sign sin sinh
sqrt square sub tan tanh true_divide trunc where xlogy

_log_softmax _softmax celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid log_softmax
mish prelu relu relu6 selu silu softmax softplus softshrink threshold

all amax amin any argmax argmin argsort cummax cummin cumprod cumsum linalg_vector_norm logcumsumexp logsumexp max
mean median min norm prod sort std std_mean sum topk var var_mean

_int_mm addbmm addmm addmv baddbmm bilinear bmm cosine_similarity dot einsum linear matmul mm mv outer
scaled_dot_product_attention tensordot

alias broadcast_to cat chunk clone concat contiguous detach diagonal expand expand_as flatten flip gather index
index_add index_copy index_fill index_select lift_fresh lift_fresh_copy mT masked_scatter movedim narrow permute
repeat repeat_interleave reshape reshape_as roll scatter scatter_add select slice split split_with_sizes squeeze
stack swapaxes t take_along_dim tile transpose tril triu type_as unbind unflatten unsqueeze view view_as

_to_copy arange eye full full_like linspace new_full new_ones new_zeros ones ones_like scalar_tensor to tril_indices
triu_indices zeros zeros_like

adaptive_avg_pool1d alpha_dropout avg_pool1d batch_norm constant_pad_nd conv1d conv2d dropout embedding
feature_dropout group_norm instance_norm layer_norm native_dropout native_group_norm native_layer_norm pad rms_norm

sym_numel sym_size
"""
OPERATORS = frozenset(LISTED.split())
CHECKS = {
    "_assert_scalar",
    "_assert_tensor_metadata",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
}  # left out
SYMBOLIC: dict[str, Callable[..., Any]] = {
    **{f"_operator.{each.__name__}": each for each in (
        operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod, operator.neg,
        operator.pos, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
    )},
    **{f"torch.{each.__name__}": each for each in (torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min)},
}  # fmt: skip


class UnlistedOperatorError(ServingError):
    """The layers call an operator that is not in the list."""


def find_operator(target: str) -> torch._ops.OpOverload:
    """torch.ops.aten.<name>.<overload>. Raises UnlistedOperatorError."""
    name, _, overload = target.removeprefix("torch.ops.aten.").partition(".")
    is_listed = target.startswith("torch.ops.aten.") and (name in OPERATORS or name.removesuffix("_") in OPERATORS)
    packet = getattr(torch.ops.aten, name, None) if is_listed else None
    if packet is not None and overload in packet.overloads():
        found = getattr(packet, overload)
        if not any(argument.is_out for argument in found._schema.arguments):
            return found
    raise UnlistedOperatorError(
        f"the layers call the operator {target!r:.100}, which is not in the list of operators that an artifact may run; "
        "write the model with operators of the list (LISTED in pipeline/serving/scoring/program_operators.py), or add the "
        "operator there if it reads and writes nothing except its tensors"
    )
