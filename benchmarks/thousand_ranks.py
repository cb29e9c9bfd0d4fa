"""Simulate steps on 8 to 1,024 GPUs, and count the nodes that a rate needs with HBM alone, host memory and SSDs:

    python -m benchmarks.thousand_ranks --scaling [--sizes 8 64 1024] [--seconds 20]
    python -m benchmarks.thousand_ranks --tiers [--rate 1000000]

No such machines are here: the step is planned and predicted from data sheets, then each rank goes through it by itself, with work
that varies, stragglers, and a reader of the measured speed (pipeline/extras/step_time). The assumptions are printed.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.many_ranks import EVEN, Unevenness, simulate
from benchmarks.row_bands import bands_of, power_law, touched
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import PlanJob
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.extras.step_time.plan_forecast import step_request
from pipeline.extras.step_time.prediction import SheetLayers
from pipeline.planner.hardware import GIB
from pipeline.planner.plan_record import PlanRecord
from pipeline.planner.planner import make_plan
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.runtime.errors import UserError
from pipeline.training.plan_job import build_request, resolve

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
ROW_US = (
    0.695  # of a row with 26 ids and 13 numbers on one core of an AMD EPYC, measured by calibrate (docs/do/planning.md)
)
SETTINGS = [
    "experiment=mlperf_dlrmv2",
    "hardware=h100_80gb",
    "hardware.issue_us=0",  # devices and links alone: the host takes as long at any size
    "trainer.precision=bf16",
    "comms=fp16",
    "data.reader.num_streams=1024",
]
# Of a node: 8 drives of 3.84 TB (DGX H100 user guide), each with as many random reads and writes of 4 KiB a second as is usual
SSD_BYTES, SSD_OPERATIONS = 8 * 3.84e12, 8 * 500_000
FACTORS = (1, 4, 16)
SKEW = 4.0  # the first x of a table's rows have x^(1/4) of its lookups
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
RANKS_A_NODE = 8
IN_HBM = "tables.default.sharding.compute_kernels=[fused]"


@dataclass(frozen=True)
class Planned:
    resolved: ResolvedJob
    record: PlanRecord
    layers: SheetLayers
    seconds: float

    @property
    def batch_size(self) -> int:
        return self.resolved.job.trainer.micro_batch_size // len(self.record.ranks)


def plan(words: list[str], seconds: float, rows_factor: float = 1.0, skew: float | None = None) -> Planned:
    """Raises UserError where nothing fits."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *words,
            f"planner.plan_file={folder}/plan.json",
            f"planner.timeout_s={seconds:g}",
            "planner.gap_tolerance=0.05",
        ]
        resolved = resolved_job(words, rows_factor, skew)
        job = resolved.job
        request = replace(build_request(resolved), suggests=False)
        record = make_plan(job.planner, request)
    layers = SheetLayers(step_request(resolved, request, record, 1))
    return Planned(resolved, record, layers, time.monotonic() - started)


def resolved_job(words: list[str], rows_factor: float = 1.0, skew: float | None = None) -> ResolvedJob:
    job = load_config(PlanJob, words)
    tables = {
        name: table
        if table.num_embeddings is None
        else replace(table, num_embeddings=_scaled(table.num_embeddings, rows_factor))
        for name, table in job.tables.items()
    }
    resolved = resolve(replace(job, tables=tables))
    if skew is None:
        return resolved
    return replace(
        resolved, tables=[replace(table, frequencies=_frequencies(table, skew)) for table in resolved.tables]
    )


def _scaled(rows: int, factor: float) -> int:
    return max(1, int(rows * factor)) if rows > 100_000 else rows  # small ones are kinds of things, which do not grow


def _frequencies(table: Table, skew: float) -> RowFrequencies:
    bands = power_law(table.num_embeddings, skew)
    rows, shares = bands.rows.cumsum().round().astype(int).tolist(), bands.shares.cumsum().tolist()
    return RowFrequencies([0, *rows], [0.0, *shares])


def scaling(sizes: list[int], seconds: float) -> Iterator[str]:
    uneven = Unevenness()
    yield (
        f"every kernel's time varies by {100 * uneven.spread:.0f} % (lognormal), {100 * uneven.straggles:g} % of them take "
        f"{uneven.times_as_long:g} times as long; one core decodes a row of a rank in {ROW_US} us; 200 steps"
    )
    yield "| ranks | batch a rank | step ms, all alike | uneven | one rank in 64 10 % slower | with the reader | samples/s | most of it |"
    yield "|---|---|---|---|---|---|---|---|"
    for batch in (65_536, None):
        for size in sizes:
            total = batch or 8192 * size
            found = plan([*SETTINGS, f"world_size={size}", f"trainer.global_batch_size={total}"], seconds)
            step = found.layers.step(found.record.ranks)
            loads = found.record.ranks
            slow = replace(uneven, slow_ranks=1 / 64)
            read_ms = found.batch_size * ROW_US / 1e3
            times = [
                simulate(found.layers, loads, EVEN, steps=5),
                simulate(found.layers, loads, uneven),
                simulate(found.layers, loads, slow),
                simulate(found.layers, loads, uneven, read_ms=read_ms),
            ]
            shown = " | ".join(f"{ms:.2f}" for ms in times)
            share = 100 * step.parts[step.limit] / step.step_ms
            yield f"| {size} | {found.batch_size:,} | {shown} | {total / times[-1] / 1e3:,.1f}M | {step.limit} {share:.0f} % |"


