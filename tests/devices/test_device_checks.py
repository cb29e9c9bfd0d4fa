"""Which modules still ask what kind of device they run on, each with the reason. All other modules ask devices.current()."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.sources import nodes_of

PIPELINE = Path(__file__).resolve().parents[2] / "pipeline"
APART = ("devices", "extras")  # the answers, and the shadow GPU, which takes torch.cuda's place
# Module -> how many checks it has at most, and why they stay.
EXCEPTIONS = {
    "checkpoint/archives.py": (1, "an archive of tensors on another device is refused"),
    "checkpoint/random_state.py": (1, "the name of a field of the file, which runs have on disk"),
    "config/planner.py": (1, "the values of a key; config is checked without torch"),
    "config/training.py": (1, "the values of a key; config is checked without torch"),
    "config/tables.py": (1, "a method of torch.nn.Module, whose name no table may have"),
    "sharding/torchrec/sharder.py": (1, "TorchRec's list of sharding types for GPUs, on every device"),
    "sharding/torchrec/sharding.py": (1, "TorchRec's codecs for GPUs, on every device"),
    "training/preflight.py": (2, "it checks a job without torch; hardware may be somewhere else"),
}
DEVICES = ("cpu", "cuda")


def checks_of(file: Path) -> list[str]:
    return [f"{file.name}:{getattr(node, 'lineno', 0)}" for node in nodes_of(file) if _is_check(node)]


def _is_check(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="is_cuda" | "is_cpu" | "is_xpu"):
            return True
        case ast.Attribute(attr="type", value=ast.Attribute(attr="device") | ast.Name(id="device")):
            return True
        case ast.Attribute(attr="cuda", value=ast.Name(id="torch")):
            return True
        case ast.Compare(left=left, comparators=[right]):
            return "device" in ast.unparse(left) and any(
                isinstance(each, ast.Constant) and each.value in DEVICES for each in ast.walk(right)
            )
        case ast.Constant(value=str(text)):
            return text == "cuda" or ("nccl" in text and " " not in text)
    return False


def _files() -> Iterator[Path]:
    return (file for file in PIPELINE.rglob("*.py") if file.relative_to(PIPELINE).parts[0] not in APART)


def test_no_module_asks_for_the_kind_of_a_device_except_these() -> None:
    found = {str(file.relative_to(PIPELINE)): places for file in _files() if (places := checks_of(file))}
    assert found.keys() == EXCEPTIONS.keys()
    assert {module: places for module, places in found.items() if len(places) > EXCEPTIONS[module][0]} == {}


def test_each_way_to_ask_is_seen(tmp_path: Path) -> None:
    ways = [
        "context.device.type",
        "device.type == 'xpu'",
        "weight.is_cuda",
        "torch.cuda.synchronize()",
        "name == 'cuda'",
        "backend = 'nccl'",
        "hardware.compute_device == 'cpu'",
        "device_type not in ('cpu', 'auto')",
    ]
    for number, way in enumerate(ways):
        file = tmp_path / f"{number}.py"
        file.write_text(way)
        assert checks_of(file), way
    file = tmp_path / "others.py"
    file.write_text("tensor.cpu()\nrows = torch.zeros(2, device='cpu')\n'''On nccl no rank blocks.'''")
    assert not checks_of(file)
