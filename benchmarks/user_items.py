"""Compare four ways to score 256 items for one user:

    python -m benchmarks.user_items [--quick] [--seconds 24] [--users 1000000] [--output docs/measurements/user_items.json]

full rows: the request has the user's columns in each row. tiled: the request has the user's columns once, and the server repeats the
encoded user for each item before the tables and layers, which is TorchEasyRec's way (benchmarks/serving_server.py). by user: the
server looks up the user once too. by id: the request has only the user's id, and a feature table of the artifact has the user's
columns. All four give scores with the same bits, which is checked first.

Two models: a DLRM of 26 tables and 13 numbers, where the items have 8 of the tables and 3 of the numbers; and DIN with three
sequences of at most 50 positions, where the items have an id and a category. Each server is a process of its own with one thread.
One client asks at the same rate for all, half of what full rows reach, and the servers take turns. CPU time is the server's own.

At the end a feature table of --users users with the user's columns of the DLRM is written, opened and read in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa

from benchmarks.about import about
from benchmarks.serving import bodies_of, measure, server
from benchmarks.serving_artifacts import DENSE, SPARSE, Shape, write_artifact
from pipeline.config.serving import LimitsConfig
from pipeline.extras.feature_tables.export import sorted_by_hash
from pipeline.extras.feature_tables.tables import open_feature_tables
from pipeline.serving.artifact.manifest import Manifest, read_manifest
from pipeline.serving.artifact.writer import write_arrow
from pipeline.serving.http.request_rows import ARROW_TYPE, JSON_TYPE, RequestReader
from pipeline.serving.scoring.artifact_files import ArtifactFiles
from pipeline.serving.scoring.raw_rows import RowEncoder
from pipeline.serving.scoring.scorer import ColumnLists

NUM_ITEMS, NUM_USERS, ROUNDS = 256, 40, 4
WAYS = ["full rows", "tiled", "by user", "by id"]
USER_ID = "user_id"  # the models do not read it
HISTORIES = [
    "data.generator.num_items=5000", "data.generator.num_categories=60", "data.generator.max_length=50",
    "data.columns.sequence.history.max_length=50",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`full`: rows of each user with its items; `of_items`: the columns of the items."""

    name: str
    artifact: Path
    table_rows: int
    full: list[pa.Table]
    of_items: list[str]

    @property
    def users(self) -> pa.Table:
        """The columns of each user."""
        of_user = [name for name in self.full[0].column_names if name not in self.of_items]
        return pa.concat_tables([rows.select(of_user).slice(0, 1) for rows in self.full]).combine_chunks()

    def bodies(self, way: str, content_type: str) -> list[bytes]:
        return [self._body(number, rows, way, content_type) for number, rows in enumerate(self.full)]

    def _body(self, number: int, rows: pa.Table, way: str, content_type: str) -> bytes:
        if way == "full rows":
            return _arrow(rows) if content_type == ARROW_TYPE else _json({"rows": rows.to_pylist()})
        of_user = [name for name in rows.column_names if name not in self.of_items]
        asked = {
            "user": {USER_ID: f"u{number}"} if way == "by id" else rows.select(of_user).slice(0, 1).to_pylist()[0],
            "items": rows.select(self.of_items).to_pylist(),
        }
        return _arrow(pa.Table.from_pylist([asked])) if content_type == ARROW_TYPE else _json(asked)


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _arrow(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _for_one_user(rows: pa.Table, of_items: list[str]) -> pa.Table:
    """Give all rows the user's columns of row 0."""
    first = pa.array(np.zeros(rows.num_rows, np.int64))
    return pa.table({name: rows[name] if name in of_items else rows[name].take(first) for name in rows.column_names})


def with_table(artifact: Path, users: pa.Table, output: Path) -> Path:
    """Copy the artifact, and add a feature table of users u0, u1 and so on."""
    shutil.copytree(artifact, output, copy_function=os.link)
    manifest, file = read_manifest(str(artifact)), "features/00000.arrow"
    types = pa.schema([manifest.schema.types.field(name) for name in users.column_names])
    ids = pa.array([f"u{number}" for number in range(users.num_rows)], pa.large_string())
    (output / "features").mkdir()
    entry = write_arrow(str(output / file), sorted_by_hash(USER_ID, ids, users.cast(types)), is_mapped=True)
    (output / "manifest.json").unlink()
    changed = replace(manifest, files={**manifest.files, file: entry}, feature_tables={USER_ID: file})
    (output / "manifest.json").write_text(changed.to_text())
    return output


def many_users(case: Case, count: int, folder: Path) -> dict[str, Any]:
    """Return what a table of many users takes: bytes, seconds to open, and microseconds to fill a request."""
    users = case.users.take(pa.array(np.arange(count) % case.users.num_rows))
    path = with_table(case.artifact, users, folder / "many")
    manifest: Manifest = read_manifest(str(path))
    columns = RowEncoder(
        manifest.schema, ArtifactFiles(str(path), manifest, False).vocabularies(manifest.schema.features)
    ).layout.columns
    opened: dict[str, float] = {}
    for name, verify in (("opened_s", True), ("opened_without_checksums_s", False)):
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            tables = open_feature_tables(ArtifactFiles(str(path), manifest, verify), columns)
            seconds.append(time.perf_counter() - started)
        opened[name] = round(min(seconds), 3)
    chance = np.random.default_rng(0)
    items = case.full[0].select(case.of_items).to_pylist()
    readers = {
        "by id": RequestReader(columns, LimitsConfig(), tables=tables),
        "by user": RequestReader(columns, LimitsConfig()),
    }
    found: dict[str, list[float]] = {name: [] for name in readers}
    own = users.slice(0, 1).to_pylist()[0]
    for _ in range(300):  # in turns, so that both see the same machine
        asked = {"by id": {USER_ID: f"u{chance.integers(count)}"}, "by user": own}
        for name, reader in readers.items():
            body = _json({"user": asked[name], "items": items})
            started = time.perf_counter()
            reader.read(body, JSON_TYPE)
            found[name].append(time.perf_counter() - started)
    fills, schema = [], pa.schema([(USER_ID, pa.string())])
    for number in chance.integers(count, size=3000).tolist():
        row = ColumnLists(schema, [[f"u{number}"]], 1)
        started = time.perf_counter()
        tables.fill(row)
        fills.append(time.perf_counter() - started)
    size = int(manifest.files["features/00000.arrow"]["size_bytes"])
    reads = {
        f"reading_{name.replace(' ', '_')}_us": round(1e6 * statistics.median(each)) for name, each in found.items()
    }
    about = {"users": count, "columns": users.num_columns, "bytes_per_user": round(size / count, 1), **opened}
    return {**about, "lookup_us": round(1e6 * statistics.median(fills), 1), **reads}


def dlrm(folder: Path, table_rows: int) -> Case:
    of_items = [*DENSE[:3], *SPARSE[:8]]
    asked = [pa.ipc.open_stream(body).read_all() for body in bodies_of(table_rows, NUM_ITEMS, True, count=NUM_USERS)]
    texts = [
        rows.cast(pa.schema([(name, pa.float64() if name in DENSE else pa.string()) for name in rows.column_names]))
        for rows in asked
    ]
    artifact = write_artifact(folder / "dlrm", Shape(table_rows), "int8", vocabularies=True)
    return Case("DLRM", artifact, table_rows, [_for_one_user(rows, of_items) for rows in texts], of_items)


def din(folder: Path) -> Case:
    raw, data = folder / "histories.tsv", f"data.path={folder / 'prepared'}"
    steps = ["trainer.max_steps=10", "trainer.evaluate_max_batches=1"]
    for words in (
        ["generate", "data=histories", *HISTORIES, "data.generator.num_rows=40000", f"output={raw}"],
        ["prepare", "data=histories", *HISTORIES, data, f"source={raw}"],
        ["train", "experiment=histories_din", *HISTORIES, data, *steps, f"run_dir={folder / 'run'}", "hardware=cpu"],
        ["export", f"run={folder / 'run'}", "precision=int8", f"output={folder / 'din'}", "parity.max_rows=1000"],
    ):
        subprocess.run([sys.executable, "-m", "pipeline", *words], check=True, stdout=subprocess.DEVNULL)
    lines = raw.read_text().splitlines()
    names, of_items = ["item_id", "category", "history", "history_category", "history_dwell"], ["item_id", "category"]
    head = lines[0].split("\t")
    values = [dict(zip(head, line.split("\t"), strict=True)) for line in lines[1 : 1 + NUM_ITEMS * NUM_USERS]]
    rows = [
        {name: value[name] if name in of_items else [text for text in value[name].split("|") if text] for name in names}
        for value in values
    ]
    longest = sorted(rows, key=lambda row: -len(row["history"]))[:NUM_USERS]
    asked = []
    for number, user in enumerate(longest):
        own = rows[number * NUM_ITEMS : (number + 1) * NUM_ITEMS]
        asked.append(pa.Table.from_pylist([{**user, **{name: row[name] for name in of_items}} for row in own]))
    return Case("DIN, 3 sequences of 50", folder / "din", 1, asked, of_items)


def compare(case: Case, seconds: float) -> list[dict[str, Any]]:
    """Each format and way: a figure. Raises AssertionError if a way gives other scores."""
    found: dict[tuple[str, str], list[Any]] = {}
    with contextlib.ExitStack() as stack:
        own, tiled = (stack.enter_context(server(kind, case.table_rows, case.artifact)) for kind in ("pt2", "tiled"))
        filled = with_table(case.artifact, case.users, case.artifact.parent / f"{case.artifact.name}_with_users")
        by_id = stack.enter_context(server("pt2", case.table_rows, filled))
        servers = dict(zip(WAYS, [own, tiled, own, by_id], strict=True))
        for kind in (JSON_TYPE, ARROW_TYPE):
            bodies = {way: case.bodies(way, kind) for way in WAYS}
            _check_same(bodies, servers, kind)
            rate = 0.0
            for _ in range(ROUNDS):
                for way, (pid, port) in servers.items():
                    if not rate:
                        rate = measure(way, pid, port, bodies[way], kind, seconds / ROUNDS, connections=1).qps / 2
                    one = measure(way, pid, port, bodies[way], kind, seconds / ROUNDS, rate, 1)
                    assert not one.others, f"{one.others} requests were refused"
                    found.setdefault((kind, way), []).append(one)
            for way in WAYS:
                print(_figure(case, kind, way, bodies[way], found), flush=True)
    return [_figure(case, kind, way, case.bodies(way, kind), found) for kind, way in found]


def _figure(
    case: Case, kind: str, way: str, bodies: list[bytes], found: dict[tuple[str, str], list[Any]]
) -> dict[str, Any]:
    turns, full = found[kind, way], found[kind, "full rows"]
    cpu_ms, cpu_of_full = (statistics.median(one.cpu_ms for one in each) for each in (turns, full))
    return {
        "model": case.name,
        "format": "JSON" if kind == JSON_TYPE else "Arrow",
        "request": way,
        "bytes": round(statistics.mean(map(len, bodies))),
        "cpu_ms": cpu_ms,
        "p50_ms": statistics.median(one.p50_ms for one in turns),
        "p99_ms": statistics.median(one.p99_ms for one in turns),
        "cpu_of_full_rows_percent": round(100 * cpu_ms / cpu_of_full),
    }


def _check_same(bodies: dict[str, list[bytes]], servers: dict[str, tuple[int, int]], kind: str) -> None:
    for asked in zip(*bodies.values(), strict=True):
        answers = [
            httpx.post(
                f"http://127.0.0.1:{port}/score", content=body, headers={"Content-Type": kind, "Accept": JSON_TYPE}
            ).json()["scores"]
            for body, (_, port) in zip(asked, servers.values(), strict=True)
        ]
        assert len(answers[0]) == NUM_ITEMS and all(each == answers[0] for each in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="small tables and short loads: that it works, not how fast"
    )
    parser.add_argument("--seconds", type=float, default=None, help="of load for each way and format")
    parser.add_argument("--users", type=int, default=None, help="of the feature table that is read at the end")
    parser.add_argument("--output", default=None)
    options = parser.parse_args()
    seconds = options.seconds or (2.0 if options.quick else 24.0)
    with tempfile.TemporaryDirectory() as folder:
        cases = [dlrm(Path(folder), 2000 if options.quick else 50_000), din(Path(folder))]
        figures = [figure for case in cases for figure in compare(case, seconds)]
        users = many_users(cases[0], options.users or (10_000 if options.quick else 1_000_000), Path(folder))
        print(users, flush=True)
    if options.output:
        text = json.dumps({"about": about(items=NUM_ITEMS), "figures": figures, "feature_table": users}, indent=1)
        Path(options.output).write_text(text + "\n")


if __name__ == "__main__":
    main()
