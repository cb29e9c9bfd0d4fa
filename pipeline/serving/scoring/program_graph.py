"""Build the graph of exported layers from model.json, torch.export's text of a program, without
running that text.

torch.export.load evaluates parts of model.json as Python: symbolic sizes and the names of inputs.
This reader takes operators from a list, numbers, and references to values. It gives every value a
new name, so no text of the file becomes code. The format is torch/_export/serde/schema.py;
docs/adr/0068 says why this reader exists.
"""

from __future__ import annotations

import json
import logging
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.fx
from torch._subclasses import fake_tensor

from pipeline.runtime.errors import ServingError

MAX_BYTES = 16 << 20  # of model.json; our largest models have less than 1 MB
MAX_VALUES = 2_000_000  # in it: a value takes up to 100 bytes of memory
MAX_INT = 1 << 63
MAX_NODES = 20_000
MAX_WIDTH = 1 << 24  # columns of an input

DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16, 7: torch.float32,
    8: torch.float64, 12: torch.bool, 13: torch.bfloat16,
}  # fmt: skip
MEMORY_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 4: torch.preserve_format}
STRIDED = 7  # the one layout
POSITIONAL, KEYWORD = 1, 2
FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


Value = TypeVar("Value")


class GraphProblem(ValueError):
    """A part of a file that an exported program cannot have."""


def read_json(content: bytes) -> dict[str, Any]:
    """Return the object in the text. Raises GraphProblem if it is not a JSON object of bounded size."""
    if len(content) > MAX_BYTES:
        raise GraphProblem(f"has {len(content)} bytes, more than {MAX_BYTES}")
    if (count := sum(map(content.count, (b"[", b"{", b",", b":")))) > MAX_VALUES:
        raise GraphProblem(f"has about {count} values, more than {MAX_VALUES}")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise GraphProblem(f"is not JSON: {str(error)[:100]}") from None
    return an_object(found)


def an_object(value: object) -> dict[str, Any]:
    if type(value) is not dict:
        raise GraphProblem(f"has {_shown(value)} where an object belongs")
    return value


def a_list(value: object) -> list[Any]:
    if type(value) is not list:
        raise GraphProblem(f"has {_shown(value)} where a list belongs")
    return value


def a_text(value: object) -> str:
    if type(value) is not str:
        raise GraphProblem(f"has {_shown(value)} where a text belongs")
    return value


def an_int(value: object) -> int:
    if type(value) is not int or not -MAX_INT <= value < MAX_INT:
        raise GraphProblem(f"has {_shown(value)} where a whole number belongs")
    return value


def a_bool(value: object) -> bool:
    if type(value) is not bool:
        raise GraphProblem(f"has {_shown(value)} where true or false belongs")
    return value


def one_of(value: object) -> tuple[str, object]:
    """Return the key and value of an object with exactly one entry. The schema writes a choice in this way."""
    if len(an_object(value)) != 1:
        raise GraphProblem(f"has {_shown(value)} where an object with one key belongs")
    return next(iter(an_object(value).items()))


def get(values: Mapping[str, Value], key: str) -> Value:
    if key not in values:
        raise GraphProblem(f"has no {key!r} in {_shown(list(values))}")
    return values[key]


def a_dtype(value: object) -> torch.dtype:
    return _chosen(value, DTYPES, "a type of numbers")


def check_device(value: object) -> None:
    if an_object(value).get("type") != "cpu":
        raise GraphProblem(f"has a tensor on {_shown(value)}, and artifacts are computed on the CPU")


def _chosen(value: Any, choices: Mapping[int, Any], what: str) -> Any:
    if (found := choices.get(an_int(value))) is None:
        raise GraphProblem(f"has {value} where {what} belongs, one of {sorted(choices)}")
    return found


def _shown(value: object) -> str:
    return repr(value)[:80] if not isinstance(value, dict | list) else f"{type(value).__name__} of {len(value)}"


