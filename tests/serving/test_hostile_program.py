"""dense.pt2 from elsewhere: whatever it holds, loading it runs no code of it, and gives a program or a UserError."""

from __future__ import annotations

import copy
import io
import json
import random
import resource
import signal
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.runtime.errors import DamagedError, UserError
from pipeline.serving.artifact.dense_export import export_layers, program_bytes
from pipeline.serving.scoring.dense_program import load_program
from pipeline.serving.scoring.program_graph import OPERATORS, UnlistedOperatorError
from tests.support.examples import SEED
from tests.support.messages import names

MODEL = "archive/models/model.json"
WEIGHTS = "archive/data/weights/model_weights_config.json"
CPU_SECONDS = 20  # after which a load counts as endless
MEMORY_MB = 256


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(8, 1)
        self.register_buffer("order", torch.arange(8).flip(0))

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        first, second = self.first(torch.cat([dense, pooled], dim=1)).relu().chunk(2, dim=1)
        rows = first.view(dense.shape[0], 2, 4).flatten(1).index_select(1, self.order)  # type: ignore[arg-type]
        return self.last(rows * torch.sigmoid(second)).squeeze(1)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def content() -> bytes:
    torch.manual_seed(0)
    return program_bytes(export_layers(Small().eval(), "fp32", 3, 5))


@pytest.fixture(scope="module")
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(6.0).view(2, 3), torch.linspace(-1, 1, 10).view(2, 5)


