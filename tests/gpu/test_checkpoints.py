"""Steps that GPUs save and load: host memory holds blocks of them, and nothing that a cache holds is missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.checkpoint import metadata, shards
from pipeline.checkpoint.chains import open_tensors
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.steps import step_path
from pipeline.devices.process_group import init_distributed
from tests.gpu.conftest import Gpus

BLOCK_BYTES = 1 << 20
ROWS, DIM = 41_000, 32  # 5 MiB
MAKE_MEMORY = ("empty", "empty_like", "zeros", "clone", "_to_copy", "_pin_memory")


class HostMemory(TorchDispatchMode):
    """Counts the bytes of host memory that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.made_bytes, self.largest_bytes = 0, 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = operation(*arguments, **(keywords or {}))
        for made in tree_leaves(result) if operation.overloadpacket.__name__ in MAKE_MEMORY else ():
            if isinstance(made, torch.Tensor) and made.is_cpu:
                self.made_bytes += made.nbytes
                self.largest_bytes = max(self.largest_bytes, made.nbytes)
        return result


def _values() -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(5))


def _on_gpu(values: torch.Tensor) -> nn.Embedding:
    return nn.Embedding.from_pretrained(values.cuda(), freeze=False)


def _save_and_load(rank: int, folder: str) -> dict[str, Any]:
    shards.BLOCK_BYTES = metadata.BLOCK_BYTES = BLOCK_BYTES
    context, expected = init_distributed(), _on_gpu(_values())
    found: dict[str, Any] = {}
    for name in ("whole", "asynchronous"):
        saver = Checkpointer(f"{folder}/{name}", expected, None, context, asynchronous=name == "asynchronous")
        with HostMemory() as memory:
            saver.save(1)
            saver.wait()
        found[name] = memory.made_bytes
        saver.close()
    loaded = _on_gpu(torch.zeros(ROWS, DIM))
    with HostMemory() as memory:
        Checkpointer(f"{folder}/whole", loaded, None, context).restore(1)
    found["load"] = memory.largest_bytes
    found["same"] = bool(torch.equal(loaded.weight, expected.weight))
    return found


def test_a_save_makes_two_blocks_of_host_memory_and_a_load_one(gpus: Gpus, tmp_path: Path) -> None:
    (found,), _ = gpus.run(1, _save_and_load, str(tmp_path))
    small = 4096  # numbers that ranks agree on
    assert found["same"]
    assert found["whole"] <= 2 * BLOCK_BYTES + small
    assert found["asynchronous"] <= ROWS * DIM * 4 + 2 * BLOCK_BYTES + small
    assert found["load"] <= BLOCK_BYTES
    for name in ("whole", "asynchronous"):
        tensors = open_tensors(step_path(str(tmp_path / name), 1))
        assert torch.equal(tensors.read("model.weight", [0, 0], [ROWS, DIM]), _values())


UVM = "tables.default.sharding.compute_kernels=[fused_uvm_caching]"
SAVES = ["checkpoint.save_every_steps=1", "checkpoint.keep_last_n=9", "trainer.max_steps=4"]


def stored(run: Path, step: int) -> dict[str, torch.Tensor]:
    tensors = open_tensors(step_path(str(run / "checkpoints"), step))
    shapes = {key: tensors.shape(key) for key in tensors.entries}
    return {key: tensors.read(key, [0] * len(shape), shape) for key, shape in shapes.items()}


@pytest.mark.parametrize("differential", ["false", "true"])
def test_steps_of_cached_tables_hold_what_the_cache_has_changed(
    gpus: Gpus, prepared_clicks: str, tmp_path: Path, differential: str
) -> None:
    """Whole steps and links: each equals the CPU run's at that step."""
    words = ["experiment=quickstart", f"data.path={prepared_clicks}", f"checkpoint.differential={differential}", *SAVES]
    gpus.train(1, words, tmp_path / "cpu", on="cpu")
    gpus.train(1, [*words, UVM], tmp_path / "gpu")
    for step in (1, 2, 4):
        expected, found = stored(tmp_path / "cpu", step), stored(tmp_path / "gpu", step)
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            torch.testing.assert_close(
                found[key], values, atol=1e-5, rtol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
            )