class GraphReader:
    """Makes an fx graph from `program`, the content of model.json. `constants`: (kind, name) -> stored tensor."""

    def __init__(self, program: dict[str, Any], constants: Mapping[tuple[bool, str], torch.Tensor]) -> None:
        """The first part of a constant's key says if the constant is stored among the weights."""
        module = an_object(get(program, "graph_module"))
        self._graph_values = an_object(get(module, "graph"))
        self._signature = an_object(get(module, "signature"))
        self._stored = constants
        self.graph = torch.fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}  # by the names of attributes
        self.sources: list[str] = []  # what the exported module called them
        self.widths: list[int] = []  # columns of the inputs
        self._values: dict[str, torch.fx.Node] = {}

    def build(self) -> torch.fx.Graph:
        """Return the graph. Raises GraphProblem, and UnlistedOperatorError for an operator that is not in the list."""
        self._read_inputs()
        if len(nodes := a_list(get(self._graph_values, "nodes"))) > MAX_NODES:
            raise GraphProblem(f"has {len(nodes)} operations, more than {MAX_NODES}")
        for node in nodes:
            self._read_node(an_object(node))
        (output, *others) = a_list(get(self._graph_values, "outputs")) or [None]
        kinds = [one_of(each)[0] for each in a_list(get(self._signature, "output_specs"))]
        if others or kinds != ["user_output"]:
            raise GraphProblem(f"has {1 + len(others)} outputs of the kinds {kinds[:3]}, and layers have one")
        self.graph.output((self._argument(output),))
        return self.graph

    def _read_inputs(self) -> None:
        inputs = [self._name_of(each) for each in a_list(get(self._graph_values, "inputs"))]
        specs = [one_of(each) for each in a_list(get(self._signature, "input_specs"))]
        if len(inputs) != len(specs):
            raise GraphProblem(f"has {len(inputs)} inputs and describes {len(specs)}")
        users = [name for name, (kind, _) in zip(inputs, specs, strict=True) if kind == "user_input"]
        if len(users) != 2:
            raise GraphProblem(f"takes {len(users)} inputs, and layers take dense and pooled values")
        for name, own in zip(users, ("dense", "pooled"), strict=True):
            self._add(name, self.graph.placeholder(own))
            self.widths.append(self._width(name))
        for name, (kind, spec) in zip(inputs, specs, strict=True):
            if kind != "user_input":
                self._add_constant(name, kind, an_object(spec))

    def _add_constant(self, name: str, kind: str, spec: dict[str, Any]) -> None:
        if kind not in ("parameter", "buffer", "tensor_constant"):
            raise GraphProblem(f"has an input of the kind {kind!r}, and layers have tensors alone")
        source = a_text(get(spec, f"{kind}_name"))
        is_weight = kind == "parameter" or (kind == "buffer" and a_bool(get(spec, "persistent")))
        if (stored := self._stored.get((is_weight, source))) is None:
            raise GraphProblem(f"names the tensor {source!r}, which the archive does not have")
        own = f"constant_{len(self.sources)}"
        self.sources.append(source)
        self.constants[own] = stored
        self._add(name, self.graph.create_node("get_attr", own))

    def _width(self, name: str) -> int:
        sizes = a_list(get(an_object(get(an_object(get(self._graph_values, "tensor_values")), name)), "sizes"))
        if len(sizes) != 2 or (width := an_int(an_object(sizes[1]).get("as_int"))) < 0 or width > MAX_WIDTH:
            raise GraphProblem(f"has an input of the sizes {sizes!r:.80}, not [batch, columns]")
        return width

    def _read_node(self, node: dict[str, Any]) -> None:
        target, inputs = a_text(get(node, "target")), a_list(get(node, "inputs"))
        outputs = a_list(get(node, "outputs"))
        if target.rpartition(".")[0].removeprefix("torch.ops.aten.") in CHECKS:
            return
        if (symbolic := SYMBOLIC.get(target)) is not None:
            args = tuple(self._argument(get(an_object(each), "arg")) for each in inputs)
            made = self.graph.call_function(symbolic, args)
        else:
            overload = find_operator(target)
            made = self.graph.call_function(overload, *self._by_schema(overload, inputs))
        self._name_outputs(made, outputs)

    def _by_schema(self, overload: Any, inputs: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given: dict[str, tuple[Any, int]] = {}
        for each in inputs:
            kind = an_object(each).get("kind")
            name = a_text(get(each, "name"))
            if name in given or kind not in (POSITIONAL, KEYWORD):
                raise GraphProblem(f"gives the argument {name!r:.80} of {overload} twice, or in no known way")
            given[name] = (self._argument(get(each, "arg")), kind)
        args, kwargs = [], {}
        for argument in overload._schema.arguments:
            if argument.name not in given:
                continue
            value, kind = given.pop(argument.name)
            if kind == POSITIONAL:
                args.append(value)
            else:
                kwargs[argument.name] = value
        if given:
            raise GraphProblem(f"gives {overload} an argument {next(iter(given))!r:.80} that it does not have")
        return tuple(args), kwargs

    def _name_outputs(self, made: torch.fx.Node, outputs: list[Any]) -> None:
        kinds = [one_of(each) for each in outputs]
        if len(kinds) == 1 and kinds[0][0] in ("as_tensor", "as_sym_int", "as_sym_float", "as_sym_bool"):
            self._add(self._name_of(outputs[0]), made)
            return
        if len(kinds) == 1 and kinds[0][0] == "as_tensors":
            kinds = [("as_tensor", each) for each in a_list(kinds[0][1])]
        for number, (kind, value) in enumerate(kinds):
            if kind != "as_none":
                self._add(self._name_of({kind: value}), self.graph.call_function(operator.getitem, (made, number)))

    def _add(self, name: str, node: torch.fx.Node) -> None:
        if name in self._values:
            raise GraphProblem(f"gives two values the name {name!r:.80}")
        self._values[name] = node

    def _value(self, name: Any) -> torch.fx.Node:
        if (node := self._values.get(a_text(name))) is None:
            raise GraphProblem(f"uses the value {name!r:.80} before it is computed")
        return node

    def _name_of(self, argument: Any) -> str:
        kind, value = one_of(argument)
        if kind not in ("as_tensor", "as_sym_int", "as_sym_float", "as_sym_bool"):
            raise GraphProblem(f"has {kind!r:.80} where a value belongs")
        return a_text(get(an_object(value), "name" if kind == "as_tensor" else "as_name"))

    def _argument(self, argument: Any) -> Any:
        kind, value = one_of(argument)
        read = _READERS.get(kind)
        if read is None:
            raise GraphProblem(f"has an argument of the kind {kind!r:.80}, which layers do not have")
        return read(self, value)

    def _tensor(self, value: Any) -> torch.fx.Node:
        return self._value(get(an_object(value), "name"))

    def _optional(self, value: Any) -> torch.fx.Node | None:
        kind, inner = one_of(value)
        return None if kind == "as_none" else self._tensor(inner)

    def _symbol(self, value: Any) -> Any:
        kind, inner = one_of(value)
        return self._value(inner) if kind == "as_name" else _number(inner)

    def _layout(self, value: Any) -> torch.layout:
        if an_int(value) != STRIDED:
            raise GraphProblem(f"has the layout {value}, and layers have plain tensors")
        return torch.strided

    def _device(self, value: Any) -> torch.device:
        check_device(value)
        return torch.device("cpu")


def _number(value: object) -> int | float | bool:
    if type(value) is bool or type(value) is float:
        return value
    return FLOATS[value] if type(value) is str and value in FLOATS else an_int(value)


def _each(read: Callable[[GraphReader, Any], Any]) -> Callable[[GraphReader, Any], list[Any]]:
    return lambda reader, values: [read(reader, value) for value in a_list(values)]


_READERS: dict[str, Callable[[GraphReader, Any], Any]] = {
    "as_none": lambda reader, value: None,
    "as_tensor": GraphReader._tensor,
    "as_tensors": _each(GraphReader._tensor),
    "as_optional_tensor": GraphReader._optional,
    "as_optional_tensors": _each(GraphReader._optional),
    "as_int": lambda reader, value: an_int(value),
    "as_ints": _each(lambda reader, value: an_int(value)),
    "as_float": lambda reader, value: _number(value),
    "as_floats": _each(lambda reader, value: _number(value)),
    "as_bool": lambda reader, value: a_bool(value),
    "as_bools": _each(lambda reader, value: a_bool(value)),
    "as_string": lambda reader, value: a_text(value),
    "as_sym_int": GraphReader._symbol,
    "as_sym_ints": _each(GraphReader._symbol),
    "as_sym_float": GraphReader._symbol,
    "as_sym_bool": GraphReader._symbol,
    "as_scalar_type": lambda reader, value: a_dtype(value),
    "as_memory_format": lambda reader, value: _chosen(value, MEMORY_FORMATS, "a memory format"),
    "as_layout": GraphReader._layout,
    "as_device": GraphReader._device,
}


# Operators of aten that read and write nothing but their tensors, and check sizes and indices. All variants of a name
# are allowed except those that write to an output argument; in-place variants end with an underscore.
LISTED = """
__and__ __or__ __xor__ abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil
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
    """Return torch.ops.aten.<name>.<overload>. Raises UnlistedOperatorError."""
    name, _, overload = target.removeprefix("torch.ops.aten.").partition(".")
    is_listed = target.startswith("torch.ops.aten.") and (name in OPERATORS or name.removesuffix("_") in OPERATORS)
    packet = getattr(torch.ops.aten, name, None) if is_listed else None
    if packet is not None and overload in packet.overloads():
        found = getattr(packet, overload)
        if not any(argument.is_out for argument in found._schema.arguments):
            return found
    raise UnlistedOperatorError(
        f"the layers call the operator {target!r:.100}, which is not in the list of operators that an artifact may run; "
        "write the model with operators of the list (LISTED in pipeline/serving/scoring/program_graph.py), or add the "
        "operator there if it reads and writes nothing except its tensors"
    )


MAX_VALUE_ELEMENTS = 1 << 24  # of one intermediate value for SAMPLE_ROWS rows, besides those that the file stores
MAX_ELEMENTS = 1 << 28  # of all intermediate values together
SAMPLE_ROWS = 2
MAX_PARTS = 1 << 16  # of one value that an operator takes apart


class _Sizes(torch.fx.Interpreter):
    """Computes the sizes of all intermediate tensors without their values. Raises GraphProblem above the limits."""

    def __init__(self, module: torch.fx.GraphModule, mode: Any, num_stored: int) -> None:
        super().__init__(module)
        self._mode, self._largest, self._total = mode, MAX_VALUE_ELEMENTS + num_stored, 0

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._mode.from_tensor(vars(self.module)[target])

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if (num_parts := _num_parts(target, args, kwargs)) > MAX_PARTS:
            raise GraphProblem(f"takes a value apart into {num_parts}, more than {MAX_PARTS}")
        return super().call_function(target, args, kwargs)

    def run_node(self, n: torch.fx.Node) -> Any:
        found = super().run_node(n)
        n.meta["val"] = found
        for value in found if isinstance(found, tuple | list) else [found]:
            if isinstance(value, torch.Tensor):
                self._total += value.numel()
                if value.numel() > self._largest or self._total > MAX_ELEMENTS + self._largest:
                    raise GraphProblem(f"computes a value of {value.numel()} numbers for {SAMPLE_ROWS} rows")
            elif isinstance(value, int | float) and not -MAX_INT <= value < MAX_INT:
                raise GraphProblem(f"computes the size {value!r:.80}")
        return found


def _num_parts(target: Any, args: Any, kwargs: Any) -> int:
    """Return how many tensors the operator returns, before they are made; 1 if the operator's number is fixed."""
    name = getattr(getattr(target, "_schema", None), "name", "").removeprefix("aten::")
    if name not in ("unbind", "split", "chunk"):
        return 1
    given = {**dict(zip((each.name for each in target._schema.arguments), args, strict=False)), **kwargs}
    size, parts = given["self"].shape[given.get("dim", 0)], given.get("split_size", given.get("chunks", 1))
    if isinstance(parts, list | tuple):
        return len(parts)
    return int(parts) if name == "chunk" else int(size) // max(int(parts), 1)


def check_sizes(module: torch.fx.GraphModule, widths: list[int], num_stored: int) -> None:
    """Store each node's result in meta["val"], as a tensor without memory. Raises GraphProblem if
    operators do not fit each other, or a tensor is larger than the limits.
    """
    logger = logging.getLogger(fake_tensor.__name__)
    logger.addFilter(_nothing)  # it logs the traceback of what is reported below
    try:
        with fake_tensor.FakeTensorMode() as mode:
            inputs = [torch.empty(SAMPLE_ROWS, width) for width in widths]
            (found,) = _Sizes(module, mode, num_stored).run(*inputs, enable_io_processing=False)
    except GraphProblem:
        raise
    except Exception as error:  # an operator may raise anything for arguments that do not fit it
        raise GraphProblem(f"cannot be computed: {' '.join(str(error).split())[:200]}") from None
    finally:
        logger.removeFilter(_nothing)
    if not isinstance(found, torch.Tensor) or found.dtype != torch.float32:
        raise GraphProblem("does not give numbers in float32")


def _nothing(record: logging.LogRecord) -> bool:
    return False
