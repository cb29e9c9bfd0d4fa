"""Implement FBGEMM's GPU lookups and their backward passes with torch's operations.

FBGEMM's C++ runs above them: autograd, checks, the unpacking of arguments. Only the operations that
launch kernels are replaced: split_* (fused optimizers; tables in HBM, UVM or a UVM cache) and
dense_* (tables with a gradient), pooled (SUM, MEAN), not pooled (nobag), weighted, and with batch
sizes that vary by feature and rank (VBE). row_updates.py has the formulas of optimizers.

Tables are flat: feature f's rows of width D begin at weights_offsets[f]; features of one table
share an offset. Ids are sorted by feature, then by bag; bag i begins at offsets[i].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from pipeline.extras.shadow import tensors, uvm_cache
from pipeline.extras.shadow.row_updates import update_rows
from pipeline.extras.shadow.rules import named
from pipeline.extras.shadow.state import Patch

_DTYPES = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}  # FBGEMM's SparseType
_MEAN = 1  # FBGEMM's PoolingMode
_DEVICE, _MANAGED_CACHING = 0, 2  # FBGEMM's EmbeddingLocation


@dataclass
class _Feature:
    """A feature of a call: the position of its rows, its ids, and where its bags are in the output."""

    number: int
    dim: int
    table: tuple[int, int]  # placement, offset: equal for features that share a table
    ids: torch.Tensor
    ids_at: slice  # of all ids
    bag_of_id: torch.Tensor
    lengths: torch.Tensor  # of bags
    output_at: torch.Tensor  # [bags, dim], positions in the flat output

    def is_empty(self) -> bool:
        return len(self.ids) == 0


def _features(call: dict[str, Any]) -> Iterator[_Feature]:
    offsets, ids = call["offsets"].long(), call["indices"].long()
    begins = call["weights_offsets"].tolist()
    places = call["weights_placements"].tolist() if "weights_placements" in call else [_DEVICE] * len(begins)
    dims, output_of_feature = _dims_and_outputs(call, len(begins))
    bags_of_feature = _bags(call, len(begins))
    for number, (first, last) in enumerate(bags_of_feature):
        dim, low, high = dims[number], int(offsets[first]), int(offsets[last])
        lengths = offsets[first + 1 : last + 1] - offsets[first:last]
        bag_of_id = torch.repeat_interleave(torch.arange(last - first), lengths)
        own = ids[low:high]
        if "D" in call:  # not pooled: each id is a bag
            bag_of_id, lengths = torch.arange(high - low), torch.ones(high - low, dtype=torch.int64)
            begin = torch.arange(low, high) * dim
        else:
            begin = output_of_feature(number, first, last)
        table = (places[number], begins[number])
        output_at = begin.unsqueeze(1) + torch.arange(dim)
        yield _Feature(number, dim, table, own, slice(low, high), bag_of_id, lengths, output_at)


def _dims_and_outputs(call: dict[str, Any], num_features: int) -> tuple[list[int], Any]:
    """Return each feature's width, and a function that maps a range of the feature's bags to output positions."""
    if "D" in call:
        return [int(call["D"])] * num_features, None
    d_offsets = call["D_offsets"].tolist()
    dims = [after - before for before, after in pairwise(d_offsets)]
    if "vbe_row_output_offsets" in call:
        return dims, lambda number, first, last: call["vbe_row_output_offsets"][first:last].long()
    total = d_offsets[-1]
    return dims, lambda number, first, last: torch.arange(last - first) * total + d_offsets[number]


def _bags(call: dict[str, Any], num_features: int) -> list[tuple[int, int]]:
    """Return the first bag of each feature, and as the last entry the number of all bags."""
    if call.get("B_offsets") is not None:
        begins = call["B_offsets"].tolist()
        return list(pairwise(begins))
    if "vbe_b_t_map" in call:
        # FBGEMM reads the map as unsigned: the feature's number uses the highest bits, including
        # the sign bit.
        feature_of_bag = (call["vbe_b_t_map"].long() & 0xFFFFFFFF) >> int(call["info_B_num_bits"])
        ends = torch.searchsorted(feature_of_bag, torch.arange(num_features), right=True).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))
    batch_size = (len(call["offsets"]) - 1) // num_features
    return [(number * batch_size, (number + 1) * batch_size) for number in range(num_features)]


class _Rows:
    """Reads and writes rows of one table in place: in HBM, in host memory or in the cache."""

    def __init__(self, call: dict[str, Any], table: tuple[int, int], dim: int) -> None:
        self.placement, begin = table
        flat = call["dev_weights"] if self.placement == _DEVICE or "uvm_weights" not in call else call["uvm_weights"]
        flat = flat.detach().view(-1)
        self.rows = flat[begin : begin + (flat.numel() - begin) // dim * dim].view(-1, dim)
        self.dim, self.cache = dim, None
        if self.placement == _MANAGED_CACHING and call["lxu_cache_weights"].numel():
            self.cache = call["lxu_cache_weights"].detach()

    def read(self, ids: torch.Tensor, locations: torch.Tensor | None) -> torch.Tensor:
        found = self.rows[ids].float()
        if self.cache is not None and locations is not None:
            hits = locations >= 0
            found[hits] = self.cache[locations[hits].long(), : self.dim].float()
        return found

    def write(self, ids: torch.Tensor, values: torch.Tensor, locations: torch.Tensor | None) -> None:
        if self.cache is not None and locations is not None:
            hits = locations >= 0
            self.cache[locations[hits].long(), : self.dim] = values[hits].to(self.cache.dtype)
            ids, values = ids[~hits], values[~hits]
        self.rows[ids] = values.to(self.rows.dtype)


def _locations(call: dict[str, Any], at: slice) -> torch.Tensor | None:
    """Return for each id the position of its row in the cache (-1: not cached); None if there is no cache."""
    found = call.get("lxu_cache_locations")
    return found[at] if found is not None and found.numel() else None


def forward(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    call = named(func, args, kwargs)
    shape = _output_shape(call)
    out = torch.zeros(shape.numel())
    for feature in _features(call):
        if feature.is_empty():
            continue
        rows = _Rows(call, feature.table, feature.dim).read(feature.ids, _locations(call, feature.ids_at))
        if "indice_weights" in call:
            rows = rows * call["indice_weights"][feature.ids_at].unsqueeze(1)
        pooled = torch.zeros(feature.output_at.shape).index_add_(0, feature.bag_of_id, rows)
        if call.get("pooling_mode") == _MEAN:
            pooled /= feature.lengths.clamp(min=1).unsqueeze(1)
        out[feature.output_at] = pooled
    result = out.view(shape).to(_DTYPES[int(call["output_dtype"])])
    given = call.get("vbe_output")
    return result if given is None else given.copy_(result.view_as(given))


def _output_shape(call: dict[str, Any]) -> torch.Size:
    if "D" in call:
        return torch.Size([len(call["indices"]), int(call["D"])])
    if "vbe_output_size" in call:
        return torch.Size([int(call["vbe_output_size"])])
    batch_size = (len(call["offsets"]) - 1) // len(call["weights_offsets"])
    return torch.Size([batch_size, int(call["total_D"])])


def _row_gradients(call: dict[str, Any], feature: _Feature) -> torch.Tensor:
    """Return the gradient of each id's row [ids, dim]. Repeated ids are not added up yet."""
    grad = call["grad_output"].reshape(-1).float()[feature.output_at]
    if call.get("pooling_mode") == _MEAN:
        grad = grad / feature.lengths.clamp(min=1).unsqueeze(1)
    grad = grad[feature.bag_of_id]
    if "indice_weights" in call:
        grad = grad * call["indice_weights"][feature.ids_at].unsqueeze(1)
    return grad


