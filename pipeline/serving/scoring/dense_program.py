"""Load dense.pt2, the exported layers, as a callable. Nothing in the file is unpickled or run as
Python.

dense.pt2 is torch.export's archive: a zip file of raw tensors and JSON. torch.export.load would
evaluate parts of that JSON, so the archive is read here: tensors from members of known names, the
graph by program_graph.py.
"""

from __future__ import annotations

import io
import math
import re
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from pipeline.devices.cpu.products import onednn_multiplies_faster, outputs
from pipeline.runtime.errors import DamagedError, ServingError
from pipeline.runtime.storage import signature
from pipeline.serving.scoring.program_graph import (
    GraphProblem,
    GraphReader,
    UnlistedOperatorError,
    a_bool,
    a_dtype,
    a_list,
    a_text,
    an_int,
    an_object,
    check_device,
    check_sizes,
    get,
    one_of,
    read_json,
)

Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
RELU = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)
MODEL, WEIGHTS, CONSTANTS = "models/model.json", "data/weights/", "data/constants/"
CONFIGS = {WEIGHTS: WEIGHTS + "model_weights_config.json", CONSTANTS: CONSTANTS + "model_constants_config.json"}
SAMPLE_INPUTS = "data/sample_inputs/model.pt"  # a pickle; ours is empty
MEMBER = re.compile(
    r"[A-Za-z0-9_-]+/("
    r"models/model\.json|data/weights/(weight_[0-9]+|model_weights_config\.json)"
    r"|data/constants/(tensor_[0-9]+|model_constants_config\.json)|data/sample_inputs/model\.pt"
    r"|archive_format|archive_version|byteorder|version|\.format_version|\.data/(version|serialization_id))"
)
MAX_MEMBERS = 100_000


