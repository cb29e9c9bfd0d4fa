"""Canary serving under hot swaps, deltas and failures: shares, mixed answers, and how soon a bad version is stopped.

    python -m benchmarks.canary --answers 1000000 --output docs/measurements/canary.json

The answers are in-process calls of the server's router, with the real slots, batchers and registry. The models are stand-ins
whose scores all state their version, so an answer of two versions shows itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.about import about
from pipeline.config.columns import ColumnsConfig
from pipeline.config.retraining import GateConfig
from pipeline.config.serving import BatchingConfig, LimitsConfig
from pipeline.extras.canary.config import CanaryJob
from pipeline.extras.canary.evaluate import decide
from pipeline.extras.canary.pair_log import SCHEMA
from pipeline.extras.canary.pointer import CanaryFile
from pipeline.extras.canary.router import Canary, CanarySettings, is_in_share
from pipeline.retraining.find_artifact import find_artifact
from pipeline.retraining.registry import Registry
from pipeline.serving.http.batching import Overloaded, ServerMetrics
from pipeline.serving.http.routing import ServerParts
from pipeline.serving.http.switching import ModelSlot
from pipeline.serving.scoring.load import FoundArtifact
from pipeline.serving.scoring.scorer import ColumnLists, schema_of

COLUMNS = ColumnsConfig(label="label", dense=["price"], sparse=["city"])
SCHEMA_OF_ROWS = schema_of(COLUMNS)
MAX_ROWS = 8  # of a batch: larger requests are scored in several batches
CONCURRENT = 64
FAILS = 97  # a failing challenger fails at every 97th batch


def code(version: str) -> np.float32:
    """The score that a version gives every row."""
    return np.float32((zlib.crc32(version.encode()) % 999_983 + 1) / 1_000_000)


@dataclass
class Coded:
    """A model whose scores are code(version). `delta` is applied as a real delta is, by Batcher.change."""

    name: str
    delta: int = 0
    fails: bool = False
    columns: ColumnsConfig = field(default_factory=lambda: COLUMNS)
    tasks: tuple[Any, ...] = ()
    batches: int = 0

    @property
    def version(self) -> str:
        return f"{self.name}+{self.delta}" if self.delta else self.name

    def score(self, rows: Any) -> Any:
        self.batches += 1
        if self.fails and self.batches > 2 and not self.batches % FAILS:
            raise RuntimeError("planted")
        return SimpleNamespace(scores=np.full(rows.num_rows, code(self.version)), bad_rows=[], row_zero={})

    def unusual(self, row_zero: object) -> str:
        return ""


def registry_of(folder: Path, num_versions: int) -> Registry:
    """A registry of versions whose artifacts are empty; the first is champion."""
    registry = Registry(str(folder / "registry"))
    manifest = folder / "manifest.json"
    manifest.write_text("{}")
    for number in range(1, num_versions + 1):
        version = registry.publish(f"v{number:06d}", {"artifact/manifest.json": str(manifest)}, {})
        if number == 1:
            registry.promote(version, None)
    return registry


def load(found: FoundArtifact) -> Any:
    name = found.key.rpartition(":")[2]
    return Coded(name, fails=name.endswith("4"))


@dataclass
class Counted:
    answers: int = 0
    rows: int = 0
    mixed: int = 0
    overloaded: int = 0
    offered: int = 0  # while a challenger was loaded
    by_canary: int = 0
    fallbacks: int = 0  # the challenger failed, and the champion answered
    strayed: int = 0  # answered by the challenger although the key is not its
    versions: Counter[str] = field(default_factory=Counter)


async def answer_many(folder: Path, num_answers: int, share: float, shadow: float, moves: int) -> Counted:
    """Send requests while champions and challengers change `moves` times, and deltas come in between."""
    registry, file = registry_of(folder, 6), CanaryFile(str(folder / "registry"))
    metrics, batching, limits = (
        ServerMetrics(),
        BatchingConfig(max_rows=MAX_ROWS, max_delay_ms=0.0, latency_budget_ms=600_000.0),
        LimitsConfig(),
    )
    slot = ModelSlot(lambda: find_artifact(registry.path), load, batching, limits, metrics)
    first = find_artifact(registry.path)
    slot.begin(first, load(first))
    settings = CanarySettings(registry.path, shadow=shadow, log=str(folder / "log"), log_mb=4096.0)
    router = Canary(settings, ServerParts(slot, load, batching, limits, metrics, 0.05))
    challenger = router._challenger
    found, number = Counted(), 0

    async def client() -> None:
        nonlocal number
        while number < num_answers:
            number += 1
            num_rows = 1 + number % 12
            columns = [[float(number)] * num_rows, ["x"] * num_rows]
            asked = ColumnLists(SCHEMA_OF_ROWS, columns, num_rows)
            is_offered = challenger.is_loaded
            is_its = is_offered and is_in_share(f"request-{number}", challenger.salt, share)
            try:
                _, _, scored = await router.score(f"request-{number}", b"", lambda model, body: asked)  # noqa: B023
            except Overloaded:
                found.overloaded += 1
                await asyncio.sleep(0.01)
                continue
            found.answers += 1
            found.rows += num_rows
            found.mixed += not (len(scored.scores) == num_rows and (scored.scores == code(scored.version)).all())
            found.versions[scored.version] += 1
            by_canary = scored.version.partition("+")[0] not in ("v000001", "v000002")
            found.offered += is_offered
            found.by_canary += by_canary
            found.fallbacks += is_its and not by_canary
            found.strayed += by_canary and not is_its
            if not found.answers % 100_000:
                print(f"{found.answers:,} answers, {found.mixed} mixed", flush=True)

    async def change() -> None:
        """Move the canary and the champion, and apply deltas to both, at even distances of answers."""
        for move in range(moves):
            while number < num_answers * (move + 1) / (moves + 1):
                await asyncio.sleep(0.005)
                for each in (slot, challenger):
                    if each.is_loaded:
                        scorer: Any = each.model.scorer
                        await each.model.batcher.change(lambda: setattr(scorer, "delta", scorer.delta + 1))  # noqa: B023
            pointer, names = registry.pointer(), registry.names()
            assert pointer is not None
            if file.read().version is not None:
                file.stop("moved")
            if move % 3 == 2:  # the champion changes too
                registry.promote(registry.version(names[(names.index(pointer.version) + 1) % 2]), pointer)
            await slot.check()
            file.start(registry, names[2 + move % 4], share)
            await challenger.check()

    watching = asyncio.create_task(router.watch())
    file.start(registry, "v000003", share)
    await challenger.check()
    await asyncio.gather(change(), *(client() for _ in range(CONCURRENT)))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await router.close()
    await slot.close()
    return found


def mixed_in_log(folder: Path) -> tuple[int, int]:
    """Return how many logged scores there are, and how many are not those of their version."""
    table, scores, wrong = pq.read_table(folder / "log"), 0, 0
    for side in ("champion", "challenger"):
        of_side = table.filter(table[side].is_valid())
        known = {name: code(name) for name in of_side[side].unique().to_pylist()}
        wanted = np.array([known[name] for name in of_side[side].to_pylist()], np.float32)
        scores += len(wanted)
        wrong += int(np.count_nonzero(of_side[f"{side}_score"].to_numpy() != wanted))
    return scores, wrong


def pairs_of(
    champion: np.ndarray, challenger: np.ndarray, labels: np.ndarray, by_canary: np.ndarray | None = None
) -> pa.Table:
    """Labelled rows as evaluate() reads them, one row a request. Rows of the canary have no champion's score."""
    num, own = len(labels), np.zeros(len(labels), np.bool_) if by_canary is None else by_canary
    columns = {
        "request_id": [f"r{each}" for each in range(num)], "row": np.zeros(num, np.int32), "at": np.arange(num, dtype=np.float64),
        "by_challenger": own, "champion": pa.array(np.where(own, None, "a"), pa.string()),
        "champion_score": pa.array(np.where(own, np.nan, champion).astype(np.float32), from_pandas=True),
        "challenger": ["b"] * num, "challenger_score": pa.array(challenger.astype(np.float32), from_pandas=True),
    }  # fmt: skip
    return pa.table(columns, schema=SCHEMA).append_column("label", pa.array(labels.astype(np.float32)))