def backward(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Add up the gradients of each row and update the rows by the operation's optimizer."""
    call = named(func, args, kwargs)
    by_table: dict[tuple[int, int], list[_Feature]] = {}
    for feature in _features(call):
        if not feature.is_empty():
            by_table.setdefault(feature.table, []).append(feature)
    for table, features in by_table.items():
        ids, first, gradient = _summed(call, features)
        located = [_locations(call, feature.ids_at) for feature in features]
        locations = None if located[0] is None else torch.cat([e for e in located if e is not None])[first]
        rows = _Rows(call, table, features[0].dim)
        weights = update_rows(func._schema.name, call, features[0].number, ids, rows.read(ids, locations), gradient)
        rows.write(ids, weights, locations)
    return torch.empty(0)


def _summed(call: dict[str, Any], features: list[_Feature]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the table's distinct ids, the position where each occurs first, and their summed gradients."""
    ids = torch.cat([feature.ids for feature in features])
    gradients = torch.cat([_row_gradients(call, feature) for feature in features])
    distinct, inverse = torch.unique(ids, return_inverse=True)
    first = torch.full((len(distinct),), len(ids)).scatter_reduce_(0, inverse, torch.arange(len(ids)), "amin")
    return distinct, first, torch.zeros(len(distinct), features[0].dim).index_add_(0, inverse, gradients)


def dense_backward(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the gradient of all weights as one flat tensor."""
    call = named(func, args, kwargs)
    flat = torch.zeros(call["dev_weights"].numel())
    for feature in _features(call):
        if not feature.is_empty():
            begin, dim = feature.table[1], feature.dim
            rows = flat[begin : begin + (len(flat) - begin) // dim * dim].view(-1, dim)
            rows.index_add_(0, feature.ids, _row_gradients(call, feature))
    return flat.to(call["dev_weights"].dtype)


def weight_gradients(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the gradient of the ids' weights: each id's row times its bag's gradient."""
    call = named(func, args, kwargs)
    out = torch.zeros(len(call["indices"]))
    wanted = call["feature_requires_grad"]
    for feature in _features(call):
        if feature.is_empty() or not (wanted is None or wanted.numel() == 0 or wanted[feature.number]):
            continue
        rows = _Rows(call, feature.table, feature.dim).read(feature.ids, _locations(call, feature.ids_at))
        out[feature.ids_at] = (rows * _row_gradients(call, feature)).sum(1)
    return out


def select_forward(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Replace keyed_jagged_index_select_dim1: select batches of a jagged tensor for every key."""
    call = named(func, args, kwargs)
    batch_size, offsets, indices = int(call["batch_size"]), call["offsets"].long(), call["indices"].long()
    num_keys = call["lengths"].numel() // batch_size
    chosen = (torch.arange(num_keys).unsqueeze(1) * batch_size + indices).reshape(-1)
    lengths = call["lengths"][chosen]
    at = _jagged_positions(offsets[chosen], lengths.long())
    outputs = [call["values"][at], lengths]
    if call.get("weights") is not None:
        outputs.append(call["weights"][at])
    ends = torch.cumsum(lengths, 0).to(call["offsets"].dtype)
    return [*outputs, ends, torch.tensor([len(call["values"])])]


def _jagged_positions(begins: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    ends = torch.cumsum(lengths, 0)
    return torch.repeat_interleave(begins - (ends - lengths), lengths) + torch.arange(int(lengths.sum()))


def select_rows(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Replace batch_index_select_dim0: select rows of flat matrices; also return backward's input."""
    call = named(func, args, kwargs)
    rows, dims, counts = (
        torch.tensor([int(each) for each in call[name]])
        for name in ("input_rows", "input_columns", "input_num_indices")
    )
    begins, permuted = _complete_cumsum(rows * dims), bool(call["permute_output_dim_0_1"])
    source, into = _selected(call["indices"], begins[:-1], dims, counts, permuted)
    out = torch.empty(len(into), dtype=call["inputs"].dtype)
    out[into] = call["inputs"].reshape(-1)[source]
    output_begins = torch.empty(0, dtype=torch.int64) if permuted else _complete_cumsum(counts * dims)
    saved = torch.tensor([int(dims.max()), 0, 1, int(counts.max())])
    return [out, begins[:-1], _complete_cumsum(rows), _complete_cumsum(dims).int(), output_begins,
            _complete_cumsum(counts), saved]  # fmt: skip


def select_rows_backward(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    call = named(func, args, kwargs)
    dims, counts = call["D_offsets"].long().diff(), call["total_L_offsets"].long().diff()
    permuted = bool(call["permute_output_dim_0_1"])
    source, into = _selected(call["indices"], call["weights_offsets"], dims, counts, permuted)
    gradient = torch.zeros(call["dev_weights"].numel(), dtype=call["dev_weights"].dtype)
    return gradient.index_add_(0, source, call["grad_output"].reshape(-1)[into]).view(call["dev_weights"].shape)


def _complete_cumsum(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=counts.dtype), counts.cumsum(0)])


def _selected(
    indices: torch.Tensor, begins: torch.Tensor, dims: torch.Tensor, counts: torch.Tensor, permuted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of all selected numbers, in the flat input and in the flat output."""
    source, into, columns, used = [], [], 0, 0
    parts = indices.long().split(counts.tolist())
    for own, begin, dim in zip(parts, begins.tolist(), dims.tolist(), strict=True):
        source.append((begin + own.unsqueeze(1) * dim + torch.arange(dim)).reshape(-1))
        if permuted:  # a row of the output has a part of every input
            at = torch.arange(len(own)).unsqueeze(1) * int(dims.sum()) + columns + torch.arange(dim)
        else:
            at = used + torch.arange(len(own) * dim)
        into.append(at.reshape(-1))
        columns, used = columns + dim, used + len(own) * dim
    return torch.cat(source), torch.cat(into)


def patches() -> list[Patch]:
    """Return no patches. The function installs the kernels where operations look for them."""
    tensors.KERNELS[:] = [
        (r"fbgemm::(split|dense)_embedding_(nobag_)?codegen_forward_(un)?weighted(_vbe)?_cuda", forward),
        (r"fbgemm::split_embedding_(nobag_)?backward_codegen_dense_.*_exact_cuda", dense_backward),
        (r"fbgemm::split_embedding_(nobag_)?backward_codegen_.*_exact_cuda", backward),
        (r"fbgemm::(split|dense)_embedding_codegen_grad_indice_weights(_vbe)?_cuda", weight_gradients),
        (r"fbgemm::keyed_jagged_index_select_dim1_forward", select_forward),
        (r"fbgemm::batch_index_select_dim0_forward_cuda_impl", select_rows),
        (r"fbgemm::batch_index_select_dim0_backward_cuda_impl", select_rows_backward),
        *uvm_cache.KERNELS,
    ]
    return []
