"""List the parts of a training step that a second thread does not shorten:

    python -m benchmarks.threads [--presets quickstart kaggle_16 kaggle_64] [--precisions fp32 bf16] [--output threads.json]

The same steps run on one thread and on two, each in a process of its own, in turns, under torch's profiler. An operation that takes a ms on one
thread and b on two has max(0, 2 b - a) ms of serial work in it (Amdahl): what neither thread shares, waking the second one included. `serial` is
that in per cent of the step on two threads. An operation that takes longer on two threads than on one counts whole. The profiler's own time
is in each operation. Read it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.profiler import ProfilerActivity, profile

from benchmarks.reader import cpu_name
from pipeline.devices.cpu.process import limit_openmp_spin, use_huge_pages

THREADS = (1, 2)
PYTHON = "Python between operations"


@dataclass(frozen=True)
class Section:
    """Milliseconds a step on one thread and on two; `serial_percent` is of the step on two."""

    preset: str
    precision: str
    name: str
    ms_on_one: float
    ms_on_two: float
    serial_percent: float


def run_side(threads: int, preset_name: str, precision: str, steps: int, store: str, pipe: Connection) -> None:
    """Answer each True with milliseconds a step by operation, until False."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    torch.set_num_threads(threads)
    from benchmarks.step_models import PRESETS, draw, our_loop
    from pipeline.devices.cpu.process import keep_freed_memory
    from pipeline.runtime.process.distributed import DistributedContext

    keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    preset = PRESETS[preset_name]
    context = DistributedContext(0, 1, 0, 1, torch.device("cpu"), "gloo")
    run = our_loop(preset, draw(preset, 0), context, [f"trainer.precision={precision}"])
    run(steps)
    pipe.send({})
    while pipe.recv():
        plain = 1e3 * run(steps).seconds_a_step
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            timed = run(steps)
        times: dict[str, float] = defaultdict(float)
        for event in recorded.key_averages():
            times[section_of(event.key)] += event.self_cpu_time_total / 1e3 / timed.num_steps
        times[PYTHON] = max(0.0, 1e3 * timed.seconds_a_step - sum(times.values()))
        pipe.send({**times, "": plain})
    dist.destroy_process_group()


def section_of(operation: str) -> str:
    """An operation by its own name: the engine's entry and the node that it runs are one."""
    return operation.removeprefix("autograd::engine::evaluate_function: ").removeprefix("aten::")


def sections(preset: str, precision: str, one: dict[str, float], two: dict[str, float]) -> list[Section]:
    """The largest serial part first."""
    step = two[""]
    found = []
    for name in {*one, *two} - {""}:
        first, second = one.get(name, 0.0), two.get(name, 0.0)
        serial = min(max(0.0, 2.0 * second - first), second)
        found.append(Section(preset, precision, name, first, second, 100.0 * serial / step))
    return sorted(found, key=lambda section: -section.serial_percent)


def measure(preset: str, precision: str, rounds: int, steps: int) -> tuple[list[Section], dict[int, float]]:
    """Medians over the rounds; and milliseconds a step without the profiler."""
    context = multiprocessing.get_context("spawn")
    limit_openmp_spin()
    use_huge_pages()
    found: dict[int, list[dict[str, float]]] = {threads: [] for threads in THREADS}
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = {}, []
        for threads in THREADS:
            pipes[threads], theirs = context.Pipe()
            arguments = (threads, preset, precision, steps, f"{folder}/{threads}", theirs)
            processes.append(context.Process(target=run_side, args=arguments, daemon=True))
            processes[-1].start()
            pipes[threads].recv()
        for _ in range(rounds):
            for threads in THREADS:
                pipes[threads].send(True)
                found[threads].append(pipes[threads].recv())
        for threads in THREADS:
            pipes[threads].send(False)
        for process in processes:
            process.join()
    medians = {
        threads: {name: statistics.median(each.get(name, 0.0) for each in rows) for name in {*rows[0]}}
        for threads, rows in found.items()
    }
    return sections(preset, precision, medians[1], medians[2]), {threads: medians[threads][""] for threads in THREADS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["quickstart", "kaggle_16", "kaggle_64"])
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--least", type=float, default=1.0, help="per cent of a step; smaller serial parts are one line"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    print(f"{cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}")
    everything: list[Section] = []
    for preset in options.presets:
        for precision in options.precisions:
            found, steps = measure(preset, precision, options.rounds, options.steps)
            everything += found
            print(f"{preset} {precision}: {steps[1]:.2f} ms a step on 1 thread, {steps[2]:.2f} on 2", flush=True)
            for section in found:
                if section.serial_percent >= options.least:
                    print(
                        f"  {section.name:<44}{section.ms_on_one:>8.2f}{section.ms_on_two:>8.2f} ms"
                        f"{section.serial_percent:>7.1f} % serial"
                    )
            small = [each.serial_percent for each in found if each.serial_percent < options.least]
            print(f"  {f'{len(small)} more':<63}{sum(small):>7.1f} % serial", flush=True)
    if options.output:
        options.output.write_text(json.dumps([asdict(section) for section in everything], indent=1))


if __name__ == "__main__":
    main()
