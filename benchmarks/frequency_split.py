"""Measure bytes and time of a step against the number of rows that every rank has a copy of (arXiv 2411.01611):

    python -m benchmarks.frequency_split [--ranks 2 4] [--links 0 200 50] [--workloads ...] [--heads ...] [--output split.json]

Ranks run in network namespaces of their own, joined by links of --links Mbit/s (0: as fast as the machine); that wants root
and iproute2. A compute step here takes hundreds of times as long as on a GPU, so links hundreds of times slower than a data
centre's 100 or 200 Gbit/s keep the ratio of the two. Ids are drawn by Zipf's law. For each head: bytes that leave a rank in a
step as expected from the frequency curve (extras/frequency_split/head_size.py), as counted at the collectives (benchmarks/wiretap.py), and
as the kernel counts them on the link, with headers and the dense layers' gradients; then the median step on each link.
`whole` is the table without a split, every bag sent; `auto` the head that the planner chooses.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from benchmarks.slow_links import DEVICE, linked_hosts
from benchmarks.wiretap import count_buckets, wiretap
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.config.tables import CompressionConfig
from pipeline.data.dataset import Dataset, FrequencyCurve, SparseFeature, Split
from pipeline.data.prepare.vocabulary import CURVE_RANKS
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.embeddings.row_frequencies import share_of
from pipeline.embeddings.tables import resolve_tables
from pipeline.extras.frequency_split.head_rows import head_reports
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.sharding.torchrec.sharder import ShardedTables
from pipeline.training.optimizer import build_optimizer
from pipeline.training.sharded_model import ShardedModel, build_sharded_model, resolve

NUM_DENSE = 13
NUM_BATCHES = 8
PORT = 29577
HEADS = ("whole", "fewer", "auto", "more", "all")


@dataclass(frozen=True)
class Workload:
    """`num_tables` alike; ids by Zipf's law with exponent `skew`, `bag` of them a sample."""

    skew: float
    batch_size: int  # of a rank
    bag: int = 1
    num_rows: int = 20_000
    num_tables: int = 6
    dim: int = 32
    sharding: str = "table_wise"

    def shares(self) -> np.ndarray[Any, Any]:
        weights = np.arange(1, self.num_rows + 1) ** -self.skew
        return weights / weights.sum()

    def curve(self) -> FrequencyCurve:
        """As `prepare` would write it."""
        upto = np.cumsum(self.shares())
        ranks = [int(rank) for rank in CURVE_RANKS if rank < self.num_rows]
        return FrequencyCurve([*ranks, self.num_rows], [*(float(upto[rank - 1]) for rank in ranks), 1.0])

    @property
    def names(self) -> list[str]:
        return [f"cat_{index}" for index in range(self.num_tables)]


WORKLOADS = {
    "one-hot, skew 1.2": Workload(1.2, 4096),
    "one-hot, skew 1.2, by rows": Workload(1.2, 4096, sharding="row_wise"),
    "one-hot, skew 1.05": Workload(1.05, 4096),
    "one-hot, skew 1.2, small batch": Workload(1.2, 256),
    "bags of 10, skew 1.2": Workload(1.2, 1024, bag=10),
}


@dataclass
class Figure:
    """Bytes are MiB that leave a rank in a step; step_ms is by link in Mbit/s."""

    workload: str
    ranks: int
    head: str
    head_rows: int
    share: float
    expected_mib: float
    counted_mib: float
    kernel_mib: float | None = None
    step_ms: dict[str, float] = field(default_factory=dict)


