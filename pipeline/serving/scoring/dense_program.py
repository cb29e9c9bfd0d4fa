"""Load dense.pt2 as a callable, without unpickling anything.

torch.export's archive is a zip file of JSON and raw tensors. It may hold pickles too: tensors of other classes, objects,
example inputs. Ours do not, and one that does is refused before torch looks at it.
"""

from __future__ import annotations

import io
import json
import operator
import zipfile
from collections.abc import Callable, Sequence

import torch
import torch.fx
from torch.fx.graph import CodeGen

from pipeline.devices.cpu.products import onednn_multiplies_faster, outputs
from pipeline.runtime.errors import DamagedError, ServingError

Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
GUARDS = "_guards_fn"  # what ExportedProgram.module() calls its checks, where it has them
RELU = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)
RAW = ("/data/weights/weight_", "/data/constants/tensor_")  # the tensors themselves
JSON = ("_config.json", "/models/model.json")
PLAIN = ("/archive_format", "/archive_version", "/byteorder", "/.data/version", "/.data/serialization_id", "/version", "/.format_version")  # fmt: skip


class DenseProgram:
    """The operations of an exported program; `constants` are its weights and other tensors, in the order of `code`."""

    def __init__(self, module: torch.fx.GraphModule, sources: list[str]) -> None:
        """sources: the names of the constants in the module that was exported."""
        self._module, self._names = module, [f"constant_{number}" for number in range(len(sources))]
        self.sources = sources
        self._forward = module.forward

    def __call__(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return self._forward(dense, pooled)[0]  # type: ignore[no-any-return]

    @property
    def code(self) -> str:
        """Python, in which constants have their names alone."""
        return str(self._module.code)

    @property
    def constants(self) -> list[torch.Tensor]:
        return [vars(self._module)[name] for name in self._names]

    def replace_constants(self, constants: Sequence[torch.Tensor]) -> None:
        """Not while it is called. Raises ServingError for tensors of another number, type or shape."""
        before = [(constant.dtype, constant.shape) for constant in self.constants]
        if (now := [(constant.dtype, constant.shape) for constant in constants]) != before:
            raise ServingError(
                f"the layers have {len(before)} tensors {before[:2]}..., and these are {len(now)} {now[:2]}..."
            )
        for name, constant in zip(self._names, constants, strict=True):
            vars(self._module)[name] = constant


def load_program(content: bytes, name: str) -> DenseProgram:
    """Raises DamagedError for an archive that holds, or may hold, a pickle."""
    check_archive(content, name)
    return without_checks(torch.export.load(io.BytesIO(content)))


def without_checks(program: torch.export.ExportedProgram) -> DenseProgram:
    """The operations of a program of plain tensors, and nothing besides them.

    ExportedProgram.module() looks at its inputs' shapes by symbolic algebra, walks down to each weight through its
    modules, and checks types between operations: for 16 rows that takes longer than DLRM's layers do. Callers give inputs
    of the right shape.
    """
    module = program.module()
    graph = module.graph
    for node in list(graph.nodes):
        if node.target in (GUARDS, torch.ops.aten._assert_tensor_metadata.default):
            graph.erase_node(node)
        elif _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    if onednn_multiplies_faster():
        _multiply_by_onednn(graph)
    constants = graph.find_nodes(op="get_attr")
    sources = [str(node.target) for node in constants]
    for number, node in enumerate(constants):
        value = operator.attrgetter(node.target)(module)
        node.target = f"constant_{number}"
        vars(module)[node.target] = value.detach()  # no parameter: nn.Module looks those up by a method of its own
    graph.set_codegen(CodeGen())  # in the place of pytree's, which takes inputs and outputs apart
    module.recompile()
    return DenseProgram(module, sources)


def _multiply_by_onednn(graph: torch.fx.Graph) -> None:
    """Linear layers in fp32, each with the relu behind it in one pass; in bf16 they stay torch's."""
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
    """A cast to the type that it comes from."""
    if node.op != "call_function" or node.target is not torch.ops.aten.to.dtype or len(node.args) != 2 or node.kwargs:
        return False
    source = node.args[0]
    value = source.meta.get("val") if isinstance(source, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == node.args[1]


def check_archive(content: bytes, name: str) -> None:
    """Raises DamagedError unless every member is of a kind that is read without pickle."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for member in archive.infolist():
                if problem := _problem(archive, member):
                    raise DamagedError(f"{name} holds {member.filename}, {problem}; it is not loaded. Export again")
    except (zipfile.BadZipFile, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DamagedError(f"{name} is no archive of torch.export: {error}") from None


def _problem(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> str:
    path = member.filename
    if member.compress_type != zipfile.ZIP_STORED:
        return "which is compressed"
    if "/data/sample_inputs/" in path:
        return "" if member.file_size == 0 else "a pickle of example inputs"
    if path.endswith("_config.json"):
        config = json.loads(archive.read(member)).get("config", {})
        return "which names a pickle" if any(entry.get("use_pickle", True) for entry in config.values()) else ""
    if path.endswith((*JSON, *PLAIN)) or any(raw in path for raw in RAW):
        return ""
    return "which is nothing that an artifact has"


def load_compiled(path: str) -> Program:
    """An AOTInductor package: native code, which its file's checksums must vouch for.

    It holds Python's lock while it runs (torch 2.13 and 2.14: boxed_run has no gil_scoped_release).
    """
    from torch._inductor import aoti_load_package

    run = aoti_load_package(path).loader.boxed_run  # the model's own call reads its signature anew each time

    def program(dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        (logits,) = run([dense, pooled])
        return logits  # type: ignore[no-any-return]

    return program
