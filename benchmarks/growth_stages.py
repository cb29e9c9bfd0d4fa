"""Run one stage of the pipeline at one size, in a process of its own, and print what it cost:

    python -m benchmarks.growth_stages STAGE SIZE FOLDER

benchmarks/growth.py calls it for each point of its curves. A stage that is a verb is counted whole, its start included; of the
others the work alone is. Files that several points share (raw rows, prepared sets, runs) stay in FOLDER.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch
from torch import nn

from benchmarks.planner_suites import Suite, build_request, synthetic_tables
from benchmarks.prepare import measure
from benchmarks.serving_artifacts import DENSE, SPARSE
from pipeline.config.columns import ColumnsConfig
from pipeline.config.generated import SyntheticConfig
from pipeline.config.planner import PlannerConfig
from pipeline.data.generate.synthetic import write_source
from pipeline.data.raw.source import TEACHER_SUFFIX

DIM = 64
COLUMNS = ColumnsConfig(dense=["age", "price"], sparse=["user", "item", "page", "hour"])
CARDINALITIES = [1_000_000, 100_000, 1000, 24]
TRAINED_ROWS = 10_000_000  # of the set that is trained on and predicted
EVALUATED_ROWS = 40_000_000  # of which four fifths, the training split, are evaluated
VALUE_ROWS = 60_000_000  # whatever the number of distinct values
CHUNK_ROWS = 1_000_000
PLAN_RANKS, PLAN_TABLES = 16, 400
SERVED_ROWS = 2000  # of each of 26 tables


@dataclass
class Cost:
    """CPU-seconds of the work, on all threads; the highest resident memory, of a verb's process or above that before the work."""

    cpu_seconds: float = 0.0
    peak_mib: float = 0.0


@dataclass(frozen=True)
class Stage:
    """`most` is the exponent that its curve may have; what grows is `unit`."""

    name: str
    unit: str
    sizes: list[int]
    run: Callable[[Path, int], Cost]
    most: float = 1.1


STAGES: dict[str, Stage] = {}


def stage(unit: str, *sizes: int, most: float = 1.1) -> Callable[[Callable[[Path, int], Cost]], object]:
    def listed(function: Callable[[Path, int], Cost]) -> Callable[[Path, int], Cost]:
        STAGES[function.__name__] = Stage(function.__name__, unit, list(sizes), function, most)
        return function

    return listed


def _status_kib(name: str, pid: int | str = "self") -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


@contextmanager
def counted() -> Iterator[Cost]:
    """Its cost is there when the block has ended."""
    cost = Cost()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before, cpu = _status_kib("VmRSS"), _cpu_s()
    yield cost
    cost.cpu_seconds, cost.peak_mib = _cpu_s() - cpu, (_status_kib("VmHWM") - before) / 1024


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def verb(name: str, *words: str) -> Cost:
    used = measure([sys.executable, "-m", "pipeline", name, *words])
    return Cost(used.cpu_seconds, used.peak_mib)


def once(path: Path, make: Callable[[Path], object]) -> Path:
    """What `make` writes to the path; a point that was killed leaves it under another name."""
    if not path.exists():
        unfinished = path.with_name(f"unfinished_{path.name}")
        make(unfinished)
        os.rename(unfinished, path)
    return path


def raw_rows(work: Path, num_rows: int) -> Path:
    config = SyntheticConfig(num_rows=num_rows, cardinalities=CARDINALITIES, num_dense=2, num_interactions=1)

    def write(path: Path) -> None:
        write_source(config, str(path), names=COLUMNS)
        Path(f"{path}{TEACHER_SUFFIX}").unlink()  # nobody asks for it, and it has a third of the bytes

    return once(work / f"rows_{num_rows}.tsv", write)


def data_words(folder: Path, columns: ColumnsConfig = COLUMNS) -> list[str]:
    return [
        "data.name=growth",
        "data.format=tsv",
        f"data.columns.dense=[{','.join(columns.dense)}]",
        f"data.columns.sparse=[{','.join(columns.sparse)}]",
        f"data.path={folder}",
    ]


