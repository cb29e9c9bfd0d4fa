"""Count what the host of a GPU does in a step, for this trainer and for TorchRec's documented loop, without a GPU:

    python -m benchmarks.gpu_host --output docs/measurements/gpu_host.json    # needs `make install STACK=gpu`
    python docs/write_measurements.py

Two ranks run both loops of benchmarks.step_models on shadow GPUs (pipeline.extras.shadow), with the same layers, batches and
sharding types. Table rows and the batch are small, because neither changes what the host does. A figure is the difference
between a run of 25 steps and a run of 5, divided by 20, on rank 0: what a run does once is not in it.

- launches: operations that are kernels. A kernel of FBGEMM counts once, though it launches several.
- calls: all other operations: views, allocations, operations on host tensors, profiler marks.
- collectives; copies between host and device; syncs, where the host waits for the device.
- host ms: CPU time of the rank's thread, backward included, without the time inside operations. That is Python, autograd and
  TorchRec's own C++. The shadow does an operation's work inside its `run`, whose CPU time is subtracted. What entering `run`
  costs for each operation, which a GPU does not have, is measured on `detach` and subtracted too. Least of several rounds;
  both loops take turns in one process, so their ratio does not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.about import about

PRESETS = ("quickstart", "kaggle_64", "dlrmv2")
KINDS = {"table_wise": ["table_wise"], "table_wise and row_wise": ["table_wise", "row_wise"]}
RANKS, MOST_ROWS, BATCH = 2, 2000, 128
SHORT, LONG = 5, 25
COUNTS = ("launches", "calls", "collectives", "copies", "syncs")
RESULTS = Path(__file__).parents[1] / "docs" / "measurements" / "gpu_host.json"


def a_step(run: Callable[[int], object], meter: Any, report: Any) -> tuple[dict[str, float], dict[str, float]]:
    """What a step adds to a run: its figures, and its syncs by place."""
    spent, places = [], []
    for steps in (SHORT, LONG):
        before, synced = _totals(meter, report), Counter(report.syncs)
        run(steps)
        spent.append({name: value - before[name] for name, value in _totals(meter, report).items()})
        places.append(Counter(report.syncs) - synced)
    steps = LONG - SHORT
    syncs = {place: (count - places[0][place]) / steps for place, count in places[1].items()}
    figures = {name: (value - spent[0][name]) / steps for name, value in spent[1].items()}
    return figures, {place: count for place, count in syncs.items() if count >= 0.5}


def _totals(meter: Any, report: Any) -> dict[str, float]:
    counts = report.counts()
    return {
        "launches": counts["launches"],
        "calls": meter.calls - counts["launches"] - counts["collectives"],
        "collectives": counts["collectives"],
        "copies": sum(count for name, count in counts.items() if name.startswith("copies_") and "host" in name),
        "syncs": counts["syncs"],
        "host_ms": 1e3 * meter.outside_s(),
    }


def run_rank(rank: int, presets: list[str], rounds: int, folder: str) -> None:
    """Measure all presets on one rank; rank 0 writes rows.json into the folder."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(RANKS),
        OMP_NUM_THREADS="1",
        SHADOW_GPU_FOLDER=f"{folder}/shadow",
    )
    from pipeline.extras import shadow

    shadow.activate(num_gpus=RANKS)  # before torch is imported
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # backward is then in this thread's CPU time
    from pipeline import devices
    from pipeline.extras.shadow.meter import Meter

    devices.use(devices.named("cuda", rank))
    with shadow.running(rank) as report:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
        meter = Meter()
        rows = [row for name in presets for kinds in KINDS for row in _both_loops(name, kinds, rounds, meter, report)]
        if rank == 0:
            Path(folder, "rows.json").write_text(json.dumps(rows))
        dist.barrier()
    os._exit(0)  # the groups' threads would be waited for


def _both_loops(name: str, kinds: str, rounds: int, meter: Any, report: Any) -> list[dict[str, Any]]:
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    from benchmarks.step_models import PRESETS as ALL
    from benchmarks.step_models import draw, our_loop, torchrec_side
    from pipeline.runtime.process.distributed import DistributedContext

    rank = dist.get_rank()
    context = DistributedContext(rank, RANKS, rank, RANKS, torch.device("cuda", rank), "nccl")
    preset = replace(
        ALL[name], num_embeddings=[min(rows, MOST_ROWS) for rows in ALL[name].num_embeddings], batch_size=BATCH
    )
    raw = draw(preset, rank)
    step = torchrec_side(preset, raw, context, KINDS[kinds])[1]
    overrides = [
        f"+tables.{table}.sharding.sharding_types=[{KINDS[kinds][index % len(KINDS[kinds])]}]"
        for index, table in enumerate(preset.names)
    ]
    loops: dict[str, Callable[[int], object]] = {
        "torchrec": lambda steps: [step() for _ in range(steps)],
        "ours": our_loop(preset, raw, context, overrides),
    }
    found: dict[str, list[dict[str, float]]] = {side: [] for side in loops}
    places: dict[str, dict[str, float]] = {}
    for run in loops.values():
        run(SHORT)  # builds and warms
    for _ in range(rounds):
        for side, run in loops.items():
            figures, places[side] = a_step(run, meter, report)
            found[side].append(figures)
    return [
        {
            "preset": name,
            "kinds": kinds,
            "side": side,
            **{key: min(each[key] for each in rows) for key in rows[0]},
            "sync_places": places[side],
        }
        for side, rows in found.items()
    ]


def measure(presets: list[str], rounds: int) -> dict[str, Any]:
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run_rank, args=(rank, presets, rounds, folder)) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if any(each.exitcode for each in ranks):
            raise SystemExit("a rank failed; its error is above")
        rows = json.loads(Path(folder, "rows.json").read_text())
    return {"about": about(ranks=RANKS, rounds=rounds), "rows": rows}


def table(found: dict[str, Any]) -> str:
    """The figures as a table in Markdown, ours next to TorchRec's, with the ratios of what has a target."""
    lines = [
        "| preset | sharding | loop | launches | other calls | collectives | host-device copies | syncs | host ms | launches, ratio | host time, ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = found["rows"]
    for theirs, ours in zip(rows[::2], rows[1::2], strict=True):
        for row in (theirs, ours):
            counts = " | ".join(f"{row[name]:.4g}" for name in COUNTS)
            ratios = " | ".join(f"{row[name] / theirs[name]:.2f}" for name in ("launches", "host_ms"))
            lines.append(
                f"| {row['preset']} | {row['kinds']} | {row['side']} | {counts} | {row['host_ms']:.1f} | {ratios} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="measure, and write the figures there")
    options = parser.parse_args()
    found = measure(options.presets, options.rounds)
    print(table(found))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