def tiers(rate: float, seconds: float) -> Iterator[str]:
    yield f"nodes of 8 H100 for {rate:,.0f} samples/s, global batch 65,536, lookups skewed as x^(1/{SKEW:g}); SSDs of a node: {SSD_OPERATIONS:,} operations of 4 KiB/s"
    yield "| weights and states | HBM alone | with host memory | with SSDs | HBM alone / with SSDs |"
    yield "|---|---|---|---|---|"
    for factor in FACTORS:
        found = {kind: _nodes(kind, factor, rate, seconds) for kind in ("hbm", "host", "ssd")}
        total, _ = _table_bytes(resolved_job(_words(1)), factor)
        shown = " | ".join(
            f"{nodes} ({samples / 1e6:.2f}M)" if nodes else "over 128" for nodes, samples in found.values()
        )
        ratio = f"{found['hbm'][0] / found['ssd'][0]:.0f}" if found["hbm"][0] and found["ssd"][0] else "-"
        yield f"| {total / 2**40:,.2f} TiB | {shown} | {ratio} |"


def _words(nodes: int) -> list[str]:
    return [
        "experiment=criteo_1tb_dlrm",
        "data=criteo_1tb",
        "tables=criteo_1tb",
        "optimizer=rowwise_adagrad",
        "hardware=h100_80gb",
        "comms=fp16",
        "data.reader.num_streams=1024",
        f"world_size={RANKS_A_NODE * nodes}",
        "trainer.global_batch_size=65536",
    ]


def _nodes(kind: str, factor: float, rate: float, seconds: float) -> tuple[int, float]:
    """The fewest nodes that reach the rate, and theirs; 0 where 128 do not."""
    for nodes in NODES:
        try:
            samples = _rate(kind, factor, nodes, seconds)
        except UserError:
            continue
        if samples >= rate:
            return nodes, samples
    return 0, 0.0


def _rate(kind: str, factor: float, nodes: int, seconds: float) -> float:
    """Samples a second. With SSDs, what memory does not hold lies there, and its rows are fetched while a step computes."""
    words = [*_words(nodes), *([IN_HBM] if kind == "hbm" else [])]
    whole = resolved_job(_words(1))
    hardware, ranks = whole.job.hardware, RANKS_A_NODE * nodes
    assert hardware.ddr_cap_gb and hardware.hbm_cap_gb
    total, _ = _table_bytes(whole, factor)
    if kind != "ssd":
        held = hardware.hbm_cap_gb + (hardware.ddr_cap_gb if kind == "host" else 0.0)
        if total > ranks * held * GIB:
            raise UserError("memory does not hold the tables")
        found = plan(words, seconds, factor, SKEW)
        return found.layers.step(found.record.ranks).samples_per_s
    memory = 0.75 * ranks * hardware.ddr_cap_gb * GIB
    if total > nodes * SSD_BYTES + memory:
        raise UserError("the SSDs do not hold the tables")
    found = plan(words, seconds, factor * min(1.0, memory / total), SKEW)
    step_ms = found.layers.step(found.record.ranks).step_ms
    fetched = _missed_rows(whole, factor, memory)
    ssd_ms = 2 * fetched / nodes / SSD_OPERATIONS * 1e3  # a row comes, and another leaves
    return 65_536 / max(step_ms, ssd_ms) * 1e3


def _table_bytes(resolved: ResolvedJob, factor: float) -> tuple[float, list[float]]:
    rows = [_scaled(table.num_embeddings, factor) for table in resolved.plain_tables]
    sizes = [4.0 * (table.embedding_dim + 1) for table in resolved.plain_tables]
    return float(np.dot(rows, sizes)), sizes


def _missed_rows(resolved: ResolvedJob, factor: float, memory: float) -> float:
    """Distinct rows of a global batch that memory, which keeps the hottest, does not hold."""
    tables = resolved.plain_tables
    bands = [
        bands_of(_frequencies(replace(table, num_embeddings=_scaled(table.num_embeddings, factor)), SKEW), 0)
        for table in tables
    ]
    ids = [65_536.0 * sum(table.pooling_factors) for table in tables]
    _, sizes = _table_bytes(resolved, factor)
    return sum(each.missed_rows for each in touched(bands, ids, sizes, memory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--tiers", action="store_true")
    parser.add_argument("--rate", type=float, default=1e6, help="samples/s that the nodes are to reach")
    parser.add_argument("--seconds", type=float, default=10.0, help="CPU seconds for each plan")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.scaling:
        for line in scaling(options.sizes, options.seconds):
            print(line, flush=True)
    if options.tiers:
        for line in tiers(options.rate, options.seconds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
