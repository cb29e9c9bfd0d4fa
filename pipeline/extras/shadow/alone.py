"""Answer the collectives of one rank that runs without other ranks, as if all ranks were equal.

Sums are multiplied by the number of ranks, gathered parts are copies, and each other rank is
assumed to send what this rank sends to itself. Shapes and bytes are those of equal loads; the
numbers are meaningless. What rank 0 broadcasts (plans, decisions) is recorded for ranks that run
later.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.extras.shadow import collectives

# of one broadcast; larger broadcasts are weights, whose values do not matter
MAX_RECORDED_BYTES = 64 << 20


class Alone:
    """Answers the collectives of `rank`. folder: the folder in which rank 0's broadcasts are stored."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._sent: Counter[tuple[int, ...]] = Counter()  # by the ranks of the group

    def new_group(self, ranks: Any, timeout: Any) -> Any:
        """Return a group whose collectives do nothing; fill() then writes the results."""
        return collectives.plain_new_group(ranks, timeout, "fake")

    def fill(self, func: Any, args: Any, kwargs: dict[str, Any], ranks: list[int]) -> None:
        """Write the results of a collective into its output tensors."""
        given = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        base = func._schema.name.split("::")[1]
        me = ranks.index(self.rank)
        with torch.no_grad():
            if base in ("allreduce_", "allreduce_coalesced_", "reduce_"):
                for tensor in given["tensors"]:
                    _sum(tensor, given["reduce_op"], len(ranks))
            elif base == "broadcast_":
                tensors = given["tensors"]
                self._from_rank_0(tensors, [tensors] * len(ranks), ranks, given["root_rank"])
            elif base == "scatter_":
                # on the root only
                parts = given["input_tensors"][0] if given["input_tensors"] else None
                self._from_rank_0(given["output_tensors"], parts, ranks, given["root_rank"])
            elif base in ("allgather_", "gather_"):
                for outputs, tensor in zip(given["output_tensors"], given["input_tensors"], strict=False):
                    for output in outputs:
                        _copy(output, tensor)
            elif base == "_allgather_base_":
                given["output_tensor"].view(len(ranks), -1).copy_(given["input_tensor"].reshape(1, -1))
            elif base == "allgather_into_tensor_coalesced_":
                for output, tensor in zip(given["outputs"], given["inputs"], strict=True):
                    output.view(len(ranks), -1).copy_(tensor.reshape(1, -1))
            elif base == "_reduce_scatter_base_":
                own = given["input_tensor"].reshape(len(ranks), -1)[me]
                _sum(_copy(given["output_tensor"], own), given["reduce_op"], len(ranks))
            elif base == "reduce_scatter_":
                for output, parts in zip(given["output_tensors"], given["input_tensors"], strict=True):
                    _sum(_copy(output, parts[me]), given["reduce_op"], len(ranks))
            elif base == "alltoall_":
                for output in given["output_tensors"]:
                    _copy(output, given["input_tensors"][me])
            elif base == "alltoall_base_":
                sent = _parts(given["input"], given["input_split_sizes"], len(ranks))
                for part in _parts(given["output"], given["output_split_sizes"], len(ranks)):
                    _copy(part, sent[me])

    def _from_rank_0(self, into: list[torch.Tensor], parts: Any, ranks: list[int], root: int) -> None:
        """Record what rank 0 sends to each rank, or on another rank read what was recorded. root:
        rank within the group.

        A group without rank 0 gets nothing: its tensors stay unchanged.
        """
        key = tuple(ranks)
        path = self.folder / f"{ranks[0]}_{ranks[-1]}_{len(ranks)}.{self._sent[key]}.pt"
        self._sent[key] += 1
        if ranks[root] != 0 or sum(each.nbytes for each in into) > MAX_RECORDED_BYTES:
            return
        if self.rank == 0:
            self.folder.mkdir(exist_ok=True)
            torch.save([_copies(each) for each in parts], path)
            if parts[0] is not into:  # a scatter
                _fill(into, _copies(parts[0]))
        elif path.exists():
            _fill(into, torch.load(path, weights_only=True)[ranks.index(self.rank)])


def _copies(part: Any) -> list[torch.Tensor]:
    return [each.clone() for each in ([part] if isinstance(part, torch.Tensor) else part)]


def _fill(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for tensor, value in zip(into, values, strict=True):
        if value.shape != tensor.shape:
            raise collectives.CollectiveMismatch(
                f"rank 0 sends {list(value.shape)} where this rank expects {list(tensor.shape)}"
            )
        tensor.copy_(value)


def _sum(tensor: torch.Tensor, reduce_op: Any, num_ranks: int) -> None:
    if reduce_op.op() == dist.ReduceOp.SUM and tensor.dtype != torch.bool:
        tensor.mul_(num_ranks)


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Fill `target` with `source`, which is repeated or cut to the size of `target`."""
    flat, wanted = source.reshape(-1), target.numel()
    if flat.numel() == 0:
        target.zero_()
    elif flat.numel() != wanted:
        flat = flat.repeat(-(-wanted // flat.numel()))[:wanted]
        target.copy_(flat.view(target.shape))
    else:
        target.copy_(flat.view(target.shape))
    return target


def _parts(tensor: torch.Tensor, sizes: list[int], num_ranks: int) -> tuple[torch.Tensor, ...]:
    """Return the rows of each rank. Without sizes the parts are equal."""
    return tensor.split(sizes if sizes else [tensor.shape[0] // num_ranks] * num_ranks)


def answer_for_all_ranks(folder: Path, rank: int) -> None:
    """Remove the other ranks from the groups of this process. Call it before init_process_group."""
    collectives.answers = Alone(folder, rank)
