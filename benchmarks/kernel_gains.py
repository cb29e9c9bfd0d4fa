"""Measure what each CPU kernel gains, as a share of a step's CPU time:

    OMP_NUM_THREADS=1 python -m benchmarks.kernel_gains [--presets quickstart multi_hot] [--without dots tables]

One process holds the trainer with all kernels, twice, and one trainer for each kernel that is left out. They train the
same batches in short runs, one after the other. A gain is the median of the runs' ratios to the second trainer with
all kernels, so it hardly depends on what else the machine does; the gain of the first one (`all`) is the noise.
A kernel stays if it gains 8 % on two of the presets (docs/adr/0065-cut-what-does-not-pay.md).
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from pipeline.devices.cpu.process import limit_openmp_spin, use_huge_pages

limit_openmp_spin()  # as train does, before torch is imported
use_huge_pages()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.reader import cpu_name  # noqa: E402
from benchmarks.step_models import PRESETS, Timed, draw, our_loop  # noqa: E402
from pipeline.devices.cpu.process import keep_freed_memory  # noqa: E402
from pipeline.runtime.process.distributed import DistributedContext  # noqa: E402

BUILD, SHARDED, SHARDER = (
    "pipeline.training.sharded_model",
    "pipeline.training.sharded_model",
    "pipeline.sharding.torchrec.sharder",
)
JOIN = {f"{SHARDED}.join_lookups_to_products": 0}
# By kernel: the functions that are replaced, and what they return instead.
WITHOUT: dict[str, dict[str, object]] = {
    "all": {},
    "dots": {"pipeline.models.layers.interaction.multiplies_rows": False},
    "stacks": {"pipeline.extras.narrow_stacks.stack.speed_up_stacks": 0},
    "join": JOIN,
    "fused_lookup": {f"{SHARDER}._lookup_of_all": None, **JOIN},
    "tables": {f"{SHARDER}.speed_up_cpu_tables": 0},
    "same": {},
}
FIVE = ("quickstart", "kaggle_16", "kaggle_64", "dlrmv2", "multi_hot")


def _returning(value: object) -> Callable[..., object]:
    return lambda *_, **__: value


@contextmanager
def without(kernel: str) -> Iterator[None]:
    with ExitStack() as stack:
        for place, value in WITHOUT[kernel].items():
            stack.enter_context(patch(place, _returning(value)))
        yield


@dataclass
class Side:
    kernel: str
    run: Callable[[int], Timed]
    cpu_ms: list[float] = field(default_factory=list)

    def turn(self, steps: int) -> None:
        with without(self.kernel):
            before = time.process_time()
            timed = self.run(steps)
            self.cpu_ms.append(1e3 * (time.process_time() - before) / timed.num_steps)


def run_preset(name: str, precision: str, kernels: list[str], rounds: int, steps: int) -> list[Side]:
    context = DistributedContext(0, 1, 0, 1, torch.device("cpu"), "gloo")
    raw, sides = draw(PRESETS[name], 0), []
    for kernel in ["all", *kernels, "same"]:
        with without(kernel):
            run = our_loop(PRESETS[name], raw, context, [f"trainer.precision={precision}"])
            run(3)  # compiles, builds, warms
        sides.append(Side(kernel, run))
    for _ in range(rounds):
        for side in sides:
            side.turn(steps)
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=FIVE)
    parser.add_argument("--without", nargs="+", default=["stacks", "dots", "join", "fused_lookup", "tables"])
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    keep_freed_memory(1)
    print(f"{cpu_name()}, torch {torch.__version__}, {options.precision}, {torch.get_num_threads()} thread(s)")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for preset in options.presets:
            sides = run_preset(preset, options.precision, options.without, options.rounds, options.steps)
            for side in sides:
                gains = [100 * (1 - base / ms) for base, ms in zip(sides[-1].cpu_ms, side.cpu_ms, strict=True)]
                print(
                    f"{preset:<12}without {side.kernel:<14}{statistics.median(side.cpu_ms):8.2f} ms of CPU a step"
                    f"   gain {statistics.median(gains):5.1f} % ({min(gains):.1f} to {max(gains):.1f})",
                    flush=True,
                )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