PLANTED = ("noise", "reversed", "overconfident", "too high", "constant", "not finite", "worse slightly")
SOUND = ("equal", "better")


def planted(kind: str, truth: np.ndarray, champion: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return the challenger's logits. truth: logits of the labels; champion: the champion's logits."""
    found = {
        "equal": champion,
        "better": truth + 0.5 * (champion - truth),
        "noise": champion + draw.normal(0, 1.0, len(truth)),
        "reversed": -champion - 4.0,
        "overconfident": 2.5 * champion,
        "too high": champion + 0.4,
        "constant": np.full(len(truth), champion.mean()),
        "not finite": np.where(draw.random(len(truth)) < 0.001, np.nan, champion),
        "worse slightly": champion + draw.normal(0, 0.4, len(truth)),
    }
    return found[kind]


def decisions(num_draws: int, num_rows: int, kinds: tuple[str, ...] = (*SOUND, *PLANTED)) -> Iterator[dict[str, Any]]:
    """Yield for each kind of challenger how often one evaluation of num_rows labelled rows stops, promotes or waits."""
    job = CanaryJob(registry="r", gate=GateConfig(bootstrap_samples=200))
    for kind in kinds:
        counts: Counter[str] = Counter()
        for seed in range(num_draws):
            draw = np.random.default_rng([seed, zlib.crc32(kind.encode())])
            truth = draw.normal(-2.0, 1.2, num_rows)
            labels = draw.random(num_rows) < 1 / (1 + np.exp(-truth))
            champion = truth + draw.normal(0, 0.3, num_rows) - 0.045  # so that it is calibrated
            scores = [1 / (1 + np.exp(-each)) for each in (champion, planted(kind, truth, champion, draw))]
            counts[decide(job, pairs_of(*scores, labels), is_over=False).action] += 1
        shown = ", ".join(f"{action} {counts[action]}" for action in ("stop", "promote", "wait") if counts[action])
        yield {
            "case": f"one evaluation, challenger {kind}",
            "count": num_draws,
            "unit": f"evaluations of {num_rows:,} rows",
            "result": shown,
        }


def measure(
    folder: Path, num_answers: int, share: float = 0.1, shadow: float = 0.05, moves: int = 12
) -> list[dict[str, Any]]:
    """Return the figures of answers."""
    found = asyncio.run(answer_many(folder, num_answers, share, shadow, moves))
    logged, wrong = mixed_in_log(folder)
    error = math.sqrt(share * (1 - share) / found.offered)
    taken = (found.by_canary + found.fallbacks) / found.offered
    kept = f"{taken:.5f}, {(taken - share) / error:+.2f} standard errors"
    return [
        _figure(f"answers with rows of two versions; {len(found.versions):,} versions served", found.answers, f"answers, {found.rows:,} rows", f"{found.mixed} mixed"),
        _figure("logged scores that differ from the score of their version", logged, "scores", f"{wrong} wrong"),
        _figure(f"share of the canary, {share:g} wanted", found.offered, "answers while there was one", kept),
        _figure("answers by the canary although the key is not its", found.by_canary, "answers by the canary", f"{found.strayed} strayed"),
        _figure("answers by the champion because the canary failed", found.fallbacks, "answers", f"{found.overloaded} more were refused"),
    ]  # fmt: skip


def _figure(case: str, count: int, unit: str, result: str) -> dict[str, Any]:
    return {"case": case, "count": count, "unit": unit, "result": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), given.answers)
    figures += decisions(given.draws, given.rows)
    for figure in figures:
        print(f"{figure['case']:<70}{figure['count']:>10,} {figure['unit']:<34}{figure['result']}")
    if given.output:
        given.output.write_text(json.dumps({"about": about(), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