@stage("rows", 1_000_000, 10_000_000, 100_000_000, 300_000_000)
def prepare_rows(work: Path, size: int) -> Cost:
    raw, prepared = raw_rows(work, size), work / f"prepared_{size}"
    cost = verb("prepare", *data_words(prepared), f"source={raw}")
    if size > TRAINED_ROWS:  # the others are used again
        for path in (raw, prepared):
            _remove(path)
    return cost


VALUES = ColumnsConfig(dense=["age"], sparse=["value"])


def _write_values(path: Path, distinct: int, num_rows: int) -> None:
    generator = np.random.default_rng(0)
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with open(path, "wb") as file:
        file.write(b"label\tage\tvalue\n")
        for first in range(0, num_rows, CHUNK_ROWS):
            places = np.arange(first, min(first + CHUNK_ROWS, num_rows), dtype=np.uint64)
            values = places % np.uint64(distinct) * np.uint64(0x9E3779B97F4A7C15)  # odd: distinct stay distinct
            labels = generator.integers(0, 2, len(places))
            pa.csv.write_csv(pa.table([labels, labels, values], names=["label", "age", "value"]), file, options)


@stage("distinct values in 60M rows", 10_000, 1_000_000, 10_000_000, 50_000_000)
def prepare_values(work: Path, size: int) -> Cost:
    raw, prepared = work / f"values_{size}.tsv", work / f"prepared_values_{size}"
    once(raw, lambda path: _write_values(path, size, VALUE_ROWS))
    cost = verb("prepare", *data_words(prepared, VALUES), f"source={raw}")
    for path in (raw, prepared):
        _remove(path)
    return cost


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


MODEL = ["model=dlrm", "model.dense_arch_layer_sizes=[32,16]", "model.over_arch_layer_sizes=[32,1]", "hardware=cpu"]


def trained_run(work: Path, num_rows: int = TRAINED_ROWS) -> Path:
    def train(path: Path) -> None:
        raw, prepared = raw_rows(work, num_rows), work / f"prepared_{num_rows}"
        if not prepared.exists():
            verb("prepare", *data_words(prepared), f"source={raw}")
        words = ["tables.default.embedding_dim=16", "trainer.max_steps=20", "trainer.global_batch_size=4096"]
        verb("train", "name=growth", *MODEL, *data_words(prepared), f"run_dir={path}", *words)

    return once(work / f"run_{num_rows}", train)


@stage("rows", 8192, 1_048_576, 7_995_392, 31_981_568)
def evaluate(work: Path, size: int) -> Cost:
    run = trained_run(work, EVALUATED_ROWS)
    return verb(
        "evaluate", f"run={run}", "split=train", "global_batch_size=8192", f"max_batches={size // 8192}", "step=20"
    )


@stage("rows", 10_000, 1_000_000, 10_000_000)
def predict(work: Path, size: int) -> Cost:
    artifact = work / "artifact"
    if not artifact.exists():
        verb("export", f"run={trained_run(work)}", f"output={artifact}", "precision=int8")
    output = work / f"scores_{size}.parquet"
    cost = verb("predict", f"artifact={artifact}", f"source={raw_rows(work, size)}", f"output={output}", "format=tsv")
    output.unlink()
    return cost