class DenseProgram:
    """The operations of an exported program. `constants` are its weights and other tensors, in the order of `code`."""

    def __init__(self, module: torch.fx.GraphModule, sources: list[str]) -> None:
        """sources: the names of the constants in the module that was exported."""
        self._module, self._names = module, [f"constant_{number}" for number in range(len(sources))]
        self.sources = sources
        self._forward = module.forward

    def __call__(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return self._forward(dense, pooled)[0]

    @property
    def code(self) -> str:
        """Return the program as Python code, in which constants appear only by name."""
        return str(self._module.code)

    @property
    def constants(self) -> list[torch.Tensor]:
        return [vars(self._module)[name] for name in self._names]

    def replace_constants(self, constants: Sequence[torch.Tensor]) -> None:
        """Replace the constants, never during a call. Raises ServingError for another number, type or shape."""
        before = [(constant.dtype, constant.shape) for constant in self.constants]
        if (now := [(constant.dtype, constant.shape) for constant in constants]) != before:
            raise ServingError(
                f"the layers have {len(before)} tensors {before[:2]}..., and these are {len(now)} {now[:2]}..."
            )
        for name, constant in zip(self._names, constants, strict=True):
            vars(self._module)[name] = constant


def load_program(content: bytes, name: str) -> DenseProgram:
    """Load the bytes of dense.pt2. `name` is for errors.

    Raises DamagedError: the archive does not hold only plain tensors and known JSON, or needs too much
    memory. Raises UnlistedOperatorError: it calls an operator that is not in the list.
    """
    try:
        members = read_archive(content)
        stored = {
            (prefix == WEIGHTS, key): tensor
            for prefix in CONFIGS
            for key, tensor in _read_tensors(members, prefix).items()
        }
        reader = GraphReader(read_json(get(members, MODEL)), stored)
        graph = reader.build()
        module = torch.fx.GraphModule({}, torch.fx.Graph())
        vars(module).update(reader.constants)  # no parameters: nn.Module looks those up by a method of its own
        module.graph = graph
        check_sizes(module, reader.widths, sum(tensor.numel() for tensor in stored.values()))
    except GraphProblem as error:
        raise DamagedError(f"{name} {error}; it is not loaded. Export again") from None
    except UnlistedOperatorError as error:
        raise UnlistedOperatorError(f"{name}: {error}") from None
    _simplify(graph)
    module.recompile()
    return DenseProgram(module, reader.sources)


def read_archive(content: bytes) -> dict[str, bytes]:
    """Return the archive's members by their names below its root. Raises GraphProblem for unexpected members."""
    found: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            if len(members) > MAX_MEMBERS or sum(member.file_size for member in members) > len(content):
                raise GraphProblem(f"lists {len(members)} members, which its {len(content)} bytes cannot hold")
            for member in members:
                if MEMBER.fullmatch(member.filename) is None:
                    raise GraphProblem(f"holds {member.filename!r:.100}, which layers do not have")
                if member.compress_type != zipfile.ZIP_STORED:
                    raise GraphProblem(f"holds {member.filename} compressed")
                name = member.filename.partition("/")[2]
                if name in found:
                    raise GraphProblem(f"holds {name} twice")
                found[name] = archive.read(member)
    except GraphProblem:
        raise
    except Exception as error:  # zipfile raises many kinds for damaged archives
        raise GraphProblem(f"is not an archive of torch.export: {str(error)[:100]}") from None
    if found.get(SAMPLE_INPUTS):
        raise GraphProblem(f"holds a pickle of example inputs ({SAMPLE_INPUTS})")
    if found.get("byteorder", b"little") != b"little":
        raise GraphProblem("holds numbers of another byte order than little endian")
    return found


def _read_tensors(members: dict[str, bytes], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors in one folder of the archive, by the names that the folder's config gives them."""
    config = an_object(get(read_json(get(members, CONFIGS[prefix])), "config"))
    flat: dict[str, torch.Tensor] = {}
    found = {}
    for name, value in config.items():
        entry = an_object(value)
        if a_bool(get(entry, "use_pickle")):
            raise GraphProblem(f"holds {name!r:.80} as a pickle")
        path, meta = prefix + a_text(get(entry, "path_name")), an_object(get(entry, "tensor_meta"))
        if path == CONFIGS[prefix]:
            raise GraphProblem(f"names {path} as a tensor")
        check_device(get(meta, "device"))
        dtype = a_dtype(get(meta, "dtype"))
        if path not in flat:
            flat[path] = _flat_tensor(get(members, path), dtype)
        found[name] = _strided(flat[path], dtype, meta)
    return found


def _flat_tensor(content: bytes, dtype: torch.dtype) -> torch.Tensor:
    if len(content) % dtype.itemsize:
        raise GraphProblem(f"has a tensor of {len(content)} bytes, which are not whole numbers of {dtype}")
    # torch's allocator aligns to 64 bytes; products of unaligned matrices may differ in the last bit.
    tensor = torch.empty(len(content) // dtype.itemsize, dtype=dtype)
    if content:
        tensor.view(torch.uint8).numpy()[:] = memoryview(content)
    return tensor


def _strided(flat: torch.Tensor, dtype: torch.dtype, meta: dict[str, Any]) -> torch.Tensor:
    sizes, strides = ([_size(each) for each in a_list(get(meta, key))] for key in ("sizes", "strides"))
    offset = _size(get(meta, "storage_offset"))
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=False))
    count = math.prod(sizes)
    if flat.dtype != dtype or len(sizes) != len(strides) or count > len(flat) or (count and last >= len(flat)):
        raise GraphProblem(
            f"has a tensor of {len(flat)} numbers, and {sizes} of them by {strides} from {offset} are used"
        )
    return flat.as_strided(sizes, strides, offset) if count else torch.empty(sizes, dtype=dtype)


def _size(value: Any) -> int:
    kind, number = one_of(value)
    if kind != "as_int" or (size := an_int(number)) < 0:
        raise GraphProblem(f"has the size {value!r:.80}, and stored tensors have whole numbers")
    return size


def _simplify(graph: torch.fx.Graph) -> None:
    """Remove casts that change nothing; where oneDNN is faster, use it for linear layers."""
    for node in list(graph.nodes):
        if _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    if onednn_multiplies_faster():
        _multiply_by_onednn(graph)


def _multiply_by_onednn(graph: torch.fx.Graph) -> None:
    """Compute fp32 linear layers by oneDNN, each with the relu after it. Layers in bf16 are unchanged."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        users = list(node.users)
        is_relu = len(users) == 1 and users[0].target in RELU
        node.target = outputs
        inputs, weight, bias = (*node.args, None)[:3]
        node.args = (inputs, weight, bias, is_relu)
        if is_relu:
            users[0].replace_all_uses_with(node)
            graph.erase_node(users[0])


def _changes_nothing(node: torch.fx.Node) -> bool:
    """Return True if the node casts a tensor to the type that the tensor already has."""
    if node.op != "call_function" or node.target is not torch.ops.aten.to.dtype or len(node.args) != 2 or node.kwargs:
        return False
    source = node.args[0]
    value = source.meta.get("val") if isinstance(source, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == node.args[1]


def load_compiled(path: str) -> Program:
    """Load an AOTInductor package. It is native code, which runs as soon as it is loaded.

    It holds Python's lock while it runs (torch 2.13 and 2.14: boxed_run has no gil_scoped_release).
    Raises ServingError if no signature is required. If one is required, it was checked before this
    call.
    """
    if not signature.is_required():
        raise ServingError(
            f"{path} is native code, which runs as soon as it is loaded: export with sign_key=sign.pem and set "
            "require_signature=sign.pub, or leave out compiled=true"
        )
    from torch._inductor import aoti_load_package

    run = aoti_load_package(path).loader.boxed_run  # the model's own call reads its signature again each time

    def program(dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        (logits,) = run([dense, pooled])
        return logits

    return program
