"""Implement NCCL's process groups with gloo: a group for GPU tensors, and a gloo twin for the numbers.

Before each collective the ranks compare operation, dtypes, shapes and sizes. Ranks that differ
would hang on GPUs, or read wrong numbers; here each rank gets an error that names both. After the
group's timeout the error names the missing rank and its last collective. Every collective is in the
report. It runs on a stream of its group; reading its results before waiting is a race.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork, Work
from torch.distributed import device_mesh
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pipeline.extras.shadow import memory, report, streams, tensors
from pipeline.extras.shadow.rules import rule_of
from pipeline.extras.shadow.state import Patch
from pipeline.extras.shadow.tensors import Shadow
from pipeline.runtime.storage.private import private_folder

# environment variable: the folder where ranks write their current collective
FOLDER = "SHADOW_GPU_FOLDER"
_GPU_ONLY = "cuda:fake"  # a backend for GPU tensors only, as NCCL is, which transfers nothing

# Operations whose shapes must be equal on all ranks. The sizes of all-to-all are compared pairwise.
_SAME_SHAPE = {"allreduce_", "broadcast_", "reduce_", "_allgather_base_", "_reduce_scatter_base_",
               "allreduce_coalesced_", "allgather_into_tensor_coalesced_"}  # fmt: skip
# a list of all ranks' tensors, and this rank's tensor
_OWN_PART = {"allgather_", "reduce_scatter_"}
_ALSO_READ = {"allreduce_", "broadcast_", "reduce_", "allreduce_coalesced_", "send"}
_POINT_TO_POINT = {"send", "recv_", "recv_any_source_"}


class CollectiveMismatch(RuntimeError):
    """Ranks of one group were about to call different collectives."""


class _Group:
    """An nccl group: its gloo twin, its stream, and the number of its collectives.

    takes_cpu: the group is a gloo group whose only rank has no other ranks (alone.py).
    """

    def __init__(self, twin: dist.ProcessGroup, ranks: list[int], takes_cpu: bool = False) -> None:
        self.twin, self.ranks, self.done, self.takes_cpu = twin, ranks, 0, takes_cpu
        self.stream = streams.Stream()
        streams.name(self.stream, f"NCCL's stream of ranks {ranks}")


answers: Any = None  # alone.Alone, if this rank runs without other ranks
_by_group: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary()
_pending: list[tuple[Work, streams.Clock]] = []  # works that may still be waited for, newest last
_init, _new, _backend = dist.init_process_group, dist.new_group, dist.get_backend
_destroy, _work_wait = dist.destroy_process_group, Work.wait


def reset() -> None:
    _pending.clear()
    _by_group.clear()


# ---- one collective ----


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation of c10d. GPU tensors use the twin; gloo groups are unchanged."""
    flat, spec = tree_flatten((args, kwargs))
    given = [each for each in flat if isinstance(each, torch.Tensor)]
    on_gpu = [each for each in given if isinstance(each, Shadow)]
    boxed = next((e for e in flat if isinstance(e, torch.ScriptObject) and "ProcessGroup" in str(e._type())), None)
    group = dist.ProcessGroup.unbox(boxed) if boxed is not None else None
    known = _by_group.get(group) if group is not None else None
    rule = rule_of(func)
    if known is None or (not given and rule.base != "barrier"):
        if on_gpu:
            raise RuntimeError(f"{rule.base}: gloo got tensors on {on_gpu[0].device}; nccl's groups take them")
        return func(*args, **kwargs)
    if len(on_gpu) < len(given) and not known.takes_cpu:
        cpu = next(each for each in given if not isinstance(each, Shadow))
        text = (
            f"{rule.base}: nccl got a tensor of shape {list(cpu.shape)} on cpu (No backend type associated "
            "with device type cpu)"
        )
        report.current().find("device", text)
        raise RuntimeError(text)
    _note(rule.base, known, given)
    if answers is None and rule.base not in _POINT_TO_POINT:
        _compare(rule.base, known, given, flat)
    return _on_twin(func, rule, known, (flat, spec), boxed, given)


