"""Measure what differential checkpoints write beside whole ones, whether they bring back every bit, and what tracking rows costs:

    python -m benchmarks.differential [--rows 20000000] [--saves 8] [--rounds 5] [--folder DIR]
    python -m benchmarks.differential --data datasets/quickstart [--saves 40] [--most-bytes 0.5] [--compressed]

One rank trains DLRM with 26 tables in Criteo's proportions, cut so that they have `--rows` rows together, on ids by a power law
of 1.05; an epoch is as many samples as there are rows. It saves after every hundredth of an epoch. With `--data` the steps are
those of the train verb on a prepared data set. Whole steps are counted by saving one. Tracking is timed in rounds that go
without it, with it, without it (A B A), in the same process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from benchmarks.step_models import KAGGLE, NUM_DENSE
from pipeline.checkpoint.chains import open_step, open_tensors
from pipeline.checkpoint.changes import CHECKPOINT
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.metadata import TensorsOnlyReader
from pipeline.checkpoint.steps import is_link, list_steps, read_manifest, step_path
from pipeline.checkpoint.tables import flatten, inventory_of_state
from pipeline.checkpoint.tensors import StepTensors
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import Dataset, FrequencyCurve, SparseFeature, Split, load_dataset
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.devices.process_group import init_distributed
from pipeline.extras.differential.links import Differential, is_change
from pipeline.extras.differential.tracked_rows import TrackedRows
from pipeline.planner.resolved_job import resolve_job
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.sharding.torchrec.cpu_tables import fast_lookups
from pipeline.training.optimizer import build_optimizer
from pipeline.training.readers import open_reader
from pipeline.training.sharded_model import build_sharded_model

Words = NDArray[np.uint32]
BATCH, DIM, EXPONENT = 2048, 16, 1.05
LAYERS = ["model.dense_arch_layer_sizes=[64,32,16]", "model.over_arch_layer_sizes=[64,32,1]"]


def cut(total: int) -> list[int]:
    """KAGGLE's rows, the largest tables cut alike so that they have about `total` rows together."""
    low, high = 1, max(KAGGLE)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(min(rows, middle) for rows in KAGGLE) <= total else (low, middle - 1)
    return [min(rows, low) for rows in KAGGLE]


def power_law(sizes: list[int]) -> Iterator[Batch]:
    """Endless; the most frequent id of each table is 0."""
    sums = {rows: np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT) for rows in set(sizes)}
    names, generator = [f"cat_{index}" for index in range(len(sizes))], np.random.default_rng(0)
    while True:
        ids = [np.searchsorted(sums[rows], generator.random(BATCH) * sums[rows][-1]) for rows in sizes]
        values = torch.from_numpy(np.concatenate(ids)).clamp(max=max(sizes) - 1)
        lengths = torch.ones(len(values), dtype=torch.int32)
        features = keyed_jagged_tensor(names, values, lengths, BATCH, [BATCH] * len(sizes))
        labels = torch.from_numpy(generator.integers(0, 2, BATCH).astype(np.float32))
        yield Batch(torch.randn(BATCH, NUM_DENSE), features, labels, torch.ones(BATCH))


def job_of(data: str | None) -> TrainJob:
    common = ["hardware=cpu", "name=differential", f"trainer.global_batch_size={BATCH}"]
    if data:
        return load_config(TrainJob, ["experiment=quickstart", f"data.path={data}", *common])
    return load_config(
        TrainJob, ["data=quickstart", "model=dlrm", *LAYERS, f"tables.default.embedding_dim={DIM}", *common]
    )


def described(sizes: list[int]) -> Dataset:
    features = [
        SparseFeature(f"cat_{index}", rows, False, 1.0, FrequencyCurve([1, rows], [rows**-0.25, 1.0]))
        for index, rows in enumerate(sizes)
    ]
    splits = {"train": Split([], 10**6, 10**5)}
    dense = [f"int_{index}" for index in range(NUM_DENSE)]
    return Dataset("power_law", "label", dense, features, splits, 10**6, 10**6, 0, "log1p")