@stage("rows of 64 numbers", 250_000, 2_000_000, 8_000_000)
def export(work: Path, size: int) -> Cost:
    raw = once(work / "few_values.tsv", lambda path: _write_values(path, 50_000, 100_000))
    prepared, run, artifact = (work / f"export_{what}_{size}" for what in ("set", "run", "artifact"))
    words = [*data_words(prepared, VALUES), "data.ids.kind=hash", f"data.ids.hash_size={size}"]
    once(prepared, lambda path: verb("prepare", *data_words(path, VALUES), *words[5:], f"source={raw}"))
    table = [f"tables.default.embedding_dim={DIM}", "model.dense_arch_layer_sizes=[32,64]"]
    steps = ["trainer.max_steps=5", "trainer.global_batch_size=4096", "trainer.evaluate_max_batches=2"]
    if not run.exists():
        verb("train", "name=growth", *MODEL, *words, *table, *steps, f"run_dir={run}")
    cost = verb("export", f"run={run}", f"output={artifact}", "precision=int8")
    for path in (prepared, run, artifact):
        _remove(path)
    return cost


class Tables(nn.Module):
    """Eight tables of `rows` rows together."""

    def __init__(self, rows: int, value: float) -> None:
        super().__init__()
        self.tables = nn.ParameterList([torch.full((rows // 8, DIM), value) for _ in range(8)])


@contextmanager
def one_rank(work: Path) -> Iterator[object]:
    import torch.distributed as dist

    from pipeline.runtime.process.distributed import DistributedContext

    store = work / f"store_{os.getpid()}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield DistributedContext(0, 1, 0, 1, torch.device("cpu"), "gloo")
    dist.destroy_process_group()


@stage("rows of 64 numbers", 262_144, 2_097_152, 8_388_608)
def draw(work: Path, size: int) -> Cost:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    from pipeline.embeddings.collection import Uniform
    from pipeline.sharding.torchrec.table_init import disable_huge_pages, initialize_tables

    def collection(rows: int) -> EmbeddingBagCollection:
        config = EmbeddingBagConfig(num_embeddings=rows, embedding_dim=DIM, name="table", feature_names=["f"])
        config.init_fn = Uniform(0.1)
        return EmbeddingBagCollection(tables=[config], device=torch.device("meta")).to_empty(device="cpu")

    initialize_tables(collection(1024), seed=0)  # compiles
    with counted() as cost:
        tables = collection(size)
        disable_huge_pages(tables)  # as sharding does
        initialize_tables(tables, seed=0)
    return cost


@stage("rows of 64 numbers", 262_144, 2_097_152, 8_388_608)
def save(work: Path, size: int) -> Cost:
    return _save_and_load(work, size)[0]


@stage("rows of 64 numbers", 262_144, 2_097_152, 8_388_608)
def load(work: Path, size: int) -> Cost:
    return _save_and_load(work, size)[1]


def _save_and_load(work: Path, size: int) -> tuple[Cost, Cost]:
    from pipeline.checkpoint.checkpointer import Checkpointer

    folder = work / f"steps_{os.getpid()}"
    with one_rank(work) as context:
        checkpointer = Checkpointer(str(folder), Tables(size, 1.0), None, context)
        with counted() as saved:
            checkpointer.save(1)
        with counted() as loaded:
            checkpointer.restore(1)
    _remove(folder)
    return saved, loaded


@stage("tables at 16 ranks", 26, 100, 400, 2000, most=1.5)
def plan_tables(work: Path, size: int) -> Cost:
    return _plan(size, PLAN_RANKS)


@stage("ranks of 400 tables", 2, 16, 128, 1024, most=1.5)
def plan_ranks(work: Path, size: int) -> Cost:
    return _plan(PLAN_TABLES, size)


def _plan(num_tables: int, ranks: int) -> Cost:
    """Until the plan is proven to be within 5 % of the best."""
    from pipeline.planner.planner import make_plan

    # An eighth of the rows, so that two ranks hold 400 of them.
    tables = [
        dataclasses.replace(table, num_embeddings=table.num_embeddings // 8 + 1)
        for table in synthetic_tables(num_tables)
    ]
    request = build_request(Suite("growth", tables), ranks)
    with counted() as cost:
        record = make_plan(PlannerConfig(gap_tolerance=0.05), request)
    print(f"{num_tables} tables, {ranks} ranks: gap {record.objective.gap}", file=sys.stderr)
    return cost


@dataclass(frozen=True)
class Shape:
    tables: int = 26
    batch: int = 2048
    ids: int = 1
    overrides: list[str] = field(default_factory=list)


@stage("samples a batch", 256, 4096, 65_536)
def step_batch(work: Path, size: int) -> Cost:
    return _step(work, Shape(batch=size))


@stage("tables", 1, 64, 512)
def step_tables(work: Path, size: int) -> Cost:
    return _step(work, Shape(tables=size))


@stage("ids a bag, of 2 features", 1, 50, 200)
def step_ids(work: Path, size: int) -> Cost:
    return _step(work, Shape(tables=2, ids=size))


def _step(work: Path, shape: Shape) -> Cost:
    """Of DLRM-DCN, whose layers grow as tables do: the dot products of DLRM would by their square."""
    from benchmarks.step_models import Preset, draw, our_side
    from pipeline.devices.cpu.process import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()  # as train does
    preset = Preset([100_000] * shape.tables, 16, [64, 16], [64, 1], shape.batch, [shape.ids] * shape.tables, dcn=True)
    words = ["model.dcn_num_layers=1", "model.dcn_low_rank_dim=16", "planner.timeout_s=10"]
    raw = draw(preset, 0)
    with one_rank(work) as context, counted() as cost:
        _, run = our_side(preset, raw, context, words)
        run(10)  # until the heap has found its shape
        marks = []
        for steps in (5, 25):  # the difference leaves out what a fit begins and ends with
            began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF)
            run(steps)
            after = resource.getrusage(resource.RUSAGE_SELF)
            kernel, faults = after.ru_stime - before.ru_stime, after.ru_minflt - before.ru_minflt
            marks.append((time.process_time() - began, kernel, faults))
    cpu_seconds, kernel, faults = ((longer - shorter) / 20 for shorter, longer in zip(*marks, strict=True))
    print(
        f"a step: {kernel:.4f} of {cpu_seconds:.4f} CPU-seconds in the kernel, {faults:,.0f} page faults",
        file=sys.stderr,
    )
    return Cost(cpu_seconds, cost.peak_mib)


@stage("rows a request", 1, 256, 4096)
def serve(work: Path, size: int) -> Cost:
    from benchmarks.serving import server
    from benchmarks.serving_artifacts import Shape as Served
    from benchmarks.serving_artifacts import write_artifact
    from benchmarks.serving_load import post

    artifact = once(work / "served", lambda path: write_artifact(path, Served(SERVED_ROWS), "int8", vocabularies=True))
    bodies = [_body(size, seed) for seed in range(4)]
    with server("pt2", SERVED_ROWS, artifact, "limits.body_mb=64", "limits.rows=4096") as (pid, port):
        post(port, bodies, "application/json", 1, 2.0)
        before = _cpu_of(pid)
        found = post(port, bodies, "application/json", 1, 10.0)
        assert found.seconds and not found.others, f"{found.others} requests were refused"
        return Cost((_cpu_of(pid) - before) / len(found.seconds), _status_kib("VmHWM", pid) / 1024)


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _body(num_rows: int, seed: int) -> bytes:
    generator = np.random.default_rng(seed)
    dense = generator.integers(0, 100, (num_rows, len(DENSE))).tolist()
    sparse = generator.integers(1, SERVED_ROWS, (num_rows, len(SPARSE))).tolist()
    rows = [
        dict(zip([*DENSE, *SPARSE], [*numbers, *values], strict=True))
        for numbers, values in zip(dense, sparse, strict=True)
    ]
    return json.dumps({"rows": rows}).encode()


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[1] not in STAGES:
        print(__doc__, "\nSTAGE:", ", ".join(STAGES))
        return
    name, size, folder = sys.argv[1:]
    cost = STAGES[name].run(Path(folder), int(size))
    print(json.dumps({"stage": name, "size": int(size), **asdict(cost)}), flush=True)


if __name__ == "__main__":
    main()