def _on_twin(func: Any, rule: Any, known: _Group, call: tuple[Any, Any], boxed: Any, given: list[Any]) -> Any:
    flat, spec = call
    out: Any
    # gloo does not sum bf16 everywhere and takes no GPU tensors. Other numbers are passed
    # unchanged.
    inner = [each.inner if isinstance(each, Shadow) else each for each in flat]
    inner = [known.twin.boxed() if each is boxed else each for each in inner]
    args, kwargs = tree_unflatten(inner, spec)
    if answers is not None and rule.base == "alltoall_base_":
        # it returns only a work, and torch refuses a rank that sends nothing
        out = known.twin.barrier().boxed()
    elif answers is None and rule.base in _OWN_PART and _is_uneven(args[:2]):
        out = _uneven(rule.base, args[0], args[1], known.twin)
    else:
        out = func(*args, **kwargs)
    if answers is not None:
        answers.fill(func, args, kwargs, known.ranks)
    if known.takes_cpu:
        return out
    blocks = [(memory.block_of(each.inner, each.device.index), each.shape) for each in given]
    current = streams.current_stream()
    known.stream.follow(current)  # NCCL starts after the earlier work of its stream
    # Each operation of c10d writes into its first argument, which its schema does not state.
    outputs = {id(each) for each in tree_flatten(tree_unflatten(flat, spec)[0][0])[0]}
    pairs = list(zip(blocks, given, strict=True))
    reads = [block for block, tensor in pairs if id(tensor) not in outputs or rule.base in _ALSO_READ]
    writes = [block for block, tensor in pairs if id(tensor) in outputs and rule.base != "send"]
    streams.operation(f"c10d::{rule.base}", reads, writes, known.stream.number)
    for block, _ in blocks:
        # the group keeps its tensors until the work is done
        block.recorded.add(known.stream.number)
    works = [each for each in tree_flatten(out)[0] if isinstance(each, torch.ScriptObject)]
    for each in works:
        _pending.append((Work.unbox(each), streams.clock_of(known.stream.number)))
        del _pending[:-256]
    by_data = {(e.inner.data_ptr(), e.shape): e for e in given}

    def as_given(value: Any) -> Any:
        return by_data.get((value.data_ptr(), value.shape), value) if isinstance(value, torch.Tensor) else value

    return tree_map(as_given, out)


def _is_uneven(lists: Any) -> bool:
    return len({each.numel() for each in tree_flatten(lists)[0]}) > 1


def _uneven(base: str, outputs: Any, inputs: Any, twin: dist.ProcessGroup) -> tuple[Any, Any]:
    """Gather parts of different sizes, or sum and scatter them. gloo does not support this."""
    if base == "allgather_":
        parts, own = outputs[0], inputs[0].reshape(-1)
        everyone = own.new_zeros(len(parts), max(each.numel() for each in parts))
        padded = torch.zeros_like(everyone[0])
        padded[: len(own)] = own
        dist.all_gather(list(everyone), padded, group=twin)
        for part, received in zip(parts, everyone, strict=True):
            part.copy_(received[: part.numel()].view_as(part))
    else:
        sums = torch.cat([each.reshape(-1) for each in inputs[0]])
        dist.all_reduce(sums, group=twin)
        own = sums.split([each.numel() for each in inputs[0]])[dist.get_rank(twin)]
        outputs[0].copy_(own.view_as(outputs[0]))
    return outputs, twin.barrier().boxed()


def _wait(self: Work, *args: Any, **kwargs: Any) -> Any:
    """Replace work.wait(): the current stream waits for the group's stream."""
    done = _work_wait(self, *args, **kwargs)
    for index, (work, clock) in enumerate(_pending):
        if work is self:
            streams.current_stream().learn(clock)
            del _pending[index]
            break
    return done


# ---- do all ranks do the same? ----


def _note(base: str, known: _Group, given: list[Any]) -> None:
    """Add the collective to the report, and write this rank's position for other ranks."""
    entry = {
        "op": base,
        "ranks": known.ranks,
        "number": known.done,
        "place": report.place(),
        "tensors": [[list(each.shape), str(each.dtype).removeprefix("torch.")] for each in given],
        "bytes": sum(each.numel() * each.element_size() for each in given),
    }
    report.current().collectives.append(entry)
    known.done += 1
    path = _folder() / f"rank{dist.get_rank()}.json"
    path.with_suffix(".new").write_text(json.dumps(entry))
    path.with_suffix(".new").rename(path)


def _folder() -> Path:
    """Return the folder that all ranks of a program on this machine share."""
    name = f"shadow-{os.getuid()}-{os.environ.get('TORCHELASTIC_RUN_ID', '')}{os.environ.get('MASTER_PORT', '')}"
    return Path(private_folder(os.environ.get(FOLDER) or os.path.join(tempfile.gettempdir(), name)))


def _compare(base: str, known: _Group, given: list[Any], flat: list[Any]) -> None:
    """Collective on the twin: raise CollectiveMismatch on all ranks if their collectives differ."""
    size = len(known.ranks)
    if size == 1:
        return
    mine = report.current().collectives[-1]
    sends, expects = _splits(base, given, flat, size)
    row = [_digest(base, mine["tensors"]), *sends, *expects]
    everyone = [torch.empty(len(row), dtype=torch.int64) for _ in known.ranks]
    try:
        dist.all_gather(everyone, torch.tensor(row, dtype=torch.int64), group=known.twin)
    except RuntimeError as error:
        raise CollectiveMismatch(_missing(mine, known, error)) from error
    rows = torch.stack(everyone)
    sent, expected = rows[:, 1 : 1 + size], rows[:, 1 + size :]
    if bool((rows[:, 0] == rows[0, 0]).all()) and bool((sent == expected.T).all()):
        return
    entries: list[Any] = [None] * size
    dist.all_gather_object(entries, mine, group=known.twin)
    text = "ranks differ in a collective, which would hang on GPUs: " + "; ".join(
        f"rank {rank}: {_described(entry)}" for rank, entry in zip(known.ranks, entries, strict=True)
    )
    report.current().find("collective", text)
    raise CollectiveMismatch(text)


