"""A shadow GPU: run the GPU program with real numbers on a machine without a GPU, and find its faults.

    from pipeline.extras import shadow

    shadow.activate(num_gpus=2)        # before torch is imported
    with shadow.running() as report:   # a Report, see report.py
        train(...)                     # unchanged: nccl, cuda:k, streams, FBGEMM's lookups for GPUs
    assert not report.problems

    python -m pipeline.extras.shadow train experiment=quickstart hardware=h100_80gb

It needs the CUDA builds of torch and FBGEMM, and no driver. docs/do/gpu.md explains what it proves.
`python -m pipeline.extras.shadow --patches` lists what it changes in torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.extras.shadow.report import Report
from pipeline.extras.shadow.state import CARDS, Patch, settings
from pipeline.runtime.errors import ConfigError, did_you_mean

__all__ = ["CARDS", "Report", "activate", "is_active", "running"]


def is_active() -> bool:
    return settings.is_active


def activate(
    num_gpus: int = 1,
    total_memory_bytes: int | None = None,
    name: str = "h100_80gb",
    untouched_above_bytes: int | None = None,
) -> None:
    """Give this process `num_gpus` simulated GPUs of one kind. Later calls only change the settings.

    Call it before torch is imported. total_memory_bytes: memory per GPU. untouched_above_bytes:
    larger tensors are zeros in memory that is reserved but not touched. Raises ConfigError.
    """
    if name not in CARDS:
        raise ConfigError(f"unknown card {name!r}{did_you_mean(name, CARDS)}; known are {', '.join(CARDS)}")
    settings.num_gpus, settings.card = num_gpus, CARDS[name]
    settings.total_memory_bytes = total_memory_bytes or CARDS[name].total_memory
    settings.untouched_above_bytes = untouched_above_bytes or 1 << 62
    if settings.is_active:
        return
    from pipeline.extras.shadow.stubs import load_libraries

    shim = load_libraries()
    import torch

    build = f"torch {torch.__version__}" if torch.version.cuda is None else ""
    if not build:
        import fbgemm_gpu  # whose CPU build has no lookups for GPUs

        build = "" if fbgemm_gpu.__variant__ == "cuda" else f"fbgemm {fbgemm_gpu.__version__}"
    if build:
        raise ConfigError(
            f"the shadow GPU needs the CUDA builds of torch and FBGEMM, but {build} is a CPU build; `make install "
            "STACK=gpu VENV=.venv-gpu` installs them, with or without a GPU"
        )
    from pipeline.extras.shadow import device

    device.let_autograd_run(shim)
    for each in patch_list():
        setattr(each.target, each.name, each.value)
    settings.is_active = True


@contextmanager
def running(rank: int = 0) -> Iterator[Report]:
    """Run the context, and the threads that it starts, on the shadow GPUs. Yields the report."""
    from pipeline.extras.shadow import collectives, device, memory, report, streams, tensors

    for module in (streams, memory, collectives, device):
        module.reset()
    made = report.start(rank)
    made.peak_bytes["start"] = max([0, *memory.live.values()])
    with tensors.ShadowMode() as mode:
        tensors.entered.append(mode)
        try:
            yield made
        finally:
            tensors.entered.remove(mode)


def patch_list() -> list[Patch]:
    """Return every change to torch, TorchRec and FBGEMM with its reason, in the order of applying."""
    from pipeline.extras.shadow import collectives, device, lookups, replication, torch_changes

    return [each for module in (device, torch_changes, lookups, collectives, replication) for each in module.patches()]
