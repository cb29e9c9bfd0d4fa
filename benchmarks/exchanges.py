"""List what the ranks of one host exchange in a training step, by model, and what layers' exchanges cost through gloo:

    python -m benchmarks.exchanges [--models dlrm deepfm dcnv2 wide_deep] [--ranks 2] [--rounds 8] [--output exchanges.json]

Each model trains on batches in memory by the product's own Trainer, as a calibration's jobs do, one thread a rank, in two ways that
take turns in the same processes: as it is, and with the exchanges of batch norms by gloo. Milliseconds a step are the
clock's and CPU-milliseconds are of all ranks, medians over the rounds; the ratios are medians of each round's own. Some steps of the first way list
every collective: calls a step, bytes that a rank hands in, and microseconds that a call takes on rank 0, waits for the other rank included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from pipeline.devices.cpu.process import limit_openmp_spin, use_huge_pages

ROWS = [
    1460, 583, 100_000, 100_000, 305, 24, 12517, 633, 3, 93145, 5683, 100_000, 3194, 27, 14992, 100_000, 10, 5652, 2173,
]  # fmt: skip
ARCHES = {"dense_arch_layer_sizes": [64, 32, 16], "over_arch_layer_sizes": [64, 32, 1]}
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": ARCHES,
    "dlrm_dcn": ARCHES | {"dcn_num_layers": 2, "dcn_low_rank_dim": 32},
    "deepfm": {},
    "dcnv2": {},
    "wide_deep": {"batch_norm": True},
}
BATCH = 1024  # of a rank
STEPS = 16  # of a round
GLOO = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all_single",
    "reduce_scatter_tensor",
    "broadcast",
    "barrier",
    "all_gather_object",
)
LIBRARIES = ("torch", "contextlib.py", "host_exchange.py", "exchanges.py")  # no caller by which one knows an exchange


@dataclass
class Exchange:
    """One kind of call in a step."""

    way: str  # shared or gloo
    call: str
    caller: str
    calls_a_step: float
    bytes_a_call: int
    us_a_call: float


@dataclass
class Found:
    model: str
    ms: float
    gloo_ms: float
    clock_ratio: float
    cpu_ms: float
    gloo_cpu_ms: float
    cpu_ratio: float
    exchanges: list[Exchange]


class Recorder:
    """Notes each collective call of this process: its time, its bytes and whose it is."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        from pipeline.devices.cpu.host_exchange import HostExchange

        with ExitStack() as stack:
            for name in GLOO:
                stack.enter_context(patch.object(dist, name, self._wrapped("gloo", name, getattr(dist, name))))
            for name in ("post", "take"):
                wrapped = self._wrapped("shared", name, getattr(HostExchange, name))
                stack.enter_context(patch.object(HostExchange, name, wrapped))
            yield

    def _wrapped(self, way: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = function(*words, **named)
            self.calls[way, name, _caller()].append((_num_bytes(words), time.perf_counter() - began))
            return result

        return call

    def exchanges(self, steps: int) -> list[Exchange]:
        found = []
        for (way, call, caller), calls in sorted(self.calls.items()):
            us = 1e6 * statistics.median(seconds for _, seconds in calls)
            num_bytes = statistics.median_low([size for size, _ in calls])
            found.append(Exchange(way, call, caller, len(calls) / steps, num_bytes, us))
        return found


def _caller() -> str:
    frame = sys._getframe(2)
    while any(name in frame.f_code.co_filename for name in LIBRARIES) and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"


def _num_bytes(values: Any) -> int:
    if isinstance(values, torch.Tensor):
        return values.nbytes
    return sum(map(_num_bytes, values)) if isinstance(values, list | tuple) else 0


@contextmanager
def norms_by_gloo() -> Iterator[None]:
    """In this context batch norms exchange as they did before there was all_gather in shared memory."""
    from pipeline.models.layers import batch_norm

    def all_gather(local: torch.Tensor) -> torch.Tensor:
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, local)
        return torch.stack(gathered)

    with patch.object(batch_norm, "all_gather", all_gather), patch.object(batch_norm, "all_reduce", dist.all_reduce):
        yield


def run_rank(rank: int, ranks: int, model: str, rounds: int, folder: str) -> None:
    """Writes a Found into the folder, on rank 0."""
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    from pipeline.devices.cpu.process import keep_freed_memory
    from pipeline.extras.calibration.jobs import InMemoryTraining, SmallJob
    from pipeline.runtime.process.distributed import DistributedContext

    keep_freed_memory(ranks)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    context = DistributedContext(rank, ranks, rank, ranks, torch.device("cpu"), "gloo")
    job = SmallJob(ROWS, [1] * len(ROWS), dim=16, batch=BATCH, kind=model, model=MODELS[model])
    training = InMemoryTraining(job, context)
    times: dict[str, list[tuple[float, float]]] = {"shared": [], "gloo": []}
    for _ in range(2 + rounds):
        for way, found in times.items():
            with norms_by_gloo() if way == "gloo" else nullcontext():
                began = time.process_time()
                seconds = training._round(STEPS)
                used = torch.tensor((time.process_time() - began) / (STEPS + 1))
            dist.all_reduce(used)
            found.append((1e3 * seconds, 1e3 * float(used)))
    recorder = Recorder()
    with recorder.recording():
        training._round(STEPS)
    if rank == 0:
        shared, gloo = times["shared"][2:], times["gloo"][2:]
        medians = [statistics.median(way[column] for way in each) for column in (0, 1) for each in (shared, gloo)]
        ratios = [
            statistics.median(slow[column] / fast[column] for fast, slow in zip(shared, gloo, strict=True))
            for column in (0, 1)
        ]
        found_here = Found(model, *medians[:2], ratios[0], *medians[2:], ratios[1], recorder.exchanges(STEPS + 1))
        Path(folder, "found.json").write_text(json.dumps(asdict(found_here)))
    dist.destroy_process_group()


def measure(model: str, ranks: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (ranks, model, rounds, folder), nprocs=ranks)
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
    return found


def show(found: dict[str, Any]) -> str:
    lines = [
        f"{found['model']}: {found['ms']:.2f} ms a step, norms by gloo {found['gloo_ms']:.2f}: {found['clock_ratio']:.2f}x by the "
        f"clock; CPU {found['cpu_ms']:.2f} and {found['gloo_cpu_ms']:.2f} ms: {found['cpu_ratio']:.2f}x"
    ]
    for each in found["exchanges"]:
        lines.append(
            f"  {each['way']:7}{each['call']:24}{each['caller']:52}{each['calls_a_step']:6.2f} a step"
            f"{each['bytes_a_call']:>10,} bytes{each['us_a_call']:>9.0f} us"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["dlrm", "deepfm", "dcnv2", "wide_deep"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    limit_openmp_spin()  # as train does, before torch is imported by the ranks
    use_huge_pages()
    found = []
    for model in options.models:
        found.append(measure(model, options.ranks, options.rounds))
        print(show(found[-1]), flush=True)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