def build(context: DistributedContext, load: Workload, head: str) -> tuple[TrainJob, Dataset, ShardedModel]:
    """Collective. `head`: whole, auto or a number of rows."""
    split = [] if head == "whole" else [f"tables.default.compression={{kind: frequency_split, head_rows: {head}}}"]
    job = load_config(
        TrainJob,
        [
            "data=quickstart",
            "model=dlrm",
            "name=split",
            "hardware=cpu",
            "comms.shared_memory=false",
            f"world_size={context.world_size}",
            f"tables.default.embedding_dim={load.dim}",
            f"model.dense_arch_layer_sizes=[64,{load.dim}]",
            "model.over_arch_layer_sizes=[64,1]",
            f"tables.default.sharding.sharding_types=[{load.sharding}]",
            f"trainer.global_batch_size={load.batch_size * context.world_size}",
            *split,
        ],
    )
    features = [SparseFeature(name, load.num_rows, load.bag > 1, float(load.bag), load.curve()) for name in load.names]
    dense = [f"int_{index}" for index in range(NUM_DENSE)]
    rows = 10**7
    dataset = Dataset("split", "label", dense, features, {"train": Split([], rows, rows // 4)}, rows, rows, 0, "log1p")
    resolved = resolve(job, dataset, context)
    return resolved.job, dataset, build_sharded_model(resolved, context)


def draw(load: Workload, assembly: ShardedModel, context: DistributedContext) -> list[Batch]:
    generator = np.random.default_rng(context.rank)
    splitter = IdSplitter(assembly.tables, skip_empty_bags=context.world_size > 1)
    batches, size = [], load.batch_size
    upto = np.cumsum(load.shares())
    for _ in range(NUM_BATCHES):
        drawn = np.searchsorted(upto, generator.random(load.num_tables * size * load.bag)).clip(max=load.num_rows - 1)
        features = keyed_jagged_tensor(
            load.names,
            torch.from_numpy(drawn),
            torch.full((load.num_tables * size,), load.bag, dtype=torch.int32),
            size,
            [size * load.bag] * load.num_tables,
        )
        dense = torch.from_numpy(generator.standard_normal((size, NUM_DENSE), dtype=np.float32))
        labels = torch.from_numpy(generator.integers(0, 2, size).astype(np.float32))
        batches.append(Batch(dense, splitter(features), labels, torch.ones(size)))
    return batches


def stepper(assembly: ShardedModel, job: TrainJob, batches: list[Batch]) -> Callable[[int], float]:
    """Collective: run(steps) -> seconds of the median step."""
    optimizer = build_optimizer(assembly.model, job.optimizer)
    assembly.model.train()
    pipeline = TrainPipelineSparseDist(assembly.model, optimizer, torch.device("cpu"), execute_all_batches=True)

    def endless() -> Iterator[Batch]:
        while True:
            yield from batches

    source = endless()

    def run(steps: int) -> float:
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            pipeline.progress(source)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    return run


def counted_bytes(
    assembly: ShardedModel, run: Callable[[int], float], context: DistributedContext, steps: int
) -> float:
    """Collective: that leave a rank in a step for its tables, the mean over ranks, by what collectives are given.

    A part of an all-to-all stays; gloo sums up in a ring, its reduce-scatter too, which is an all-reduce.
    """
    world = context.world_size
    away = (world - 1) / world
    passes = {
        "all_to_all_single": away,
        "reduce_scatter": 2 * away,
        "reduce_scatter_tensor": 2 * away,
        "all_gather": world - 1.0,
        "all_gather_into_tensor": world - 1.0,
    }
    tables = [one for one in assembly.model.modules() if isinstance(one, ShardedTables)]
    replicated = [one for table in tables for one in table._lookups if isinstance(one, DistributedDataParallel)]
    sizes = [count_buckets(one) for one in replicated]
    run(2)  # buckets are laid out in the first step
    for one in sizes:
        one.clear()
    with wiretap() as sent:
        run(steps)
    total = sum(
        count * passes[kind.collective] for kind, count in sent.items() if kind.dtype != torch.float64
    ) + 2 * away * sum(sum(one) for one in sizes)
    everywhere = torch.tensor(total / steps, dtype=torch.float64)
    dist.all_reduce(everywhere)
    return float(everywhere) / world


def expected_bytes(job: TrainJob, dataset: Dataset, assembly: ShardedModel, world_size: int) -> float:
    reports = head_reports(job, assembly.tables, dataset, world_size)
    if reports:
        return sum(report.chosen.total for report in reports)
    split = load_split(job)
    whole = head_reports(split, resolve_tables(split.tables, dataset), dataset, world_size)
    return sum(report.none.total for report in whole)


def load_split(job: TrainJob) -> TrainJob:
    """The same with heads of one row, of which the reports tell what it would be without."""
    split = CompressionConfig("frequency_split", head_rows="1")
    return replace(job, tables={name: replace(each, compression=split) for name, each in job.tables.items()})


def heads_of(load: Workload, auto: int, heads: list[str]) -> list[str]:
    """`fewer` and `more` are an eighth and eight times as many rows as auto."""
    rows = {"fewer": auto // 8, "more": auto * 8, "all": load.num_rows}
    return [str(rows.get(head, head)) for head in heads if 0 < rows.get(head, 1) <= load.num_rows]


def measure_on_rank(names: list[str], heads: list[str], links: list[float], steps: int) -> list[Figure]:
    """Collective, in a namespace of this rank's own where `links` are given."""
    context = _join()
    figures = []
    for name in names:
        load = WORKLOADS[name]
        job, _, _ = build(context, load, "auto")
        auto = int(job.tables[load.names[0]].compression.head_rows)
        for head in heads_of(load, auto, heads):
            figures.append(_measure(context, name, load, head, links, steps))
            if context.is_main:
                print(show_line(figures[-1], links), flush=True)
    return figures


def _measure(
    context: DistributedContext, name: str, load: Workload, head: str, links: list[float], steps: int
) -> Figure:
    job, dataset, assembly = build(context, load, head)
    run = stepper(assembly, job, draw(load, assembly, context))
    counted = counted_bytes(assembly, run, context, NUM_BATCHES // 2)
    reports = head_reports(job, assembly.tables, dataset, context.world_size)
    rows = reports[0].head_rows if reports else 0
    figure = Figure(
        name,
        context.world_size,
        head,
        rows,
        share_of(load.curve(), rows) if rows else 0.0,
        expected_bytes(job, dataset, assembly, context.world_size) / 2**20,
        counted / 2**20,
    )
    for link in links:
        _limit(link)
        dist.barrier()
        before = _sent()
        figure.step_ms[f"{link:g}"] = 1e3 * run(steps)
        figure.kernel_mib = (_sent() - before) / steps / 2**20
    _limit(0)
    return figure


def _join() -> DistributedContext:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"tcp://10.77.0.1:{PORT}", rank=rank, world_size=world)
    return DistributedContext(rank, world, rank, world, torch.device("cpu"), "gloo")


def _limit(mbit_per_s: float) -> None:
    """Of this rank's own link."""
    words = ["tc", "qdisc", "replace", "dev", DEVICE, "root", "tbf", "rate", f"{mbit_per_s:g}mbit", "burst", "64kb"]
    remove = ["tc", "qdisc", "del", "dev", DEVICE, "root"]
    subprocess.run([*words, "latency", "50ms"] if mbit_per_s else remove, capture_output=True, check=False)


def _sent() -> int:
    return int(Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes").read_text())


def compare(ranks: int, names: list[str], heads: list[str], links: list[float], steps: int) -> list[Figure]:
    """Start `ranks` hosts with a rank each; the figures of rank 0."""
    with linked_hosts(ranks) as hosts, tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/figures.json"
        request = json.dumps({"names": names, "heads": heads, "links": links, "steps": steps, "output": output})
        running = []
        for rank, host in enumerate(hosts):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": str(ranks),
                "GLOO_SOCKET_IFNAME": DEVICE,
                "OMP_NUM_THREADS": "1",
            }
            words = host.command(sys.executable, "-m", "benchmarks.frequency_split", "--rank", request)
            running.append(subprocess.Popen(words, env=environment))
        try:
            if failed := [rank for rank, process in enumerate(running) if process.wait()]:
                raise RuntimeError(f"rank(s) {failed} failed; what they printed is above")
        finally:
            for process in running:
                process.kill()
        return [Figure(**one) for one in json.loads(Path(output).read_text())]


def headings(links: list[float]) -> str:
    times = "".join(f"{'ms, ' + (f'{link:g} Mbit/s' if link else 'no limit'):>17}" for link in links)
    return (
        f"{'workload':<32}{'ranks':>6}{'head':>7}{'rows':>8}{'of lookups':>11}{'expected MiB':>14}{'counted':>9}"
        f"{'on the link':>13}{times}"
    )


def show_line(one: Figure, links: list[float]) -> str:
    times = "".join(f"{one.step_ms.get(f'{link:g}', float('nan')):>17,.1f}" for link in links)
    return (
        f"{one.workload:<32}{one.ranks:>6}{one.head if not one.head.isdecimal() else '':>7}{one.head_rows:>8,}"
        f"{100 * one.share:>10.1f}%{one.expected_mib:>14.3f}{one.counted_mib:>9.3f}{one.kernel_mib or float('nan'):>13.3f}{times}"
    )


def show_gains(figures: list[Figure], links: list[float]) -> str:
    """Of `auto` over `whole`, in bytes and in time on each link."""
    lines = [
        f"{'gain of auto over whole':<32}{'ranks':>6}{'bytes':>8}"
        + "".join(f"{f'{link:g} Mbit/s' if link else 'no limit':>12}" for link in links)
    ]
    for whole in figures:
        auto = next(
            (one for one in figures if (one.workload, one.ranks, one.head) == (whole.workload, whole.ranks, "auto")),
            None,
        )
        if whole.head != "whole" or auto is None:
            continue
        times = "".join(f"{whole.step_ms[f'{link:g}'] / auto.step_ms[f'{link:g}']:>12.2f}" for link in links)
        lines.append(f"{whole.workload:<32}{whole.ranks:>6}{whole.counted_mib / auto.counted_mib:>8.2f}{times}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--links", type=float, nargs="+", default=[0, 200, 50], metavar="MBIT")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--steps", type=int, default=NUM_BATCHES)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        request = json.loads(options.rank)
        figures = measure_on_rank(request["names"], request["heads"], request["links"], request["steps"])
        if int(os.environ["RANK"]) == 0:
            Path(request["output"]).write_text(json.dumps([asdict(figure) for figure in figures]))
        dist.barrier()
        dist.destroy_process_group()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts go with it
    print(headings(options.links))
    figures = []
    for ranks in options.ranks:
        figures += compare(ranks, options.workloads, options.heads, options.links, options.steps)
    print(f"\n{show_gains(figures, options.links)}")
    if options.output:
        options.output.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
