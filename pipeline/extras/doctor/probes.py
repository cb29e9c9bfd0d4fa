"""Run one operation of a library and compare the result with arithmetic done by hand.

`python -m pipeline.extras.doctor.probes <name>` prints one line and exits with 0, or fails as the
library fails. doctor runs each in a separate process, so that a crash inside a shared library is a
finding.
"""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import timedelta

TIMEOUT_S = 15


def lookup(device_type: str) -> str:
    """Probe FBGEMM: pooled lookup forward, and backward with the fused SGD update."""
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    cuda = device_type == "cuda"
    location = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if cuda else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(10, 4, *location)],
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=0.5,
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
    )
    (weights,) = tables.split_embedding_weights()
    weights.data.copy_(torch.arange(40.0).view(10, 4))
    before = weights.detach().cpu().clone()
    ids, offsets = torch.tensor([1, 2, 7], device=weights.device), torch.tensor([0, 2, 3], device=weights.device)
    pooled = tables(indices=ids, offsets=offsets)
    _compare("forward", pooled.detach().cpu(), torch.stack([before[1] + before[2], before[7]]))
    pooled.sum().backward()
    expected = before.clone()
    expected[[1, 2, 7]] -= 0.5
    _compare("backward", weights.detach().cpu(), expected)
    return f"forward and backward agree with arithmetic on {device_type}"


def all_to_all(backend: str) -> str:
    """Probe torch.distributed: two processes exchange their numbers."""
    import torch
    import torch.multiprocessing as multiprocessing

    if backend == "nccl" and torch.cuda.device_count() < 2:
        return "needs 2 GPUs, but there is 1: not tested"
    with tempfile.TemporaryDirectory() as folder:
        # Forked, because a spawned process would import torch again. Nothing has used a GPU or
        # started a thread yet.
        multiprocessing.start_processes(_exchange, (backend, f"{folder}/store"), nprocs=2, start_method="fork")
    return f"2 ranks exchanged over {backend}"


def _exchange(rank: int, backend: str, store: str) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    sent = torch.tensor([10.0 * rank, 10.0 * rank + 1], device=device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    _compare("all-to-all", received.cpu(), torch.tensor([float(rank), 10.0 + rank]))
    dist.destroy_process_group()


def gpus() -> str:
    """Return what torch sees of the GPUs that the driver lists, and whether FBGEMM has kernels for
    each.
    """
    import torch

    from pipeline.devices.cuda import Cuda
    from pipeline.extras.doctor.cli.doctor import MACHINE_CODE, _minor, _version, has_machine_code

    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no GPU: {Cuda.why_absent()}")
    seen = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    fbgemm = _version("fbgemm-gpu")
    for gpu in seen:
        if not has_machine_code((gpu.major, gpu.minor), fbgemm):
            codes = ", ".join(f"sm_{code}" for code in MACHINE_CODE[_minor(fbgemm)])
            raise RuntimeError(
                f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}, but fbgemm {fbgemm} "
                f"has kernels only for {codes}"
            )
    return ", ".join(f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in seen)


def compiler(device_type: str) -> str:
    """Probe torch.compile, which needs Triton, a C compiler and Python's headers.
    trainer.compile=true uses it.
    """
    import torch

    numbers = torch.arange(4.0, device=device_type)
    _compare("torch.compile", torch.compile(lambda x: x * 2 + 1)(numbers).cpu(), torch.tensor([1.0, 3.0, 5.0, 7.0]))
    return f"torch.compile works on {device_type}"


def _compare(what: str, found: object, expected: object) -> None:
    import torch

    assert isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
    if not torch.equal(found, expected):
        raise RuntimeError(f"{what} gave {found.tolist()}, not {expected.tolist()}")


PROBES = {
    "lookup_cpu": lambda: lookup("cpu"),
    "lookup_cuda": lambda: lookup("cuda"),
    "all_to_all_gloo": lambda: all_to_all("gloo"),
    "all_to_all_nccl": lambda: all_to_all("nccl"),
    "gpus": gpus,
    "compiler": lambda: compiler("cuda"),
}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(PROBES[sys.argv[1]]())
