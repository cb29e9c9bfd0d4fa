"""Export a model's layers by torch.export as a program of plain tensors (dense.pt2).

forward(dense [batch, num_dense] float32, pooled [batch, sum of dims] float32) -> logits [batch]
float32, for any batch; of several labels, or one that is not binary, [batch, sum of their widths].
The tables are separate files: in the program, pooled rows replace the model's
EmbeddingBagCollection.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from pipeline.embeddings.collection import ComposedEmbeddings
from pipeline.models.layers.interaction import DotInteraction
from pipeline.runtime.errors import ServingError

EXAMPLE_ROWS = 16
MAX_BATCH = 1 << 20
Int8Names = dict[str, tuple[str, str | None]]  # module -> the weight and the bias that it was made of
MIN_INT8_OUTPUTS = 8  # the layer of the logit stays what it is: int8 saves nothing there, and costs the most


class PooledInput(nn.Module):
    """Replaces an EmbeddingBagCollection. Its input is already the pooled rows."""

    def __init__(self, names: list[str], dims: list[int]) -> None:
        super().__init__()
        self._names, self._dims = names, dims

    def forward(self, pooled: torch.Tensor) -> KeyedTensor:
        return KeyedTensor(keys=self._names, length_per_key=self._dims, values=pooled)


class GatheredDots(nn.Module):
    """Computes DotInteraction by one gather of all pairs' products, instead of one slice per row."""

    pairs: torch.Tensor

    def __init__(self, num_sparse_features: int, has_dense: bool) -> None:
        super().__init__()
        num_rows = num_sparse_features + has_dense
        first, second = torch.triu_indices(num_rows, num_rows, offset=1)
        self.register_buffer("pairs", first * num_rows + second)

    def forward(self, dense: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        combined = rows if dense is None else torch.cat([dense.unsqueeze(1), rows], dim=1)
        products = torch.bmm(combined, combined.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return products if dense is None else torch.cat([dense, products], dim=1)


def with_gathered_pairs(model: nn.Module) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, DotInteraction):
                setattr(parent, name, GatheredDots(child.num_sparse_features, child.has_dense))
    return model


class Layers(nn.Module):
    """Maps (dense [batch, num_dense], pooled [batch, sum of dims]) to [batch] or [batch, width], in `dtype`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32, width: int | None = None) -> None:
        super().__init__()
        self.model, self._dtype, self._width = model.to(dtype), dtype, width

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        logits = self.model(dense.to(self._dtype), pooled.to(self._dtype))
        if not isinstance(logits, torch.Tensor):
            raise ServingError(
                f"the model gives a {type(logits).__name__}, not one logit a row: there is nothing to score rows by"
            )
        return logits.float().reshape(-1) if self._width is None else logits.float().reshape(-1, self._width)


def take_collection(model: nn.Module, keys: list[str]) -> list[int]:
    """Replace the model's collection by a PooledInput. Return the dims of `keys`, in the same order."""
    kind = (
        ComposedEmbeddings
        if any(isinstance(module, ComposedEmbeddings) for module in model.modules())
        else EmbeddingBagCollection
    )
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, kind)
    ]
    if (num_collections := len({id(child) for _, _, child in found})) != 1:
        raise ServingError(
            f"the model has {num_collections} collections of embedding tables and an artifact serves one: put all tables "
            "into one EmbeddingBagCollection"
        )
    configs = found[0][2].embedding_bag_configs()
    dims = {feature: config.embedding_dim for config in configs for feature in config.feature_names}
    dims |= getattr(found[0][2], "widths", {})  # of sequences
    if sorted(keys) != sorted(dims):
        raise ServingError(f"the batch has the features {sorted(keys)}, and the model looks up {sorted(dims)}")
    stand_in = PooledInput(keys, [dims[key] for key in keys])
    for parent, name, _ in found:
        setattr(parent, name, stand_in)
    return [dims[key] for key in keys]


def export_layers(
    model: nn.Module, precision: str, num_dense: int, pooled_dim: int, width: int | None = None
) -> torch.export.ExportedProgram:
    """Export `model` without its tables, in fp32 on the CPU; it is not changed. `width` of outputs; None: [batch]."""
    return trace_layers(model, precision, num_dense, pooled_dim, width)[0]


def trace_layers(
    model: nn.Module, precision: str, num_dense: int, pooled_dim: int, width: int | None
) -> tuple[torch.export.ExportedProgram, Int8Names]:
    """Do the same as export_layers, and also return which layers were converted to int8."""
    program = _export(copied_layers(model, precision, width), num_dense, pooled_dim)
    if precision != "int8":
        return program, {}
    module, names = with_int8_linears(program.module())
    return _export(module, num_dense, pooled_dim), names


