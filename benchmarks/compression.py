"""Measure quality and speed of compressed tables at equal memory, on generated data whose best AUC is known:

    python -m benchmarks.compression [--quick] [--output compression.jsonl] [--data FOLDER] [--seeds 3] [--kinds hash ...]
    python -m benchmarks.compression --report [--output compression.jsonl]
    python -m benchmarks.compression --picture docs/measurements/compression.svg [--output compression.jsonl]

Twelve of 26 features have large vocabularies, whose rare ids say as much of a click as the hot ones, so that it matters who
shares a row with whom. Each of their tables is made 4, 16 and 64 times smaller by each kind; the other tables stay. Partitions are two, and three at 1/64 where their
rows are whole. Of frequency_split half the memory is the hot head's, and half that of the tail hashed. A training is one epoch by the quickstart's DLRM with embedding_dim 32 on one rank; AUC and NE are
those of the validation split. A row of the output is one training; what is there already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import load_dataset
from pipeline.data.prepare.run import prepare
from pipeline.embeddings.physical import num_numbers
from pipeline.embeddings.table import Table
from pipeline.embeddings.tables import resolve_tables

NUM_ROWS = 500_000
LARGE = [5_000] * 4 + [10_000] * 4 + [20_000] * 4
SMALL = [3, 4, 6, 8, 10, 15, 20, 30, 40, 60, 80, 100, 150, 200]
MIN_ROWS = 1000  # only the large ones are compressed
RATIOS = (4, 16, 64)
DIM = 32
LEAST_OF_TWO = 32  # two partitions of 5,000 ids take a 35th of the memory; smaller ones take three
KINDS: dict[str, list[str]] = {
    "hash": ["kind=hash"],
    "quotient_remainder add": ["kind=quotient_remainder", "operation=add"],
    "quotient_remainder multiply": ["kind=quotient_remainder", "operation=multiply"],
    "quotient_remainder concatenate": ["kind=quotient_remainder", "operation=concatenate"],
    "path_based, 16 hidden": ["kind=path_based", "hidden_size=16"],
    "path_based, 4 hidden": ["kind=path_based", "hidden_size=4"],
    "mixed_dimension": ["kind=mixed_dimension"],
    "tensor_train": ["kind=tensor_train"],
    "frequency_split + hash": [],  # words_of says it table by table
}
FULL, SPLIT = "full", "frequency_split + hash"


@dataclass(frozen=True)
class Row:
    """One training. `problem`: why there was none; `table_bytes` are those of the large tables and what stands for them."""

    kind: str
    ratio: float
    seed: int
    num_rows: int
    table_bytes: int = 0
    full_bytes: int = 0
    auc: float = 0.0
    ne: float = 0.0
    bayes_auc: float = 0.0
    samples_per_s: float = 0.0
    cpu_s: float = 0.0
    problem: str = ""

    @property
    def key(self) -> tuple[str, float, int, int]:
        return self.kind, self.ratio, self.seed, self.num_rows


def prepared(folder: Path, num_rows: int) -> str:
    """The prepared data set in `folder`, made where it is not there."""
    path = folder / f"prepared_{num_rows}"
    if (path / "dataset.json").exists():
        return str(path)
    source = folder / f"clicks_{num_rows}.tsv"
    drawn = [
        "data=quickstart",
        f"data.synthetic.num_rows={num_rows}",
        "data.synthetic.zipf_exponent=0.7",
        "data.synthetic.id_effect_decay=0",
        f"data.synthetic.cardinalities=[{','.join(map(str, SMALL + LARGE))}]",
        "data.synthetic.num_interactions=3",
    ]
    generate(load_config(GenerateJob, [*drawn, f"output={source}"]))
    split = ["data.split.validation_fraction=0.2", "data.split.test_fraction=0.02", "data.rows_per_row_group=4096"]
    prepare(load_config(PrepareJob, [*drawn, *split, f"source={source}", f"data.path={path}"]))
    source.unlink()
    return str(path)


def words_of(kind: str, ratio: float, seed: int, large: dict[str, int]) -> list[str]:
    """Overrides of a training job; `large`: name -> rows of the large tables."""
    if kind == FULL:
        return []
    if kind == SPLIT:
        return [
            f"tables.{name}.compression={{kind: frequency_split, head_rows: {half}, tail: {{kind: hash, num_rows: {half}, "
            f"seed: {seed}}}}}"
            for name, rows in large.items()
            for half in [int(rows / ratio / 2)]
        ]
    settings = [*KINDS[kind], f"ratio={ratio:g}", f"min_rows={MIN_ROWS}"]
    if kind in ("quotient_remainder add", "quotient_remainder multiply") and ratio > LEAST_OF_TWO:
        settings += ["scheme=generalised", "num_partitions=3"]
    settings += [f"seed={seed}"] if kind == "hash" else []
    return [f"tables.default.compression.{setting}" for setting in settings]


def job_of(data: str, run_dir: str, kind: str, ratio: float, seed: int) -> TrainJob:
    features = load_dataset(data).sparse_features
    large = {feature.name: feature.cardinality for feature in features if feature.cardinality >= MIN_ROWS}
    return load_config(
        TrainJob,
        [
            "experiment=quickstart",
            "hardware=cpu",
            f"data.path={data}",
            f"run_dir={run_dir}",
            f"trainer.seed={seed}",
            f"tables.default.embedding_dim={DIM}",
            f"model.dense_arch_layer_sizes=[64,{DIM}]",
            "trainer.log_every_steps=1000",
            *words_of(kind, ratio, seed, large),
        ],
    )


def large_tables(job: TrainJob) -> list[Table]:
    tables = resolve_tables(job.tables, load_dataset(job.data.path))
    return [table for table in tables if table.num_embeddings >= MIN_ROWS]


def measure(data: str, num_rows: int, kind: str, ratio: float, seed: int) -> Row:
    from pipeline.training.train import train

    with tempfile.TemporaryDirectory() as folder:
        job = job_of(data, f"{folder}/run", kind, ratio, seed)
        try:
            tables = large_tables(job)
        except ValueError as error:
            return Row(kind, ratio, seed, num_rows, problem=str(error))
        began = time.process_time()
        summary = train(job)
        return Row(
            kind,
            ratio,
            seed,
            num_rows,
            table_bytes=4 * sum(num_numbers(table) for table in tables),
            full_bytes=4 * sum(table.num_embeddings * table.embedding_dim for table in tables),
            auc=summary.validation["auc"],
            ne=summary.validation["ne"],
            bayes_auc=summary.bayes_auc or 0.0,
            samples_per_s=summary.throughput["samples_per_s"],
            cpu_s=time.process_time() - began,
        )


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text().splitlines() if line.strip()]


def wanted(kinds: list[str], ratios: list[float], seeds: int) -> Iterator[tuple[str, float, int]]:
    """Seed by seed, so that a campaign that is stopped has whole tables."""
    for seed in range(seeds):
        yield FULL, 1.0, seed
        for ratio in ratios:
            for kind in kinds:
                yield kind, ratio, seed


def run(options: argparse.Namespace) -> None:
    num_rows = 40_000 if options.quick else NUM_ROWS
    data = prepared(Path(options.data), num_rows)
    ratios, seeds = ([16.0], 1) if options.quick else ([float(ratio) for ratio in RATIOS], options.seeds)
    path, began = Path(options.output), time.monotonic()
    done = {row.key for row in read_rows(path)}
    todo = [each for each in wanted(options.kinds, ratios, seeds) if (*each, num_rows) not in done]
    for index, (kind, ratio, seed) in enumerate(todo):
        row = measure(data, num_rows, kind, ratio, seed)
        with path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        what = row.problem or f"AUC {row.auc:.4f} NE {row.ne:.4f} {row.samples_per_s:,.0f} samples/s"
        print(
            f"{index + 1}/{len(todo)} {time.monotonic() - began:.0f} s  {kind} 1/{ratio:g} seed {seed}: {what}",
            flush=True,
        )


def mean_of(rows: list[Row], name: str) -> float:
    return statistics.fmean(getattr(row, name) for row in rows)


def spread_of(rows: list[Row], name: str) -> float:
    values = [getattr(row, name) for row in rows]
    return (max(values) - min(values)) / 2


def report(rows: list[Row]) -> str:
    """Markdown: a table a budget. Differences to hash are by seed, on the same rows."""
    rows = [row for row in rows if row.num_rows == max(each.num_rows for each in rows)]
    full = [row for row in rows if row.kind == FULL]
    full_auc = {row.seed: row.auc for row in full}
    lines = [
        f"{len(full)} seed(s), {rows[0].num_rows:,} rows, best possible AUC {full[0].bayes_auc:.4f}; full tables: AUC "
        f"{mean_of(full, 'auc'):.4f} ± {spread_of(full, 'auc'):.4f}, NE {mean_of(full, 'ne'):.4f}, "
        f"{full[0].full_bytes / 2**20:.1f} MiB, {mean_of(full, 'cpu_s'):.1f} CPU seconds",
    ]
    for ratio in sorted({row.ratio for row in rows if row.kind != FULL}):
        lines += [
            "",
            f"| 1/{ratio:g} of the memory | MiB | AUC | to full | to hash | NE | CPU s to full |",
            "|---|---|---|---|---|---|---|",
        ]
        at = [row for row in rows if row.ratio == ratio and row.kind != FULL]
        hashed = {row.seed: row.auc for row in at if row.kind == "hash"}
        for kind in KINDS:
            mine = [row for row in at if row.kind == kind and not row.problem]
            if not any(row.kind == kind for row in at):
                continue
            if not mine:
                lines.append(f"| {kind} | cannot be so small | | | | | |")
                continue
            to_full = statistics.fmean(row.auc - full_auc[row.seed] for row in mine if row.seed in full_auc)
            pairs = [row.auc - hashed[row.seed] for row in mine if row.seed in hashed]
            to_hash = f"{statistics.fmean(pairs):+.4f} ({min(pairs):+.4f} .. {max(pairs):+.4f})" if pairs else ""
            lines.append(
                f"| {kind} | {mean_of(mine, 'table_bytes') / 2**20:.2f} | {mean_of(mine, 'auc'):.4f} | {to_full:+.4f} | "
                f"{to_hash} | {mean_of(mine, 'ne'):.4f} | x {mean_of(mine, 'cpu_s') / mean_of(full, 'cpu_s'):.2f} |"
            )
    return "\n".join(lines)


def draw(rows: list[Row], path: str) -> None:
    """AUC against memory, a line a kind: the mean of all seeds, and the seeds' range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.num_rows == max(each.num_rows for each in rows) and not row.problem]
    full = [row.auc for row in rows if row.kind == FULL]
    figure, axes = pyplot.subplots(figsize=(9.5, 5))
    axes.axhspan(min(full), max(full), color="0.85")
    axes.axhline(statistics.fmean(full), color="0.4", linestyle="--", linewidth=1)
    axes.annotate("full tables", (32, max(full)), ha="center", va="bottom", color="0.3")
    ratios = sorted({row.ratio for row in rows if row.kind != FULL})
    kinds = [kind for kind in KINDS if any(row.kind == kind for row in rows)]
    for number, kind in enumerate(kinds):
        points = {ratio: [row.auc for row in rows if row.kind == kind and row.ratio == ratio] for ratio in ratios}
        found = {ratio: values for ratio, values in points.items() if values}
        # A little apart, so that ranges do not hide each other.
        places = [ratio * 1.03 ** (number - len(kinds) / 2) for ratio in found]
        means = [statistics.fmean(values) for values in found.values()]
        below = [mean - min(values) for mean, values in zip(means, found.values(), strict=True)]
        above = [max(values) - mean for mean, values in zip(means, found.values(), strict=True)]
        axes.errorbar(
            places,
            means,
            (below, above),
            label=kind,
            marker="os^Dv<>p"[number % 8],
            markersize=5,
            capsize=2,
            linewidth=1.4,
            color=f"C{number}",
            linestyle=":" if kind == "hash" else "-",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ratios, [f"1/{ratio:g}" for ratio in ratios])
    axes.invert_xaxis()
    axes.set_xlabel("memory of the large tables, as a part of the full ones'")
    axes.set_ylabel("AUC, validation")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.endswith("svg") else None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="compression.jsonl")
    parser.add_argument(
        "--data", default=tempfile.gettempdir() + "/compression", help="where the data set is made, or lies"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--quick", action="store_true", help="40,000 rows, one seed, 1/16 alone")
    parser.add_argument("--report", action="store_true", help="print what the output file holds")
    parser.add_argument("--picture", metavar="FILE", help="draw it, as SVG or PNG by the name's end")
    return parser.parse_args()


def main() -> None:
    options: Any = parse()
    if not options.report and not options.picture:
        Path(options.data).mkdir(parents=True, exist_ok=True)
        logging.getLogger("pipeline").setLevel(logging.WARNING)
        run(options)
    rows = read_rows(Path(options.output))
    if options.picture:
        draw(rows, options.picture)
    print(report(rows))


if __name__ == "__main__":
    main()