def _splits(base: str, given: list[Any], flat: list[Any], size: int) -> tuple[list[int], list[int]]:
    """Return how many rows this rank sends to each rank, and expects from each rank (all-to-all)."""
    if base == "alltoall_base_":
        into, out_of = given[0], given[1]
        lists = [each for each in flat[2:] if isinstance(each, int)]
        # The two lists of splits are flattened. An empty list means equal parts.
        rows = (int(out_of.shape[0]), int(into.shape[0]))
        if len(lists) >= 2 * size:
            return lists[size : 2 * size], lists[:size]
        return [rows[0] // size] * size, [rows[1] // size] * size
    if base == "alltoall_":
        half = len(given) // 2
        return [int(t.numel()) for t in given[half:]], [int(t.numel()) for t in given[:half]]
    return [0] * size, [0] * size


def _digest(base: str, shapes: list[Any]) -> int:
    """Return a number that is equal on all ranks whose collectives fit each other."""
    if base in _OWN_PART:  # the list has each rank's size; NCCL accepts different sizes
        parts = shapes[:-1] if base == "allgather_" else shapes[1:]
    else:
        parts = shapes if base in _SAME_SHAPE else sorted({dtype for _, dtype in shapes})
    return int.from_bytes(repr((base, parts)).encode(), "big") % (2**61 - 1)


def _described(entry: Any) -> str:
    tensors = ", ".join(f"{dtype}{shape}" for shape, dtype in entry["tensors"])
    return f"{entry['op']}({tensors}) as number {entry['number']} of the group, at {entry['place']}"


def _missing(mine: Any, known: _Group, error: Exception) -> str:
    others = []
    for rank in known.ranks:
        path = _folder() / f"rank{rank}.json"
        if rank != dist.get_rank() and path.is_file():
            others.append(f"rank {rank} was last in {_described(json.loads(path.read_text()))}")
    first = str(error).split("\n")[0]
    text = f"a rank of {known.ranks} did not arrive at {_described(mine)}; {'; '.join(others)} ({first})"
    report.current().find("collective", text)
    return text


# ---- groups ----


def _with_twin(group: Any, twin: Any, ranks: list[int], takes_cpu: bool = False) -> Any:
    if isinstance(group, dist.ProcessGroup):
        _by_group[group] = _Group(twin, ranks, takes_cpu)
    return group


def plain_new_group(ranks: Any, timeout: Any, backend: str) -> Any:
    """Call torch's new_group."""
    return _new(ranks, timeout, backend)


def _new_twin(ranks: Any, timeout: Any) -> Any:
    return plain_new_group(ranks, timeout, "gloo") if answers is None else answers.new_group(ranks, timeout)


def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
    """Replace dist.init_process_group. gloo is unchanged; nccl becomes a group for GPU tensors with a gloo twin."""
    if backend not in ("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"):
        _init(backend, *args, **kwargs)
        return
    if device_id is not None:
        tensors.streams_must_have(torch.device("cuda", streams.index_of(device_id)))
    _init(_GPU_ONLY, *args, **kwargs)
    ranks = list(range(dist.get_world_size()))
    timeout = kwargs.get("timeout")
    _with_twin(dist.group.WORLD, _new_twin(None, timeout), ranks)


def new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
    if answers is not None and backend == "gloo":
        group = answers.new_group(ranks, timeout)
        return _with_twin(group, group, list(ranks or range(dist.get_world_size())), takes_cpu=True)
    world_is_gpu = dist.group.WORLD in _by_group
    if backend not in ("nccl", "cuda:nccl") and not (backend in (None, _GPU_ONLY) and world_is_gpu):
        return _new(ranks, timeout, backend, *args, **kwargs)
    kwargs.pop("device_id", None)
    group = _new(ranks, timeout, _GPU_ONLY, *args, **kwargs)
    twin = _new_twin(ranks, timeout)
    members = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []
    return _with_twin(group, twin, members)


def get_backend(group: Any = None) -> str:
    known = _by_group.get(group or dist.group.WORLD)
    return _backend(group) if known is None else "gloo" if known.takes_cpu else "nccl"


def _make_fake(common: Any, options: Any) -> FakeProcessGroup:
    return FakeProcessGroup._create_internal(common.group_rank, common.group_size, options)  # type: ignore[call-arg]


def patches() -> list[Patch]:
    tensors.HANDLERS["c10d"] = run
    if "FAKE" not in dist.Backend._plugins:  # torch registers it only for its tests
        dist.Backend.register_backend("fake", _make_fake, extended_api=True, devices=["cpu", "cuda"])
    why = "NCCL needs GPUs; gloo moves the numbers"
    made = []
    for module in (dist, dist.distributed_c10d, device_mesh):
        made += [
            Patch(module, "init_process_group", init_process_group, why),
            Patch(module, "new_group", new_group, why),
            Patch(module, "get_backend", get_backend, why),
        ]
    why = "the stream that waits for a collective learns its clock"
    made += [Patch(kind, "wait", _wait, why) for kind in (Work, FakeWork)]
    return made