def by_name(
    model: nn.Module, precision: str, width: int | None, names: Sequence[str], int8: Int8Names
) -> list[torch.Tensor | None]:
    """Return for each of `names`, constants of the program, its tensor in the model; None if there is none."""
    state = copied_layers(model, precision, width).state_dict()
    quantized = {
        name: Int8Linear(state[weight], None if bias is None else state[bias])
        for name, (weight, bias) in int8.items()
        if weight in state and (bias is None or bias in state)
    }
    found = [quantized[name].state_dict().get(part) if name in quantized else state.get(whole)
             for whole in names for name, _, part in [whole.partition(".")]]  # fmt: skip
    return [None if value is None else value.detach() for value in found]


def copied_layers(model: nn.Module, precision: str, width: int | None) -> Layers:
    """Return the layers of a copy of the model, for an export."""
    copied = with_gathered_pairs(copy.deepcopy(model))
    return Layers(copied, torch.bfloat16 if precision == "bf16" else torch.float32, width).eval()


def program_bytes(program: torch.export.ExportedProgram) -> bytes:
    """Return the content of dense.pt2."""
    examples, buffer = program._example_inputs, io.BytesIO()
    program._example_inputs = None  # they would be stored by pickle
    try:
        torch.export.save(program, buffer)
    finally:
        program._example_inputs = examples
    return buffer.getvalue()


def _export(module: nn.Module, num_dense: int, pooled_dim: int) -> torch.export.ExportedProgram:
    example = (torch.zeros(EXAMPLE_ROWS, num_dense), torch.zeros(EXAMPLE_ROWS, pooled_dim))
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    with torch.no_grad():
        module(*example)  # what a model works out on its first batch is not traced
        return torch.export.export(module, example, dynamic_shapes=({0: batch}, {0: batch}), strict=False)


class Int8Linear(nn.Module):
    """Computes x W^T + b for x [..., in], with int8 weights, a scale per output, and rows of x that
    are quantized first.

    torch.ao packs such weights into objects that torch.export cannot write; these are plain
    tensors.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        scale = weight.abs().amax(dim=1).clamp_min(1e-12) / 127
        self.register_buffer("numbers", (weight / scale[:, None]).round().to(torch.int8).t().contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
        product = torch._int_mm((rows / scale).round().to(torch.int8), self.numbers).float() * scale * self.scale
        return (product if self.bias is None else product + self.bias).reshape(*x.shape[:-1], len(self.scale))


def with_int8_linears(graph_module: Any) -> tuple[nn.Module, Int8Names]:
    """Compute every product with a constant matrix in int8, whatever module it came from. Nothing else changes."""
    names: Int8Names = {}
    for number, node in enumerate(list(graph_module.graph.nodes)):
        if node.op != "call_function" or node.target is not torch.ops.aten.linear.default:
            continue
        x, weight, bias = (*node.args, None)[:3]
        if weight.op != "get_attr" or (bias is not None and bias.op != "get_attr"):
            continue
        values = _attribute(graph_module, weight.target)
        if len(values) < MIN_INT8_OUTPUTS:
            continue
        name = f"int8_{number}"
        names[name] = (weight.target, bias and bias.target)
        graph_module.add_submodule(name, Int8Linear(values, bias and _attribute(graph_module, bias.target)))
        with graph_module.graph.inserting_before(node):
            node.replace_all_uses_with(graph_module.graph.call_module(name, (x,)))
        graph_module.graph.erase_node(node)
    graph_module.graph.eliminate_dead_code()
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return graph_module, names


def _attribute(module: Any, path: str) -> torch.Tensor:
    for name in path.split("."):
        module = getattr(module, name)
    return module.detach()


def compile_layers(program: torch.export.ExportedProgram, path: str) -> None:
    """Write the layers as an AOTInductor package. Raises ServingError if there is no suitable compiler."""
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.exc import InductorError

    try:
        # How many threads is for the process that serves to say, not for the one that compiles.
        aoti_compile_and_package(program, package_path=path, inductor_configs={"cpp.dynamic_threads": True})
    except (InductorError, RuntimeError, OSError) as error:
        raise ServingError(
            f"the layers cannot be compiled ({' '.join(str(error).split())[:300]}); AOTInductor needs a C++ compiler (g++) "
            "and Python's headers; install them, or leave out compiled=true: dense.pt2 scores the same"
        ) from error