class Run:
    """One model that trains on endless batches."""

    def __init__(self, data: str | None, rows: int, context: DistributedContext) -> None:
        job, sizes = job_of(data), cut(rows)
        resolved = resolve_job(job, load_dataset(data) if data else described(sizes), 1)
        self.model = build_sharded_model(resolved, context).model
        self.optimizer = build_optimizer(self.model, job.optimizer, job.model.l2)
        reader = open_reader(resolved, "train", context) if data else None
        self.samples = reader.num_rows if reader else rows
        self.batches = self._of(reader) if reader else power_law(sizes)
        self.model.train()

    @staticmethod
    def _of(reader: Any) -> Iterator[Batch]:
        for epoch in range(10**6):
            yield from reader.batches(epoch)

    def steps(self, count: int) -> float:
        """Seconds a step, without those of reading."""
        seconds = 0.0
        for _ in range(count):
            batch = next(self.batches)
            began = time.perf_counter()
            self.optimizer.zero_grad()
            loss, _ = self.model(batch)
            loss.backward()
            self.optimizer.step()
            seconds += time.perf_counter() - began
        return seconds / count

    def state(self) -> dict[str, Any]:
        return flatten({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def written(run: Run, folder: str, saves: int, most_bytes: float, context: DistributedContext, is_packed: bool) -> None:
    every = max(1, round(run.samples / 100 / BATCH))
    rows = TrackedRows(run.model, run.optimizer.replicated, [CHECKPOINT])
    checkpointer = Checkpointer(
        folder,
        run.model,
        run.optimizer,
        context,
        saves + 1,
        differential=Differential(rows, 100, most_bytes, is_packed),
    )
    seconds = {True: [], False: []}  # type: dict[bool, list[float]]
    for number in range(saves + 1):
        began = time.perf_counter()
        checkpointer.save(number * every)
        is_link = (Path(folder) / f"step_{number * every:08d}" / "manifest.json").read_text().find('"chain"') > 0
        seconds[is_link].append(time.perf_counter() - began)
        if number < saves:
            run.steps(every)
    sizes = [folder_bytes(Path(folder) / f"step_{step:08d}") for step in list_steps(folder)]
    whole, links = sizes[0], [size for size in sizes[1:] if size < sizes[0] * 0.99]
    tables = inventory_of_state(run.state()).tables.values()
    print(
        f"tables          {sum(table.rows for table in tables):,} rows x {DIM}, {run.samples:,} samples an epoch, a save every {every} steps"
    )
    print(f"whole step      {whole:,} bytes, {statistics.median(seconds[False]):.2f} s")
    link_bytes = statistics.mean(links)
    print(
        f"link            {link_bytes:,.0f} bytes on average of {len(links)}, {whole / link_bytes:.1f} x less, {statistics.median(seconds[True]):.2f} s"
    )
    print(
        f"all {len(sizes):3} saves   {sum(sizes):,} bytes, {len(sizes) * whole / sum(sizes):.1f} x less than {len(sizes)} whole steps, bases included"
    )
    if not is_packed:
        count_kinds(folder)
    compare(run, folder)


def count_kinds(folder: str) -> None:
    """What the bytes of the newest link are, and what would be left of them if each byte plane of the differences were compressed."""
    links = [
        (path, manifest)
        for path in (step_path(folder, step) for step in list_steps(folder))
        if is_link(manifest := read_manifest(path))
    ]
    if not links:
        return
    path, manifest = links[-1]
    tensors = StepTensors(path, TensorsOnlyReader(path, manifest))
    before = open_tensors(step_path(folder, int(manifest["chain"]["previous"])))
    kinds: dict[str, list[int]] = {}
    for key in tensors.entries:
        kind, values, earlier = of_link(key, tensors, before)
        count = kinds.setdefault(kind, [0, 0])
        count[0] += values.nbytes
        count[1] += min(packed(values), packed(values ^ earlier) if earlier is not None else values.nbytes)
    size = folder_bytes(Path(path))
    left = size - sum(count for count, _ in kinds.values())
    print(
        f"of a link       {size:,} bytes: "
        + ", ".join(f"{kind} {a:,} (packed {b:,})" for kind, (a, b) in kinds.items())
        + f", archives and manifest {left:,}; packed without the latter {sum(b for _, b in kinds.values()):,}"
    )
    pack_files(Path(path), manifest)


def pack_files(path: Path, manifest: dict[str, Any]) -> None:
    """What zstd makes of a link's files as they lie, byte plane by byte plane, and of the number of rows that it holds."""
    began, sizes, left = time.process_time(), dict[str, int](), dict[str, int]()
    for file in sorted(each for each in path.rglob("*") if each.is_file()):
        kind, content = file.suffix or file.name, np.frombuffer(file.read_bytes(), np.uint8)
        planes = [content[first::4] for first in range(4)] if kind == ".distcp" else [content]
        sizes[kind] = sizes.get(kind, 0) + len(content)
        codec = pa.Codec("zstd", 3)
        left[kind] = left.get(kind, 0) + sum(
            min(len(plane), len(codec.compress(plane.tobytes(), asbytes=True))) for plane in planes
        )
    tensors = StepTensors(str(path), TensorsOnlyReader(str(path), manifest))
    rows = sum(tensors.shape(key)[0] for key in tensors.entries if key.endswith("/rows") and is_change(key))
    print(
        "files of a link "
        + ", ".join(f"{kind} {size:,} (zstd {left[kind]:,})" for kind, size in sizes.items())
        + f": {sum(left.values()):,} bytes in {time.process_time() - began:.3f} CPU-s; {rows:,} changed rows"
    )


def of_link(key: str, tensors: StepTensors, before: StepTensors) -> tuple[str, Words, Words | None]:
    """(kind, values, the values of the step before) of one tensor, as words of 32 bits where it has such."""
    values = words(tensors.read(key, [0] * len(tensors.shape(key)), tensors.shape(key)))
    if not is_change(key):
        same = key in before.entries and before.shape(key) == tensors.shape(key)
        earlier = words(before.read(key, [0] * len(before.shape(key)), before.shape(key))) if same else None
        return "layers and their state", values, earlier
    parts = key.split("/", 5)
    rows = tensors.read(f"changed/{parts[1]}/rows", [0], tensors.shape(f"changed/{parts[1]}/rows")).long()
    if parts[2] == "rows":
        return "row numbers", words(rows.diff(prepend=rows[:1] * 0).int()), None
    whole = before.read(parts[5], [0] * len(before.shape(parts[5])), before.shape(parts[5]))
    return "rows of tables and their state", values, words(whole[rows + int(parts[3])])


def words(values: torch.Tensor) -> Words:
    numbers = values.contiguous().numpy().reshape(-1)
    return numbers.view(np.uint32) if numbers.dtype.itemsize % 4 == 0 else numbers.view(np.uint8).astype(np.uint32)


def packed(values: Words) -> int:
    planes = values.view(np.uint8).reshape(-1, 4).T
    return sum(min(len(zlib.compress(plane.tobytes(), 6)), plane.size) for plane in planes)


def compare(run: Run, folder: str) -> None:
    """The newest step, read through its chain, with what is in memory."""
    step, manifest, tensors = open_step(folder, None)
    differing = 0
    for key, value in run.state().items():
        shards = value.local_shards() if hasattr(value, "local_shards") else None
        for part, offsets in (
            [(one.tensor, one.metadata.shard_offsets) for one in shards] if shards else [(value, [0] * value.dim())]
        ):
            stored = tensors.read(key, offsets, part.shape)
            differing += int((stored != part.detach()).sum())
    links = manifest.get("chain", {}).get("links", 0)
    print(f"restored        step {step}, {links} links on a base: {differing} numbers differ from those in memory")


def tracking(run: Run, rounds: int) -> None:
    """Written last: the bitmaps are there."""
    lookups = fast_lookups(run.model)
    marks = [lookup._marks for lookup in lookups]
    ratios = []
    for _ in range(rounds):
        times = []
        for on in (False, True, False):
            for lookup, own in zip(lookups, marks, strict=True):
                lookup._marks = own if on else np.empty(0, np.uint8)
            times.append(run.steps(20))
        ratios.append(2 * times[1] / (times[0] + times[2]))
    print(
        f"tracking        {100 * (statistics.median(ratios) - 1):+.2f} % of a step ({100 * (min(ratios) - 1):+.2f} .. {100 * (max(ratios) - 1):+.2f} in {rounds} rounds)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--most-bytes", type=float, default=0.5, help="of links, times the base's, before a base follows"
    )
    parser.add_argument("--compressed", action="store_true", help="checkpoint.compress_links")
    parser.add_argument("--folder")
    options = parser.parse_args()
    context = init_distributed()
    run = Run(options.data, options.rows, context)
    run.steps(4)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        written(run, f"{folder}/checkpoints", options.saves, options.most_bytes, context, options.compressed)
    if options.rounds:
        tracking(run, options.rounds)


if __name__ == "__main__":
    main()