def _members(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def _zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, value in members.items():
            archive.writestr(name, value)
    return buffer.getvalue()


def _edited(content: bytes, edit: Callable[[dict[str, Any]], None], member: str = MODEL) -> bytes:
    members = _members(content)
    values = json.loads(members[member])
    edit(values)
    return _zipped({**members, member: json.dumps(values).encode()})


def _graph(model: dict[str, Any]) -> dict[str, Any]:
    return model["graph_module"]["graph"]  # type: ignore[no-any-return]


def test_a_program_gives_the_bits_that_torchs_own_loader_gives(
    content: bytes, inputs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    wanted = torch.export.load(io.BytesIO(content)).module()(*inputs)
    assert torch.equal(load_program(content, "dense.pt2")(*inputs), wanted)


def test_no_text_of_a_program_is_run(content: bytes, inputs: tuple[torch.Tensor, torch.Tensor], tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    code = f"__import__('pathlib').Path({str(canary)!r}).touch()"

    def size(model: dict[str, Any]) -> None:  # torch.export.load gives it to sympy.sympify
        for value in _graph(model)["sym_int_values"].values():
            value["as_expr"]["expr_str"] = f"[{code}, {value['as_expr']['expr_str']}][1]"

    def guard(model: dict[str, Any]) -> None:
        model["guards_code"] = [f"{code} is None"]

    def metadata(model: dict[str, Any]) -> None:
        for node in _graph(model)["nodes"]:
            node["metadata"] = {"stack_trace": code, "source_fn_stack": f"a,{code}", "torch_fn": code}
            node["name"] = f"a={code}"

    wanted = load_program(content, "dense.pt2")(*inputs)
    for edit in (size, guard, metadata):
        assert torch.equal(load_program(_edited(content, edit), "dense.pt2")(*inputs), wanted)
    parts = content_text = json.dumps(json.loads(_members(content)[MODEL]))
    for name in ("pooled", "linear", "p_model_first_weight"):  # torch.export.load makes names of these
        assert f'"name": "{name}"' in parts
        evil = json.dumps(f"{name}={code}")
        content_text = content_text.replace(f'"name": "{name}"', f'"name": {evil}').replace(
            f'"{name}": {{', f"{evil}: {{"
        )
    hostile = _zipped({**_members(content), MODEL: content_text.encode()})
    assert torch.equal(load_program(hostile, "dense.pt2")(*inputs), wanted)
    assert not canary.exists()


UNLISTED = [
    "torch.os.system", "torch.ops.aten.from_file.default", "torch.ops.aten.set_.source_Tensor", "_operator.call",
    "torch.ops.aten.add.out", "torch.ops.aten.add.__class__", "torch.ops.aten.__init__.default", "builtins.eval",
    "torch.ops.aten.item.default", "torch.ops.higher_order.cond", "#extension", "_operator.pow", "math.factorial",
]  # fmt: skip


def test_operators_that_are_not_listed_are_refused_by_name(content: bytes) -> None:
    for target in UNLISTED:

        def edit(model: dict[str, Any], target: str = target) -> None:
            _graph(model)["nodes"][-1]["target"] = target

        with pytest.raises(UnlistedOperatorError, match=names(f"{target} program_graph.py")):
            load_program(_edited(content, edit), "dense.pt2")


def test_all_listed_operators_exist_in_this_torch() -> None:
    assert not [name for name in OPERATORS if not hasattr(torch.ops.aten, name)]


def test_members_that_layers_do_not_have_are_refused(content: bytes) -> None:
    members = _members(content)
    pickled = io.BytesIO()
    torch.save((torch.zeros(1),), pickled)
    library = "archive/data/aotinductor/m/data/weights/weight_0/m.wrapper.so"
    hostile = {
        "a library": _zipped({**members, library: b"\x7fELF"}),
        "an object": _zipped({**members, "archive/data/constants/opaque_obj_0": b"x"}),
        "sample inputs": _zipped({**members, "archive/data/sample_inputs/model.pt": pickled.getvalue()}),
        "a folder above": _zipped({**members, "../data/weights/weight_0": b"x"}),
        "compressed": _zipped(members, zipfile.ZIP_DEFLATED),
        "two roots": _zipped({**members, "other/models/model.json": members[MODEL]}),
        "no model": _zipped({name: value for name, value in members.items() if name != MODEL}),
        "no archive": content[:-30],
        "deep JSON": _zipped({**members, MODEL: b"[" * 100_000}),
        "many values": _zipped({**members, MODEL: b"[" + b"0," * 3_000_000 + b"0]"}),
    }
    for what, changed in hostile.items():
        with pytest.raises(DamagedError):
            load_program(changed, "dense.pt2")
            raise AssertionError(what)


def test_tensors_that_the_archive_does_not_hold_are_refused(content: bytes) -> None:
    def entry(key: str, value: object) -> Callable[[dict[str, Any]], None]:
        def edit(config: dict[str, Any]) -> None:
            found = next(iter(config["config"].values()))
            (found if key in found else found["tensor_meta"])[key] = value

        return edit

    for key, value in {
        "use_pickle": True, "path_name": "../../models/model.json", "sizes": [{"as_int": 1 << 40}, {"as_int": 1 << 40}],
        "strides": [{"as_int": 0}, {"as_int": 1 << 50}], "storage_offset": {"as_int": 7}, "dtype": 8,
        "device": {"type": "cuda", "index": 0},
    }.items():  # fmt: skip
        with pytest.raises(DamagedError):
            load_program(_edited(content, entry(key, value), WEIGHTS), "dense.pt2")
            raise AssertionError(key)


def test_a_program_that_would_need_more_memory_than_the_limit_is_refused(content: bytes) -> None:
    def expand(model: dict[str, Any]) -> None:
        graph = _graph(model)
        (last,) = graph["outputs"]
        name = last["as_tensor"]["name"]
        repeated = {
            "target": "torch.ops.aten.repeat.default", "metadata": {}, "outputs": [{"as_tensor": {"name": "more"}}],
            "inputs": [
                {"name": "self", "arg": {"as_tensor": {"name": name}}, "kind": 1},
                {"name": "repeats", "arg": {"as_ints": [1 << 36]}, "kind": 1},
            ],
        }  # fmt: skip
        graph["nodes"].append(repeated)
        graph["outputs"] = [{"as_tensor": {"name": "more"}}]

    def take_apart(model: dict[str, Any]) -> None:
        for node in _graph(model)["nodes"]:
            for given in node["inputs"]:
                if node["target"] == "torch.ops.aten.chunk.default" and given["name"] == "chunks":
                    given["arg"] = {"as_int": 1 << 40}

    for edit in (expand, take_apart):
        with pytest.raises(DamagedError):
            load_program(_edited(content, edit), "dense.pt2")


HOSTILE: list[Any] = [
    None, True, -1, 0, 1, 1 << 31, 1 << 62, 1 << 70, 1e308, "", "x" * 5000, "__import__('os')", "linear", [], {}, [[]], {"": 0},
    {"as_int": 1 << 62}, {"as_tensor": {"name": "pooled"}}, {"as_none": True}, {"as_string": "a"}, {"as_float": "NaN"},
    {"as_ints": [1 << 40] * 4}, {"as_scalar_type": 9}, {"as_custom_obj": {"name": "a", "class_fqn": "os.system"}},
    {"as_operator": "torch.os.system"}, {"as_device": {"type": "cuda", "index": 0}}, "torch.ops.aten.mul.Tensor",
    "torch.ops.aten.matmul.default", "torch.ops.aten.expand.default", "torch.ops.aten.cumsum.default", "_operator.mul",
]  # fmt: skip


def _mutate(value: Any, rng: random.Random) -> Any:
    """Change one place below `value`, chosen by a walk down from it."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.05:
        return copy.deepcopy(rng.choice(HOSTILE))
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    action = rng.random()
    if action < 0.03:
        del value[key]
    elif action < 0.06 and isinstance(value, list):
        value.append(copy.deepcopy(value[key]))
    elif action < 0.09 and isinstance(value, dict):
        value[rng.choice(["x", "as_int", "as_tensor", "name", "kind"])] = value.pop(key)
    elif action < 0.12 and isinstance(value, list):
        rng.shuffle(value)
    else:
        value[key] = _mutate(value[key], rng)
    return value


def _mutated(members: dict[str, bytes], rng: random.Random) -> bytes:
    if rng.random() < 0.2:  # bits of the file
        changed = bytearray(_zipped(members))
        for _ in range(rng.choice([1, 1, 8])):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    member = MODEL if rng.random() < 0.8 else WEIGHTS
    values = json.loads(members[member])
    if member == MODEL:  # most of the text is sizes and notes that are not read
        graph = _graph(values)
        part = rng.choice(
            [graph["nodes"], graph["nodes"], graph["nodes"], graph, values["graph_module"]["signature"], values]
        )
    else:
        part = values
    for _ in range(rng.choice([1, 1, 2, 5])):
        _mutate(part, rng)
    return _zipped({**members, member: json.dumps(values).encode()})


@contextmanager
def _stopped_after(cpu_seconds: int) -> Iterator[None]:
    def stop(*args: object) -> None:
        raise AssertionError(f"not done after {cpu_seconds} CPU seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize("count", [60, pytest.param(2_000, marks=pytest.mark.campaign)])
def test_mutated_programs_load_or_are_refused(
    content: bytes, inputs: tuple[torch.Tensor, torch.Tensor], count: int
) -> None:
    members, found, slowest = _members(content), {"loaded": 0, "refused": 0}, 0.0
    load_program(content, "dense.pt2")(*inputs)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(SEED, SEED + count):
        changed, started = _mutated(members, random.Random(seed)), time.process_time()
        with _stopped_after(CPU_SECONDS):
            try:
                load_program(changed, "dense.pt2")(*inputs)
                found["loaded"] += 1
            except (UserError, RuntimeError, IndexError):  # the last two: Predictor.load tries two rows
                found["refused"] += 1
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error!r}") from error
        slowest = max(slowest, time.process_time() - started)
    more_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{count} mutations: {found}, slowest {slowest:.2f} CPU seconds, {more_mb:.0f} MB more")
    assert found["refused"] and more_mb < MEMORY_MB
